"""Training from scratch: the oracle says what must be learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks import checkpoint, fit
from tasks.data import read
from tasks.files import sha256
from tasks.settings import TrainParams
from tasks.train import train


def test_the_trained_model_agrees_with_the_oracle(artifact: Any, tiny: Any, data_folder: Path) -> None:
    test = read(data_folder / "test.npz")
    logits = fit.predict(checkpoint.load(artifact("base")).model, tiny, test)["logits"]
    assert (logits.argmax(axis=1) == tiny.oracle(test["image"])).mean() > 0.9


def test_the_report_is_of_the_model_written(workload_path: Path, data_folder: Path, tmp_path: Path, tiny: Any) -> None:
    params = TrainParams(epochs=2, batch=64, lr=1e-2, model={"width": 4})
    report = train(workload_path, data_folder, tmp_path / "model", params)
    loaded = checkpoint.load(tmp_path / "model")
    assert loaded.architecture == {"width": 4}
    assert report.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert report.validation == pytest.approx(fit.score(loaded.model, tiny, read(data_folder / "validation.npz")))
    assert len(report.curve) == 2


def test_the_same_params_give_the_same_bytes(workload_path: Path, data_folder: Path, tmp_path: Path) -> None:
    params = TrainParams(epochs=1, batch=64, model={"width": 4})
    for name in ("a", "b"):
        train(workload_path, data_folder, tmp_path / name, params)
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")

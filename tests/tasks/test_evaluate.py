"""Accuracy of a built engine, sample by sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks import checkpoint
from tasks.data import read
from tasks.errors import Fault
from tasks.evaluate import evaluate, predicted, run, scored
from tasks.files import read_json, sha256
from tasks.fit import predict
from tasks.settings import EvaluateParams
from tasks.target import fingerprint


@pytest.mark.parametrize("name", ["base-eager", "base-ort"])
def test_scores_are_those_of_the_model_on_the_test_split(
    line: Path, data_folder: Path, artifact: Any, tiny: Any, name: str
) -> None:
    test = read(data_folder / "test.npz")
    logits = predict(checkpoint.load(artifact("base")).model, tiny, test)["logits"]
    stored = read(line / f"results/evaluate/{name}.npz")
    assert stored["scores"].tolist() == (logits.argmax(1) == test["label"]).tolist()
    assert stored["predictions"].tolist() == logits.argmax(1).tolist()
    assert stored["labels"].tolist() == test["label"].tolist()


def test_the_report_is_of_the_scores(line: Path, data_folder: Path, artifact: Any) -> None:
    report = read_json(line / "results/evaluate/base-ort.json")
    scores = read(line / "results/evaluate/base-ort.npz")["scores"]
    assert (report["metric"], report["n"], report["not_run"]) == ("accuracy", 300, None)
    assert report["accuracy"]["value"] == pytest.approx(scores.mean())
    assert report["accuracy"]["low"] < scores.mean() <= report["accuracy"]["high"]
    assert report["test_sha256"] == sha256(data_folder / "test.npz")
    assert report["engine_sha256"] == sha256(artifact("base-ort") / "engine.onnx")


@pytest.mark.parametrize("name", ["base-ort", "base-rtx"])
def test_the_report_names_the_machine(line: Path, name: str) -> None:
    assert read_json(line / f"results/evaluate/{name}.json")["target_id"] == fingerprint().id


@pytest.mark.parametrize("batch", [1, 64, 49])
def test_the_batch_does_not_change_the_scores(
    line: Path, artifact: Any, workload_path: Path, data_folder: Path, tmp_path: Path, batch: int
) -> None:
    evaluate(artifact("base-ort"), workload_path, data_folder, tmp_path / "s.npz", EvaluateParams(batch=batch))
    expected = read(line / "results/evaluate/base-ort.npz")["scores"]
    assert np.array_equal(read(tmp_path / "s.npz")["scores"], expected)


def test_an_engine_that_cannot_run_here_has_a_reason_and_no_number(line: Path) -> None:
    report = read_json(line / "results/evaluate/base-rtx.json")
    assert report["not_run"].startswith("built, not run here")
    assert (report["accuracy"], report["n"]) == (None, 0)
    stored = read(line / "results/evaluate/base-rtx.npz")
    assert {name: len(values) for name, values in stored.items()} == {"scores": 0, "predictions": 0, "labels": 0}


def test_other_preprocessing_is_refused(artifact: Any, workload_path: Path, data_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifact("base-ort"), tmp_path / "base-ort"))
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**raw, "preprocessing": "tiny-v0"}))
    with pytest.raises(Fault, match="preprocessing tiny-v0") as caught:
        evaluate(folder, workload_path, data_folder, tmp_path / "s.npz", EvaluateParams())
    assert caught.value.expected == "tiny-v1"
    assert not (tmp_path / "s.npz").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_not_finite_are_refused(tiny: Any, bad: float) -> None:
    def outputs(batch: Any) -> Any:
        logits = np.zeros((len(batch["image"]), 4), np.float32)
        logits[batch["image"][:, 0, 0, 0] == 5, 2] = bad
        return {"logits": logits}

    images = np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1) * np.ones((1, 1, 8, 8), np.float32)
    samples = {"image": images, "label": np.zeros(8)}
    with pytest.raises(Fault, match="output logits is not finite") as caught:
        run(SimpleNamespace(run=outputs), tiny, samples, 3)
    assert caught.value.got == "NaN or infinity for 1 of 8 samples, first 5"


ONE_HOT, RIGHT = np.eye(4, dtype=np.float32)[[3, 0, 1]], np.array([1.0, 1.0, 0.0])


def task(**names: Any) -> Any:
    return SimpleNamespace(OUTPUTS=("first", "second"), **names)


def test_predictions_are_the_classes_of_the_first_output() -> None:
    found = predicted(task(), {"second": np.zeros((3, 9)), "first": ONE_HOT}, np.array([3, 0, 2], np.int32), RIGHT)
    assert (found["predictions"].tolist(), found["labels"].tolist()) == ([3, 0, 1], [3, 0, 2])


@pytest.mark.parametrize(
    ("first", "labels", "scores"),
    [
        (ONE_HOT, np.array([3, 0, 2]), np.array([1.0, 0.5, 0.0])),
        (ONE_HOT, np.array([3.0, 0.0, 2.0]), RIGHT),
        (ONE_HOT, np.array([4, 0, 2]), RIGHT),
        (ONE_HOT, np.array([-1, 0, 2]), RIGHT),
        (ONE_HOT, np.zeros((3, 4), np.int64), RIGHT),
        (ONE_HOT[:, :1], np.array([0, 0, 0]), RIGHT),
        (ONE_HOT[:, 0], np.array([1, 0, 1]), RIGHT),
        (ONE_HOT[:, :, None], np.array([3, 0, 2]), RIGHT),
    ],
    ids=["shares", "real labels", "label above", "label below", "many labels", "one column", "no columns", "pixels"],
)
def test_what_has_no_classes_has_no_predictions(first: Any, labels: Any, scores: Any) -> None:
    found = predicted(task(), {"first": first}, labels, scores)
    assert {name: values.shape for name, values in found.items()} == {"predictions": (0,), "labels": (0,)}


def test_a_workload_may_say_itself_what_it_predicts() -> None:
    own = task(predictions=lambda outputs: outputs["first"][:, 0] > 0.5)
    found = predicted(own, {"first": np.array([[0.9], [0.2], [0.6]])}, np.array([1, 0, 0]), np.array([0.9, 0.8, 0.4]))
    assert (found["predictions"].tolist(), found["labels"].tolist()) == ([1, 0, 1], [1, 0, 0])


@pytest.mark.parametrize("given", [np.zeros(2, np.int64), np.zeros(3), np.zeros((3, 1), np.int64)])
def test_own_predictions_that_name_no_class_of_each_sample_are_refused(given: np.ndarray) -> None:
    with pytest.raises(Fault, match="names no class of each sample"):
        predicted(task(predictions=lambda _: given), {"first": ONE_HOT}, np.array([3, 0, 2]), RIGHT)


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        ([1.0, np.nan, np.inf], r"shape \[3\], 2 of them NaN"),
        (0.9, r"shape \[\], 0 of them"),
        ([1.0, 0.0], r"shape \[2\], 0 of them"),
    ],
    ids=["not finite", "a mean", "too few"],
)
def test_a_metric_without_a_finite_score_of_each_sample_is_refused(scores: Any, got: str) -> None:
    with pytest.raises(Fault, match=got):
        scored(task(METRICS={"m": lambda *_: scores}), "m", {}, np.zeros(3))

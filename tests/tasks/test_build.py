"""Building: whole or absent, and proven in a fresh process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tasks import build as module
from tasks import layers, onnx_file, proof
from tasks.build import build, prove
from tasks.errors import Fault
from tasks.files import read_json, sha256
from tasks.settings import BuildParams

ORT = BuildParams.model_validate({"from": "x", "backend": "onnxruntime"})


@pytest.fixture
def source(artifact: Any, tmp_path: Path) -> Path:
    """A copy of the exported base that a test may spoil."""
    return Path(shutil.copytree(artifact("base-onnx"), tmp_path / "sources" / "base-onnx"))


@pytest.mark.parametrize("name", ["base-eager", "base-ort"])
def test_the_report_is_of_the_engine(line: Path, artifact: Any, name: str) -> None:
    report, folder = read_json(line / f"results/build/{name}.json"), artifact(name)
    described = read_json(folder / "manifest.json")
    engine = folder / described["engine_file"]
    assert (report["engine_bytes"], report["engine_sha256"]) == (engine.stat().st_size, sha256(engine))
    for key in ("backend", "backend_version", "device", "precision_asked", "precision_found"):
        assert report[key] == described[key], key
    assert (report["opened"], report["not_as_asked"], report["slow"]) == ("yes", None, None)
    assert report["kernels"] == len(layers.read(folder)) > 0
    files = ["layers.json", "manifest.json", described["engine_file"]]
    assert sorted(p.name for p in folder.iterdir()) == sorted(files)


def test_every_output_is_held_against_pytorch(line: Path) -> None:
    (parity,) = read_json(line / "results/build/base-ort.json")["parity"]
    assert parity["output"] == "logits"
    assert 0 < parity["difference"] < parity["tolerance"] == proof.TOLERANCE["fp32"]
    (coarse,) = read_json(line / "results/build/base-int8-ort.json")["parity"]
    assert parity["difference"] < coarse["difference"] < coarse["tolerance"] == proof.TOLERANCE["int8"]


def test_the_fusion_is_of_the_files_nodes(line: Path, artifact: Any) -> None:
    report = read_json(line / "results/build/base-ort.json")
    assert report["nodes"] == len(onnx.load(artifact("base-onnx") / "model.onnx").graph.node)
    assert 0 < report["kernels"] < report["nodes"]


def test_a_backend_that_cannot_run_here_is_built_with_the_reason(line: Path, artifact: Any) -> None:
    report = read_json(line / "results/build/base-rtx.json")
    assert report["opened"].startswith("built, not run here")
    assert report["parity"] is None
    assert (artifact("base-rtx") / "engine.rtx").stat().st_size > 0


def test_a_failed_build_leaves_what_was_made(artifact: Any, data_folder: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(artifact("base-ort"), tmp_path / "base-ort"))
    before = sha256(target)
    with pytest.raises(Fault, match="no model"):
        build(artifact("base"), data_folder, target, ORT)
    assert sha256(target) == before
    assert [p.name for p in tmp_path.iterdir()] == ["base-ort"]


def test_an_engine_that_a_fresh_process_refuses_is_not_kept(
    artifact: Any, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(folder: Path, proofs: Path) -> Any:
        (folder / "engine.onnx").write_bytes(b"")
        return prove(folder, proofs)

    monkeypatch.setattr(module, "prove", spoil)
    with pytest.raises(Fault, match=r"engine\.onnx is not the one its manifest describes"):
        build(artifact("base-onnx"), data_folder, tmp_path / "base-ort", ORT)
    assert list(tmp_path.iterdir()) == []


def test_a_loader_that_dies_is_a_fault(artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROVE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(Fault, match=r"doesn't load\n  got:      exit status -11"):
        prove(artifact("base-ort"), artifact("base-onnx"))


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    model = onnx_file.load(folder)
    change(model)
    onnx.save(model, folder / onnx_file.FILE)


def test_a_file_that_is_not_its_parents_is_not_built(source: Path, data_folder: Path, tmp_path: Path) -> None:
    def spoil(model: Any) -> None:
        weights = next(i for i in model.graph.initializer if len(i.dims) == 2)
        weights.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(weights), weights.name))

    edit(source, spoil)
    with pytest.raises(Fault, match="output logits differs from PyTorch") as caught:
        build(source, data_folder, tmp_path / "engine", ORT)
    assert "at validation sample" in str(caught.value.got) and caught.value.expected == "at most 1e-03 for fp32"
    assert not (tmp_path / "engine").exists()


def test_a_file_without_a_proof_is_not_built(source: Path, data_folder: Path, tmp_path: Path) -> None:
    (source / proof.FILE).unlink()
    with pytest.raises(Fault, match="no proof beside the model in"):
        build(source, data_folder, tmp_path / "engine", ORT)


def test_int8_that_runs_in_floating_point_is_told(
    artifact: Any, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(artifact("base-onnx"), tmp_path / "asked"))
    edit(source, lambda model: onnx_file.annotate(model, {**onnx_file.notes(model), "precision": "int8"}))
    report = build(source, data_folder, tmp_path / "engine", ORT)
    n = sum(report.precision_found.values())
    assert report.precision_found == {"fp32": n}
    assert report.not_as_asked == f"asked for int8, found in 0 of {n} products ({n} fp32)"


def test_a_file_in_another_backends_style_is_told_to_be_slow(artifact: Any, data_folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(artifact("base-int8"), tmp_path / "other"))
    edit(source, lambda model: onnx_file.annotate(model, {**onnx_file.notes(model), "style": "tensorrt"}))
    assert "fast with style: onnxruntime" in str(build(source, data_folder, tmp_path / "engine", ORT).slow)


def test_samples_of_the_proof_are_of_the_validation_split(artifact: Any, data_folder: Path) -> None:
    from tasks.data import read

    inputs, outputs = proof.load(artifact("base-int8"))
    assert np.array_equal(inputs["image"], read(data_folder / "validation.npz")["image"][:8])
    assert outputs["logits"].shape == (8, 4)

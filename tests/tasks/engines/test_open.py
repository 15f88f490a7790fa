"""Opening engines: what they were made of, and what is refused whatever the backend."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tasks import checkpoint, manifest, onnx_file
from tasks.build import build
from tasks.data import read
from tasks.engines import protocol
from tasks.errors import Fault, Unavailable
from tasks.export import export
from tasks.files import sha256
from tasks.quantize import quantize
from tasks.settings import BuildParams, ExportParams, QuantizeParams


@pytest.fixture
def copied(artifact: Any, tmp_path: Path) -> Any:
    """`copied(name)`: an engine's folder that a test may change."""
    return lambda name: Path(shutil.copytree(artifact(name), tmp_path / name))


def rewrite(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**raw, **changes}))


@pytest.mark.parametrize(
    ("name", "model", "onnx", "precision"),
    [
        ("base-eager", "base", None, "fp32"),
        ("base-ort", "base", "base-onnx", "fp32"),
        ("slim-kd-ort", "slim-kd", "slim-kd-onnx", "fp32"),
        ("base-int8-ort", "base", "base-int8", "int8"),
        ("base-rtx", "base", "base-onnx", "fp32"),
    ],
)
def test_the_manifest_holds_the_digests_of_what_it_was_made_of(
    artifact: Any, data_folder: Path, name: str, model: str, onnx: str | None, precision: str
) -> None:
    described = manifest.read(artifact(name))
    assert described.model_sha256 == sha256(artifact(model) / "model.pt")
    assert described.onnx_sha256 == (sha256(artifact(onnx)) if onnx else None)
    assert described.precision_asked == precision
    calibrated = sha256(data_folder / "calibration.npz") if precision == "int8" else None
    assert described.calibration_sha256 == calibrated


def test_an_engine_for_another_cpu_is_refused(copied: Any) -> None:
    folder = copied("base-ort")
    rewrite(folder, built_for={"device": "cpu", "cpu_flags": ["sse4_2", "flag_of_the_future"]})
    with pytest.raises(Fault, match="built for another CPU") as caught:
        protocol.open_engine(folder)
    assert caught.value.got == "here: no flag_of_the_future"
    assert "flag_of_the_future" in str(caught.value.expected)
    assert caught.value.do == "rebuild: dvc repro build@base-ort"


def test_a_backend_that_cannot_run_here_says_why_in_one_line(artifact: Any) -> None:
    with pytest.raises(Unavailable, match="built, not run here") as caught:
        protocol.open_engine(artifact("base-rtx"))
    assert "\n" not in str(caught.value)
    assert "8.6, 8.9" in str(caught.value) or "ahead of time" in str(caught.value)


@pytest.mark.parametrize("name", ["onnx", "cuda", "", "../errors", "protocol"])
def test_an_unknown_backend_is_never_another_one(copied: Any, name: str) -> None:
    folder = copied("base-ort")
    rewrite(folder, backend=name)
    with pytest.raises(Fault, match="no such backend") as caught:
        protocol.open_engine(folder)
    assert caught.value.expected == ", ".join(protocol.BACKENDS)


def test_an_int8_engine_really_has_int8_operators(artifact: Any) -> None:
    operators = manifest.read(artifact("base-int8-ort")).operators
    assert any(kind.startswith("QLinear") or "Integer" in kind for kind in operators), operators


def test_max_batch_is_the_manifests(artifact: Any) -> None:
    described = replace(manifest.read(artifact("base-ort")), max_batch=2)
    with (
        protocol.backend("onnxruntime").open(artifact("base-ort"), described) as session,
        pytest.raises(Fault, match="batch out of range"),
    ):
        session.run({"image": np.zeros((3, 1, 8, 8), np.float32)})


@pytest.fixture(scope="module")
def external(artifact: Any, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model exported with its weights in a sidecar."""
    folder = tmp_path_factory.mktemp("external") / "base-external"
    export(artifact("base"), data_folder, folder, ExportParams(**{"from": "base", "external_data": True}))
    assert (folder / "model.onnx.data").is_file()
    return folder


def ort_engine(source: Path, data_folder: Path, target: Path) -> Path:
    spec = BuildParams(**{"from": source.name, "backend": "onnxruntime"})
    assert build(source, data_folder, target, spec).opened == "yes"
    assert sorted(f.name for f in target.iterdir()) == ["engine.onnx", "layers.json", "manifest.json"]
    assert onnx_file.sidecars(onnx.load(target / "engine.onnx", load_external_data=False)) == []
    return target


def outputs_of(folder: Path, data_folder: Path) -> np.ndarray:
    with protocol.open_engine(folder) as session:
        return session.run({"image": read(data_folder / "test.npz")["image"][:64]})["logits"]


def test_a_model_with_external_data_gives_a_self_contained_engine(
    external: Path, artifact: Any, data_folder: Path, tmp_path: Path
) -> None:
    built = ort_engine(external, data_folder, tmp_path / "engine")
    assert np.array_equal(outputs_of(built, data_folder), outputs_of(artifact("base-ort"), data_folder))


def test_a_model_with_external_data_is_quantised_and_built(
    external: Path, artifact: Any, data_folder: Path, workload_path: Path, tmp_path: Path
) -> None:
    spec = QuantizeParams(**{"from": external.name, "calibration": "minmax", "samples": 64, "batch": 16})
    quantize(external, workload_path, data_folder, tmp_path / "int8", spec)
    assert sorted(f.name for f in (tmp_path / "int8").iterdir()) == ["model.onnx", "proof.npz"]
    built = ort_engine(tmp_path / "int8", data_folder, tmp_path / "engine")
    assert np.array_equal(outputs_of(built, data_folder), outputs_of(artifact("base-int8-ort"), data_folder))


def test_rtx_builds_a_model_with_external_data(external: Path, artifact: Any, tmp_path: Path) -> None:
    spec = BuildParams(**{"from": external.name, "backend": "tensorrt_rtx"})
    described = protocol.backend("tensorrt_rtx").build(external, tmp_path, spec).manifest
    assert described.operators == manifest.read(artifact("base-rtx")).operators
    assert (tmp_path / described.engine_file).stat().st_size > 1000


def test_a_model_too_large_for_one_file_is_not_built(
    artifact: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "MAX_BYTES", 1000)
    spec = BuildParams(**{"from": "base-onnx", "backend": "onnxruntime"})
    with pytest.raises(Fault, match="base-onnx is too large for one ONNX file"):
        protocol.backend("onnxruntime").build(artifact("base-onnx"), tmp_path, spec)


MISSING = """
import sys
sys.modules[sys.argv[1]] = None
from tasks.engines.protocol import backend
from tasks.errors import Unavailable
try:
    backend(sys.argv[2])
except Unavailable as reason:
    print(reason)
"""


@pytest.mark.parametrize(
    ("package", "name"), [("tensorrt_rtx", "tensorrt_rtx"), ("onnxruntime", "onnxruntime"), ("torch", "eager")]
)
def test_a_backend_that_is_not_installed_says_so_in_one_line(package: str, name: str) -> None:
    done = subprocess.run([sys.executable, "-c", MISSING, package, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{package} isn't installed here (") and "make setup" in line


def test_a_broken_module_of_the_project_is_not_taken_for_a_missing_package() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING, "tasks.checkpoint", "eager"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr


@pytest.fixture
def own_eager(artifact: Any, workload_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An eager engine of a project of its own, the working directory, whose workload has a relative path."""
    for file in workload_path.parent.glob("*.py"):
        shutil.copyfile(file, tmp_path / file.name)
    monkeypatch.chdir(tmp_path)
    model = checkpoint.load(artifact("base"))
    checkpoint.save(replace(model, workload_path="workload.py"), tmp_path / "model")
    folder = tmp_path / "engine"
    folder.mkdir()
    spec = BuildParams(**{"from": "model", "backend": "eager"})
    manifest.write(folder, protocol.backend("eager").build(tmp_path / "model", folder, spec).manifest)
    with protocol.open_engine(folder):
        pass
    return folder


def test_an_eager_engine_is_not_opened_outside_its_project(
    own_eager: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(Fault, match="runs inside its project only") as caught:
        protocol.open_engine(own_eager)
    assert caught.value.got == "here: no workload.py"


def test_an_eager_engine_of_another_workload_is_refused_and_none_of_it_is_run(own_eager: Path) -> None:
    workload = Path("workload.py")
    before = sha256(workload)
    assert manifest.read(own_eager).built_for == {"device": "cpu", "workload_sha256": before}
    workload.write_text(workload.read_text() + "\nPath('ran').touch()\n")
    with pytest.raises(Fault, match=r"was built for another workload\.py") as caught:
        protocol.open_engine(own_eager)
    assert caught.value.expected == f"built for: sha256 {before[:12]}…"
    assert caught.value.do == "rebuild: dvc repro --force --single-item build@engine"
    assert not Path("ran").exists()


def test_an_eager_engine_that_notes_no_workload_is_refused(own_eager: Path) -> None:
    rewrite(own_eager, built_for={"device": "cpu"})
    with pytest.raises(Fault, match=r"was built for another workload\.py"):
        protocol.open_engine(own_eager)

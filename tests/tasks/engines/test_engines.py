"""One contract that every backend passes."""

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
from tasks.fit import predict
from tasks.quantize import quantize
from tasks.settings import BuildParams, ExportParams, QuantizeParams

ENGINES = ["base-eager", "base-ort", "base-int8-ort", "slim-kd-ort", "base-rtx"]
RUNNABLE = ENGINES[:4]


@pytest.fixture
def copied(artifact: Any, tmp_path: Path) -> Any:
    """`copied(name)`: an engine's folder that a test may change."""
    return lambda name: Path(shutil.copytree(artifact(name), tmp_path / name))


def rewrite(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**raw, **changes}))


@pytest.mark.parametrize("name", ENGINES)
def test_the_manifest_describes_the_engine(artifact: Any, tiny: Any, name: str) -> None:
    described = manifest.read(artifact(name))
    assert described.inputs == (manifest.TensorSpec("image", "float32", (None, 1, 8, 8)),)
    assert described.outputs == (manifest.TensorSpec("logits", "float32", (None, 4)),)
    assert (described.preprocessing, described.max_batch, described.threads) == (tiny.PREPROCESSING, 64, 1)
    assert described.engine_sha256 == sha256(artifact(name) / described.engine_file)
    assert described.rebuild == f"dvc repro build@{name}"
    assert sum(described.operators.values()) > 2


@pytest.mark.parametrize(
    ("name", "model", "onnx", "precision"),
    [
        ("base-eager", "base", None, "as the model"),
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


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("name", RUNNABLE)
def test_an_engine_gives_its_models_outputs(artifact: Any, tiny: Any, data_folder: Path, name: str, batch: int) -> None:
    part = {k: v[:batch] for k, v in read(data_folder / "test.npz").items()}
    model = checkpoint.load(artifact("slim-kd" if name.startswith("slim") else "base")).model
    expected = predict(model, tiny, part)["logits"]
    with protocol.open_engine(artifact(name)) as session:
        got = session.run({"image": part["image"]})
        session.synchronize()
    assert got.keys() == {"logits"}
    assert (got["logits"].dtype, got["logits"].shape) == (np.float32, (batch, 4))
    tolerance = 0.15 if "int8" in name else 1e-3
    np.testing.assert_allclose(got["logits"], expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_session_says_what_it_takes_and_where_it_runs(artifact: Any, name: str) -> None:
    described = manifest.read(artifact(name))
    with protocol.open_engine(artifact(name)) as session:
        assert (tuple(session.inputs), tuple(session.outputs)) == (described.inputs, described.outputs)
        assert session.device == described.built_for["device"] == "cpu"


@pytest.mark.parametrize("name", RUNNABLE)
def test_results_are_not_overwritten_by_the_next_call(artifact: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(2, 1, 8, 8)).astype(np.float32) for _ in range(2))
    with protocol.open_engine(artifact(name)) as session:
        first = session.run({"image": a})["logits"]
        kept = first.copy()
        session.run({"image": b})
        assert np.array_equal(first, kept)


@pytest.mark.parametrize(
    ("batch", "what", "got"),
    [
        ({}, "input image is missing", "nothing"),
        ({"picture": np.zeros((1, 1, 8, 8), np.float32)}, "input image is missing", "picture"),
        ({"image": np.zeros((1, 1, 8, 8), np.float64)}, "doesn't fit", "float64 (1, 1, 8, 8)"),
        ({"image": np.zeros((1, 3, 8, 8), np.float32)}, "doesn't fit", "float32 (1, 3, 8, 8)"),
        ({"image": np.zeros((1, 8, 8), np.float32)}, "doesn't fit", "float32 (1, 8, 8)"),
        ({"image": np.zeros((65, 1, 8, 8), np.float32)}, "batch out of range", "65"),
        ({"image": np.zeros((0, 1, 8, 8), np.float32)}, "batch out of range", "0"),
    ],
)
@pytest.mark.parametrize("name", RUNNABLE[:2])
def test_a_batch_that_does_not_fit_is_refused(artifact: Any, name: str, batch: Any, what: str, got: str) -> None:
    with protocol.open_engine(artifact(name)) as session, pytest.raises(Fault, match=what) as caught:
        session.run(batch)
    assert str(caught.value.got) == got


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_another_backend_version_is_refused(copied: Any, name: str) -> None:
    folder = copied(name)
    rewrite(folder, backend_version="0.0.1")
    with pytest.raises(Fault, match="built by another version") as caught:
        protocol.open_engine(folder)
    assert "0.0.1" in str(caught.value.expected)
    assert str(caught.value.got).startswith("here: ")
    assert caught.value.do == f"rebuild: dvc repro build@{name}"


def test_an_engine_for_another_cpu_is_refused(copied: Any) -> None:
    folder = copied("base-ort")
    rewrite(folder, built_for={"device": "cpu", "cpu_flags": ["sse4_2", "flag_of_the_future"]})
    with pytest.raises(Fault, match="built for another CPU") as caught:
        protocol.open_engine(folder)
    assert caught.value.got == "here: no flag_of_the_future"
    assert "flag_of_the_future" in str(caught.value.expected)
    assert caught.value.do == "rebuild: dvc repro build@base-ort"


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b"", lambda b: b"x" + b], ids=["cut", "empty", "prefixed"]
)
@pytest.mark.parametrize("name", ENGINES)
def test_a_damaged_engine_is_never_opened(copied: Any, name: str, damage: Any) -> None:
    folder = copied(name)
    file = folder / manifest.read(folder).engine_file
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Fault, match="is not the one its manifest describes"):
        protocol.open_engine(folder)


def test_a_backend_that_cannot_run_here_says_why_in_one_line(artifact: Any) -> None:
    with pytest.raises(Unavailable, match="built, not run here") as caught:
        protocol.open_engine(artifact("base-rtx"))
    assert "\n" not in str(caught.value)
    assert "8.6, 8.9" in str(caught.value) or "ahead of time" in str(caught.value)


@pytest.mark.parametrize("name", ["onnx", "tensorrt", "", "../errors", "protocol"])
def test_an_unknown_backend_is_never_another_one(copied: Any, name: str) -> None:
    folder = copied("base-ort")
    rewrite(folder, backend=name)
    with pytest.raises(Fault, match="no such backend") as caught:
        protocol.open_engine(folder)
    assert caught.value.expected == "eager, onnxruntime, tensorrt_rtx"


@pytest.mark.parametrize("name", ["eager", "onnxruntime", "tensorrt_rtx"])
def test_a_source_that_is_no_model_is_a_fault(tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    for file in ("model.pt", "model.onnx"):
        (tmp_path / "source" / file).write_bytes(b"no model")
    (tmp_path / "engine").mkdir()
    spec = BuildParams(**{"from": "source", "backend": name})
    with pytest.raises(Fault, match="is not a"):
        protocol.backend(name).build(tmp_path / "source", tmp_path / "engine", spec)


def test_an_rtx_engine_is_for_the_capabilities_asked(artifact: Any, tmp_path: Path) -> None:
    from tasks.engines import tensorrt_rtx

    described = manifest.read(artifact("base-rtx"))
    assert described.built_for["compute_capabilities"] == ["8.6", "8.9"]
    assert tensorrt_rtx.validity((artifact("base-rtx") / described.engine_file).read_bytes())
    with pytest.raises(Fault, match="not a TensorRT-RTX engine"):
        tensorrt_rtx.validity(b"no engine" * 100)


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


def ort_engine(source: Path, target: Path) -> Path:
    assert build(source, target, BuildParams(**{"from": source.name, "backend": "onnxruntime"})).opened == "yes"
    assert sorted(f.name for f in target.iterdir()) == ["engine.onnx", "manifest.json"]
    assert onnx_file.sidecars(onnx.load(target / "engine.onnx", load_external_data=False)) == []
    return target


def outputs_of(folder: Path, data_folder: Path) -> np.ndarray:
    with protocol.open_engine(folder) as session:
        return session.run({"image": read(data_folder / "test.npz")["image"][:64]})["logits"]


def test_a_model_with_external_data_gives_a_self_contained_engine(
    external: Path, artifact: Any, data_folder: Path, tmp_path: Path
) -> None:
    built = ort_engine(external, tmp_path / "engine")
    assert np.array_equal(outputs_of(built, data_folder), outputs_of(artifact("base-ort"), data_folder))


def test_a_model_with_external_data_is_quantised_and_built(
    external: Path, artifact: Any, data_folder: Path, workload_path: Path, tmp_path: Path
) -> None:
    spec = QuantizeParams(**{"from": external.name, "calibration": "minmax", "samples": 64, "batch": 16})
    quantize(external, workload_path, data_folder, tmp_path / "int8", spec)
    assert [f.name for f in (tmp_path / "int8").iterdir()] == ["model.onnx"]
    built = ort_engine(tmp_path / "int8", tmp_path / "engine")
    assert np.array_equal(outputs_of(built, data_folder), outputs_of(artifact("base-int8-ort"), data_folder))


def test_rtx_builds_a_model_with_external_data(external: Path, artifact: Any, tmp_path: Path) -> None:
    spec = BuildParams(**{"from": external.name, "backend": "tensorrt_rtx"})
    described = protocol.backend("tensorrt_rtx").build(external, tmp_path, spec)
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
    assert line.startswith(f"{name} isn't installed here: ") and package in line


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
    manifest.write(folder, protocol.backend("eager").build(tmp_path / "model", folder, spec))
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

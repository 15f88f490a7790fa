"""The manifest: a damaged or foreign engine is refused with how to rebuild it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import manifest, target
from tasks.errors import Fault, Unavailable


@pytest.fixture
def engine(artifact: Any, tmp_path: Path) -> Path:
    """A copy of an engine that a test may damage."""
    folder = tmp_path / "base-ort"
    shutil.copytree(artifact("base-ort"), folder)
    return folder


def test_a_manifest_survives_its_file(engine: Path, tmp_path: Path) -> None:
    read = manifest.read(engine)
    (tmp_path / "again").mkdir()
    shutil.copy(engine / read.engine_file, tmp_path / "again")
    manifest.write(tmp_path / "again", read)
    assert manifest.read(tmp_path / "again") == read
    assert read.inputs == (manifest.TensorSpec("image", "float32", (None, 1, 8, 8)),)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"garbage" + b,
        lambda b: b[:100] + bytes([b[100] ^ 1]) + b[101:],
        lambda b: b + b"\0",
    ],
    ids=["truncated", "empty", "prefixed", "one bit", "longer"],
)
def test_a_damaged_engine_is_refused(engine: Path, damage: Any) -> None:
    file = engine / manifest.read(engine).engine_file
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Fault, match="is not the one its manifest describes") as caught:
        manifest.read(engine)
    assert f"{file.stat().st_size} bytes" in str(caught.value)
    assert "rebuild: dvc repro build@base-ort" in str(caught.value)


def test_a_missing_engine_is_refused(engine: Path) -> None:
    (engine / "engine.onnx").unlink()
    with pytest.raises(Fault, match=r"engine .*engine.onnx is missing"):
        manifest.read(engine)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no engine in"):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a manifest"),
        ('{"schema": 1', "is not a manifest"),
        ("[]", "is not a manifest"),
        ('{"schema": 3}', "is not a manifest"),
        ('{"schema": 7, "rebuild": "dvc repro build@x"}', "is of another version"),
    ],
)
def test_a_damaged_manifest_is_refused(engine: Path, text: str, message: str) -> None:
    (engine / "manifest.json").write_text(text)
    with pytest.raises(Fault, match=message):
        manifest.read(engine)


def test_a_manifest_without_one_of_its_keys_is_refused(engine: Path) -> None:
    raw = json.loads((engine / "manifest.json").read_text())
    for key in raw:
        (engine / "manifest.json").write_text(json.dumps({k: v for k, v in raw.items() if k != key}))
        with pytest.raises(Fault):
            manifest.read(engine)


def test_another_version_names_both_and_the_command(engine: Path) -> None:
    described = manifest.read(engine)
    manifest.require(described, engine, version=described.backend_version)
    with pytest.raises(Fault, match="built by another version") as caught:
        manifest.require(described, engine, version="0.1")
    assert caught.value.got == "here: onnxruntime 0.1"
    assert caught.value.expected == f"built for: onnxruntime {described.backend_version}"
    assert caught.value.do == "rebuild: dvc repro build@base-ort"


def test_missing_cpu_features_are_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = replace(manifest.read(engine), built_for={"device": "cpu", "cpu_flags": ["amx_int8"]})
    here = replace(target.fingerprint(), cpu_flags=())
    monkeypatch.setattr(target, "fingerprint", lambda: here)
    with pytest.raises(Fault, match="built for another CPU") as caught:
        manifest.require(described, engine, version=described.backend_version)
    assert caught.value.got == "here: no amx_int8"
    assert str(caught.value.expected).startswith("built for: ")


H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.1"}
BUILT_FOR = {"gpu_name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.1"}


@pytest.fixture
def for_gpu(engine: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`for_gpu(**changes)`: the engine's manifest as if built for an H200; this machine has one."""
    monkeypatch.setattr(target, "_gpu", lambda: H200)
    return lambda **changes: replace(manifest.read(engine), built_for={**BUILT_FOR, **changes}, device="cuda")


def test_an_engine_of_this_gpu_is_let_through(for_gpu: Any, engine: Path) -> None:
    assert manifest.gpu_here() == BUILT_FOR
    manifest.require_gpu(for_gpu(), engine)


@pytest.mark.parametrize(
    ("key", "other"), [("gpu_name", "NVIDIA L4"), ("compute_capability", "8.9"), ("driver", "535.1"), ("driver", None)]
)
def test_an_engine_of_another_gpu_or_driver_is_refused(for_gpu: Any, engine: Path, key: str, other: Any) -> None:
    with pytest.raises(Fault, match="engine base-ort was built for another GPU or driver") as caught:
        manifest.require_gpu(for_gpu(**{key: other}), engine)
    assert caught.value.got == "here: gpu_name NVIDIA H200; compute_capability 9.0; driver 580.1"
    assert f"{key} {other}" in str(caught.value.expected) and str(caught.value.expected).startswith("built for: ")
    assert caught.value.do == "rebuild: dvc repro build@base-ort"


def test_an_engine_that_notes_no_gpu_is_refused(for_gpu: Any, engine: Path) -> None:
    with pytest.raises(Fault, match="another GPU or driver") as caught:
        manifest.require_gpu(replace(for_gpu(), built_for={}), engine)
    assert caught.value.expected == "built for: no GPU noted"


def test_a_backend_may_not_mind_the_driver(for_gpu: Any, engine: Path) -> None:
    same = ("gpu_name", "compute_capability")
    manifest.require_gpu(for_gpu(driver="535.1"), engine, same=same)
    with pytest.raises(Fault, match="another GPU or driver"):
        manifest.require_gpu(for_gpu(gpu_name="NVIDIA L4"), engine, same=same)


def test_without_a_gpu_a_gpus_engine_is_not_run(for_gpu: Any, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = for_gpu()
    monkeypatch.setattr(target, "_gpu", lambda: None)
    with pytest.raises(Unavailable, match="built, not run here: no NVIDIA GPU here") as caught:
        manifest.require_gpu(described, engine)
    assert "built for gpu_name NVIDIA H200; compute_capability 9.0" in str(caught.value)
    assert "\n" not in str(caught.value)

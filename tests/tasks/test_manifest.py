"""The manifest: a damaged or foreign engine is refused with how to rebuild it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks import manifest
from tasks.errors import Fault


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
        ('{"schema": 2}', "is not a manifest"),
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


def test_missing_cpu_features_are_named(engine: Path) -> None:
    described = manifest.read(engine)
    with pytest.raises(Fault, match="built for another CPU") as caught:
        manifest.require(described, engine, version=described.backend_version, missing_flags=["amx_int8"])
    assert caught.value.got == "here: no amx_int8"
    assert str(caught.value.expected).startswith("built for: ")

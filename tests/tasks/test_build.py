"""Building: whole or absent, and proven in a fresh process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks import build as module
from tasks.build import build, prove_loading
from tasks.errors import Fault
from tasks.files import read_json, sha256
from tasks.settings import BuildParams


@pytest.mark.parametrize("name", ["base-eager", "base-ort"])
def test_the_report_is_of_the_engine(line: Path, artifact: Any, name: str) -> None:
    report, folder = read_json(line / f"results/build/{name}.json"), artifact(name)
    described = read_json(folder / "manifest.json")
    engine = folder / described["engine_file"]
    assert (report["engine_bytes"], report["engine_sha256"]) == (engine.stat().st_size, sha256(engine))
    assert (report["backend"], report["backend_version"]) == (described["backend"], described["backend_version"])
    assert report["opened"] == "yes"
    assert sorted(p.name for p in folder.iterdir()) == sorted(["manifest.json", described["engine_file"]])


def test_a_backend_that_cannot_run_here_is_built_with_the_reason(line: Path, artifact: Any) -> None:
    opened = read_json(line / "results/build/base-rtx.json")["opened"]
    assert opened.startswith("built, not run here")
    assert (artifact("base-rtx") / "engine.rtx").stat().st_size > 0


def test_a_failed_build_leaves_what_was_made(artifact: Any, tmp_path: Path) -> None:
    target = Path(shutil.copytree(artifact("base-ort"), tmp_path / "base-ort"))
    before = sha256(target)
    with pytest.raises(Fault, match="no model"):
        build(artifact("base"), target, BuildParams(**{"from": "base", "backend": "onnxruntime"}))
    assert sha256(target) == before
    assert [p.name for p in tmp_path.iterdir()] == ["base-ort"]


def test_an_engine_that_a_fresh_process_refuses_is_not_kept(
    artifact: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(folder: Path) -> str:
        (folder / "engine.onnx").write_bytes(b"")
        return prove_loading(folder)

    monkeypatch.setattr(module, "prove_loading", spoil)
    with pytest.raises(Fault, match="engine base-ort doesn't load"):
        build(artifact("base-onnx"), tmp_path / "base-ort", BuildParams(**{"from": "x", "backend": "onnxruntime"}))
    assert list(tmp_path.iterdir()) == []


def test_a_loader_that_dies_is_a_fault(artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOAD", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(Fault, match=r"doesn't load\n  got:      exit status -11"):
        prove_loading(artifact("base-ort"))

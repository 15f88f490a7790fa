"""What an engine takes to open."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import footprint, manifest
from tasks.errors import Fault
from tasks.planted import tiny_engine

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 MiB of weights."""
    return tiny_engine(tmp_path_factory.mktemp("engine"), 1024, 4)


def batch(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((n, 1024), np.float32)}


def test_the_session_is_open_and_its_start_is_measured(engine: Path) -> None:
    session, found = footprint.opened(engine, manifest.read(engine), batch(3))
    with session:
        assert session.run(batch(2))["y"].shape == (2, 1024)
    assert found.batch == 3
    assert found.load_s > 0
    assert found.first_call_s > 0
    assert found.first_inference_s == pytest.approx(found.import_s + found.load_s + found.first_call_s)
    assert found.host_peak_bytes >= found.host_bytes
    assert (found.device_bytes, found.device_peak_bytes, found.session_bytes) == (None, None, None)
    told = footprint.lines(asdict(found))
    assert told[0].startswith("start: ")
    assert told[1].startswith("memory: ")


def test_in_a_fresh_process_an_engine_takes_its_weights_at_least(engine: Path) -> None:
    code = (
        "import sys, json, numpy as np; from dataclasses import asdict; from pathlib import Path\n"
        "from tasks import footprint, manifest\n"
        "folder = Path(sys.argv[1]); batch = {'x': np.ones((64, 1024), np.float32)}\n"
        "session, found = footprint.opened(folder, manifest.read(folder), batch)\n"
        "print(json.dumps(asdict(found)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(engine)], capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert set(found) == {*asdict(footprint.Footprint(*[0] * 11, how=""))}
    assert found["import_s"] > 0.01
    weights = 4 * 1024 * 1024 * 4
    assert weights <= found["host_bytes"] <= 6 * weights + 64 * MIB
    assert 0 < found["activation_bytes"] < weights


def test_the_backends_own_word_on_activations_is_taken(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = footprint.open_engine

    def told(folder: Path) -> Any:
        session = real(folder)
        session.activation_bytes = 12345
        return session

    monkeypatch.setattr(footprint, "open_engine", told)
    session, found = footprint.opened(engine, manifest.read(engine), batch(1))
    with session:
        assert found.activation_bytes == 12345


def test_a_first_inference_that_fails_leaves_nothing_open(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    real = footprint.open_engine

    def watched(folder: Path) -> Any:
        session = real(folder)
        leave = type(session).__exit__
        monkeypatch.setattr(type(session), "__exit__", lambda self, *a: (closed.append(1), leave(self, *a))[1])
        return session

    monkeypatch.setattr(footprint, "open_engine", watched)
    with pytest.raises(Fault, match="input x doesn't fit"):
        footprint.opened(engine, manifest.read(engine), {"x": np.ones((1, 3), np.float32)})
    assert closed == [1]


def test_where_the_kernel_resets_no_peak_it_is_read_after_the_calls(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(footprint, "CLEAR", tmp_path / "no folder" / "file")
    session, found = footprint.opened(engine, manifest.read(engine), batch(1))
    with session:
        assert found.how == "resident memory, its peak as read after the calls"

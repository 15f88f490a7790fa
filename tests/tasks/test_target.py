"""The fingerprint of this machine."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import version
from pathlib import Path

from tasks import target


def test_the_fingerprint_is_of_this_machine() -> None:
    here = target.fingerprint()
    assert here.cores == os.cpu_count()
    assert here.libraries["torch"] == version("torch")
    assert here.libraries["onnxruntime"] == version("onnxruntime")
    assert re.fullmatch(r"(cpu|cuda)-[a-z0-9-]+-\d+c-[0-9a-f]{6}", here.id)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    assert all(re.search(rf"\b{flag}\b", flags) for flag in here.cpu_flags)


def test_the_fingerprint_is_stable() -> None:
    assert target.fingerprint() == target.fingerprint()


def test_refresh_leaves_an_equal_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "target.json"
    target.refresh(path)
    os.utime(path, (1, 1))
    target.refresh(path)
    assert path.stat().st_mtime == 1


def test_refresh_rewrites_the_file_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "target.json"
    here = target.refresh(path)
    other = json.loads(path.read_text())
    other["libraries"]["torch"] = "0.1"
    path.write_text(json.dumps(other))
    target.refresh(path)
    assert json.loads(path.read_text()) == target.plain(here)


def test_the_last_level_cache_has_a_plausible_size() -> None:
    assert 1 << 20 <= target.last_level_cache_bytes() <= 4 << 30

"""The fingerprint of this machine."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tasks import target
from tasks.engines.protocol import open_engine
from tasks.errors import Unavailable


def test_the_fingerprint_is_of_this_machine() -> None:
    here = target.fingerprint()
    assert here.cores == len(os.sched_getaffinity(0))
    assert here.libraries["torch"] == version("torch")
    assert here.libraries["onnxruntime"] == version("onnxruntime")
    assert re.fullmatch(r"cpu-[a-z0-9-]+-\d+c-[0-9a-f]{6}", here.id)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    assert all(re.search(rf"\b{flag}\b", flags) for flag in here.cpu_flags)


def test_a_gpu_makes_another_target_beside_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_gpu", lambda: None)
    without = target.fingerprint()
    gpu = {"name": "NVIDIA L4", "compute_capability": "8.9", "driver": "580.1"}
    monkeypatch.setattr(target, "_gpu", lambda: gpu)
    here = target.fingerprint()
    assert (here.kind, here.name, here.cpu_name) == ("cuda", "NVIDIA L4", without.cpu_name)
    assert here.id.startswith(f"cuda-nvidia-l4-{here.cores}c-") and without.id.startswith("cpu-")
    assert (here.gpu_name, here.compute_capability, here.driver) == ("NVIDIA L4", "8.9", "580.1")
    assert (without.gpu_name, without.compute_capability, without.driver) == (None, None, None)


def test_an_engine_for_another_gpu_names_the_gpu_here(artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.1"}
    monkeypatch.setattr(target, "_gpu", lambda: gpu)
    with pytest.raises(Unavailable, match=r"here NVIDIA H200 with 9\.0"):
        open_engine(artifact("base-rtx"))


def test_another_cpu_is_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    name, flags = target._cpu()
    found = set()
    for cpu in ((name, flags), (f"{name} II", flags), (name, [*flags, "sve2"])):
        monkeypatch.setattr(target, "_cpu", lambda cpu=cpu: cpu)
        found.add(target.fingerprint().id)
    assert len(found) == 3


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    whole = target.fingerprint()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    pinned = target.fingerprint()
    assert (whole.cores, pinned.cores) == (8, 3) and "-3c-" in pinned.id
    monkeypatch.delattr(os, "sched_getaffinity")
    assert target.fingerprint() == whole
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert target.cores() == 1


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


@pytest.mark.parametrize(("visible", "handle"), [(None, 0), ("1", 1), ("2,0", 2), ("GPU-5", "GPU-5"), ("", 0)])
def test_the_gpu_is_the_first_that_cuda_sees(
    visible: str | None, handle: Any, fake_nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert target.first_gpu(fake_nvml.FakeNvml()) == handle

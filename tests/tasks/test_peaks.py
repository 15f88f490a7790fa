"""The probes of a device's ceilings: what they time, and how they are kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from tasks import peaks, peaks_probe, target
from tasks.files import read_json
from tasks.peaks import Peaks, Rate


def rate(best: float, median: float | None = None) -> Rate:
    return Rate(best, median or best, median or best, 3, "made up")


def made(threads: int = 1, device: str = "cpu") -> Peaks:
    return Peaks(device, threads, rate(1e10), rate(5e10), 1 << 20, {"fp32": rate(1e11)}, {"fp8": "none"})


def test_a_rate_is_of_work_of_known_length() -> None:
    found = peaks_probe.repeated(peaks_probe.on_host(lambda: time.sleep(0.02), 2), 100, "sleeping", 0.01)
    assert found.repeats == peaks_probe.LEAST, "a small budget still makes the least"
    assert 0 < found.low <= found.median <= found.best <= 100 / 0.04


def test_best_and_lowest_come_from_the_shortest_and_longest() -> None:
    seconds = iter([9.0, 1.0, 4.0, 2.0])
    found = peaks_probe.repeated(lambda: next(seconds), 8, "told", 0)
    assert (found.best, found.median, found.low) == (8, 4, 2), "the first is to warm up"


def test_this_cpu_reaches_its_own_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe runs here, on small budgets; a matrix product from caches beats its own operands' copies."""
    found = peaks.on_cpu(1, budget_s=0.3)
    assert set(found.matrix) | set(found.left_out) == set(peaks.CPU_FORMATS)
    assert {"fp32", "int8"} <= set(found.matrix)
    assert all(r.best >= r.median >= r.low > 0 for r in (found.memory, found.cache, *found.matrix.values()))
    assert found.cache_bytes == target.last_level_cache_bytes()
    assert 1e8 < found.memory.best < 1e13 and 1e8 < found.matrix["fp32"].best < 1e14


def test_threads_are_put_back() -> None:
    import torch

    before = torch.get_num_threads()
    peaks.on_cpu(before + 1, budget_s=0.05)
    assert torch.get_num_threads() == before


def test_a_probe_is_made_once_and_kept_with_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(target.fingerprint(), kind="cpu")
    asked: list[int] = []

    def probed(threads: int, budget_s: float) -> Peaks:
        asked.append(threads)
        return made(threads)

    monkeypatch.setattr(peaks, "on_cpu", probed)
    assert peaks.known(here.id) == ()
    assert peaks.probe([2, 1, 1], here=here) == (made(1), made(2))
    assert peaks.probe([1], here=here) == (made(1), made(2)) == peaks.known(here.id)
    assert asked == [1, 2]
    peaks.probe([1, 4], here=here)
    assert asked == [1, 2, 4], "what is missing is added"
    peaks.probe([1], force=True, here=here)
    assert asked[-1] == 1 and peaks.known(here.id) == (made(1),)
    assert read_json(peaks.path(here.id))["target"] == target.plain(here)


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"schema": 0, "target": {"id": "x"}, "peaks": []}', "[]"])
def test_an_unreadable_file_is_no_peaks(text: str) -> None:
    peaks.path("x").parent.mkdir(parents=True, exist_ok=True)
    peaks.path("x").write_text(text)
    assert peaks.known("x") == ()


def test_peaks_of_another_target_are_none() -> None:
    peaks.path("x").parent.mkdir(parents=True, exist_ok=True)
    peaks.path("x").write_text(json.dumps({"schema": 1, "target": {"id": "y"}, "peaks": []}))
    assert peaks.known("x") == ()


def test_a_device_is_found_by_its_threads() -> None:
    both = (made(1), made(2), made(0, "cuda"))
    assert peaks.find(both, "cpu", 2) is both[1]
    assert peaks.find(both, "cpu", 3) is None
    assert peaks.find(both, "cuda", 7) is both[2]


def test_a_disturbed_probe_says_so() -> None:
    assert not made().disturbed
    assert replace(made(), cache=rate(10, 7)).disturbed
    assert replace(made(), matrix={"fp32": rate(10, 7)}).disturbed


def test_a_refused_format_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Rate:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(peaks_probe, "cpu_int8", refused)
    found = peaks.on_cpu(1, budget_s=0.05)
    assert found.left_out["int8"] == "no such kernel" and "int8" not in found.matrix


@pytest.mark.gpu
def test_this_gpu_reaches_its_own_probes() -> None:
    found = peaks.on_cuda(budget_s=4.0)
    assert {"fp32", "fp16"} <= set(found.matrix), found.left_out
    assert found.matrix["fp16"].best > found.matrix["fp32"].best
    assert found.cache.best > found.memory.best > 1e10

"""The probes of a device's ceilings: what they time, and how they are kept."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import layout, machine, peaks, peaks_probe, roofline_commands, target
from tasks.files import read_json, write_json
from tasks.peaks import Failed, Peaks, Probed, Rate
from tasks.target import Target


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are kept in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def here() -> Target:
    """This machine, without its GPU."""
    return replace(target.fingerprint(), kind="cpu")


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


def test_where_other_work_disturbs_it_repeats_until_the_time_is_used_up() -> None:
    calm = peaks_probe.repeated(lambda: 1.0, 8, "told", 60)
    assert calm.repeats == peaks_probe.REPEATS
    taken = itertools.cycle([2.0, 2.0, 1.0])
    assert peaks_probe.repeated(lambda: next(taken), 8, "told", 0.05).repeats > peaks_probe.REPEATS


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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that the CPU is probed with; each probe ends at once."""
    found: list[int] = []

    def probed(threads: int, budget_s: float) -> Peaks:
        found.append(threads)
        return made(threads)

    monkeypatch.setattr(peaks, "on_cpu", probed)
    return found


def test_a_probe_is_made_once_and_kept_with_the_fingerprint(asked: list[int], here: Target) -> None:
    assert peaks.known(here) == Probed()
    assert peaks.probe([2, 1, 1], here=here) == Probed((made(1), made(2)))
    assert peaks.probe([1], here=here) == Probed((made(1), made(2))) == peaks.known(here)
    assert asked == [1, 2]
    peaks.probe([1, 4], here=here)
    assert asked == [1, 2, 4], "what is missing is added"
    peaks.probe([1], force=True, here=here)
    assert asked[-1] == 1 and peaks.known(here) == Probed((made(1),))
    assert read_json(layout.PEAKS)["target"] == target.plain(here)


def test_another_machine_or_library_is_probed_anew(asked: list[int], here: Target) -> None:
    peaks.probe([1], here=here)
    newer = replace(here, libraries={**here.libraries, "torch": "99.0"})
    assert peaks.known(replace(here, id="elsewhere")) == peaks.known(newer) == Probed()
    peaks.probe([1], here=newer)
    assert asked == [1, 1] and peaks.known(newer) == Probed((made(1),))


def test_a_file_that_is_complete_is_left_as_it_is(asked: list[int], here: Target) -> None:
    """DVC would take another time of writing for a change, and make the report again."""
    peaks.probe([1, 2], here=here)
    before = layout.PEAKS.stat().st_mtime_ns, layout.PEAKS.read_bytes()
    peaks.probe([2], here=here)
    assert (layout.PEAKS.stat().st_mtime_ns, layout.PEAKS.read_bytes()) == before


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"schema": 0}', "[]", "3"])
def test_an_unreadable_file_is_no_peaks(text: str, here: Target) -> None:
    layout.PEAKS.parent.mkdir(parents=True, exist_ok=True)
    layout.PEAKS.write_text(text)
    assert peaks.known(here) == Probed()


def test_entries_that_are_no_peaks_are_none(here: Target) -> None:
    for wrong in ([3], [{}], {"a": 1}, None):
        write_json(layout.PEAKS, {"schema": peaks.SCHEMA, "target": target.plain(here), "peaks": wrong, "failed": []})
        assert peaks.known(here) == Probed()


def test_a_device_is_found_by_its_threads() -> None:
    found = Probed((made(1), made(2), made(0, "cuda")), (Failed("cpu", 4, "no memory"),))
    assert found.find("cpu", 2) is found.peaks[1]
    assert found.find("cpu", 3) is None is found.why_not("cpu", 3)
    assert found.find("cuda", 7) is found.peaks[2]
    assert found.why_not("cpu", 4) == "no memory" and found.why_not("cuda", 4) is None


def broken_with_two(message: str) -> Callable[[int, float], Peaks]:
    """A probe of the CPU that fails with two threads."""

    def probe(threads: int, budget_s: float) -> Peaks:
        if threads == 2:
            raise MemoryError(message)
        return made(threads)

    return probe


def test_a_device_that_cannot_be_probed_is_kept_with_the_reason_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, here: Target
) -> None:
    monkeypatch.setattr(peaks, "on_cpu", broken_with_two("no room\nfor 64 MiB"))
    expected = Probed((made(1),), (Failed("cpu", 2, "no room for 64 MiB"),))
    assert peaks.probe([1, 2], here=here) == expected == peaks.known(here)
    monkeypatch.setattr(peaks, "on_cpu", lambda threads, budget_s: made(threads))
    assert peaks.probe([1, 2], here=here) == Probed((made(1), made(2)))


def test_the_reason_of_a_failed_probe_stays_until_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, here: Target
) -> None:
    monkeypatch.setattr(peaks, "on_cpu", broken_with_two("no room"))
    peaks.probe([2], here=here)
    assert peaks.probe([1], here=here) == Probed((made(1),), (Failed("cpu", 2, "no room"),)) == peaks.known(here)


def test_a_probe_that_crashes_leaves_a_file_that_says_so(monkeypatch: pytest.MonkeyPatch, here: Target) -> None:
    """The report depends on the file, and is made whatever happened to the probe."""

    def crashing(threads: int, budget_s: float) -> Peaks:
        raise SystemExit(139)

    monkeypatch.setattr(peaks, "on_cpu", crashing)
    with pytest.raises(SystemExit):
        peaks.probe([1], here=here)
    assert peaks.known(here).why_not("cpu", 1) == "its probe didn't end"


def test_a_gpu_that_pytorch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch, asked: list[int], here: Target) -> None:
    def refused() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.cuda.init", refused)
    found = peaks.probe([], here=replace(here, kind="cuda"))
    assert found == Probed((), (Failed("cuda", 0, "Torch not compiled with CUDA enabled"),))
    assert asked == [], "no engine is for the CPU"


def test_without_engines_for_the_cpu_it_is_probed_with_one_thread(asked: list[int], here: Target) -> None:
    peaks.probe([], here=here)
    assert asked == [1]


def test_the_command_waits_for_the_machine_but_not_for_the_flow_that_started_it(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[bool] = []
    real: Callable[[bool], object] = machine.hold
    monkeypatch.setattr(machine, "hold", lambda alone: held.append(alone) or real(alone))
    monkeypatch.setattr(target, "_gpu", lambda: None)
    monkeypatch.delenv("ENGINESMITH_PARENT", raising=False)
    write_json(layout.failure("peaks"), {"stage": "peaks", "reason": "an earlier one"})
    roofline_commands.peaks(force=False, threads=[2])
    assert held == [True] and asked == [2] and "cpu, 2 threads" in capsys.readouterr().out
    assert not layout.failure("peaks").exists()
    monkeypatch.setenv("ENGINESMITH_PARENT", str(os.getpid()))
    roofline_commands.peaks(force=True, threads=[2])
    assert held == [True] and asked == [2, 2]


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


def test_a_machine_without_any_format_fails_with_the_reasons_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Rate:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(peaks_probe, "cpu_int8", refused)
    monkeypatch.setattr(peaks_probe, "cpu_float", refused)
    with pytest.raises(RuntimeError, match="fp32: no such kernel; bf16: no such kernel"):
        peaks.on_cpu(1, budget_s=0.05)


@pytest.mark.gpu
def test_this_gpu_reaches_its_own_probes() -> None:
    found = peaks.on_cuda(budget_s=4.0)
    assert {"fp32", "fp16"} <= set(found.matrix), found.left_out
    assert found.matrix["fp16"].best > found.matrix["fp32"].best
    assert found.cache.best > found.memory.best > 1e10

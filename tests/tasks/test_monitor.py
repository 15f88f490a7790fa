"""The conditions of a measurement, and what spoils a window."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tasks import cpu_state, measure, monitor
from tasks.files import read_json, write_json
from tasks.gpu_state import Card, Gpu
from tasks.monitor import Monitor, lines, spoilt
from tasks.planted import Early
from tasks.settings import BenchmarkParams

CALM = Gpu(0.0, 1980, 3201, 41, 350.0, 700.0, (), {"power": 5.0, "thermal": 0.0}, 0, 0.0)
PARAMS = BenchmarkParams()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"reasons": ("idle",)}, None),
        ({"reasons": ("idle",), "sm_mhz": 1790}, None),
        (
            {"reasons": ("idle",), "sm_mhz": 345},
            "the GPU ran on idle clocks, below benchmark.min_clock of what it may run at",
        ),
        ({"reasons": ("application clocks",)}, None),
        ({"reasons": ("idle", "software power cap")}, "the GPU was throttled: software power cap"),
        ({"reasons": ("hardware thermal slowdown",)}, "the GPU was throttled: hardware thermal slowdown"),
        ({"reasons": ("reason 0x800",)}, "the GPU was throttled: reason 0x800"),
        ({"reasons": None, "sm_mhz": None, "others_busy": None, "held_back_ms": {}}, None),
        ({"held_back_ms": {"power": 10.9, "thermal": 0.0}}, None),
        ({"held_back_ms": {"power": 11.1, "thermal": 0.0}}, "the GPU's power limit held its clocks back"),
        ({"held_back_ms": {"power": 5.0, "thermal": 60.0}}, "the GPU's thermal limit held its clocks back"),
        ({"sm_mhz": 1790}, None),
        ({"sm_mhz": 345}, "the GPU's clock was lower than it had been"),
        ({"others_busy": 0.05, "others": 3}, None),
        ({"others_busy": 0.5}, "another process worked on the GPU"),
    ],
)
def test_a_window_is_judged_by_its_ends(change: dict[str, Any], reason: str | None) -> None:
    assert spoilt(CALM, replace(CALM, at_s=0.06, **change), 1980, 1980, PARAMS) == reason


def test_a_window_that_began_at_idle_clocks_is_spoilt() -> None:
    told = spoilt(replace(CALM, sm_mhz=345), replace(CALM, at_s=0.06), 1980, 1980, PARAMS)
    assert told == "the GPU's clock was lower than it had been"


@pytest.mark.parametrize(
    ("card", "told"),
    [
        ({}, "the GPU ran on idle clocks, below benchmark.min_clock of what it may run at"),
        ({"sm": 1980}, None),
        ({"application": 1500}, "the GPU ran on idle clocks, below benchmark.min_clock of what it may run at"),
        ({"application": 1500, "sm": 1500}, None),
        ({"sm": 1200, "reasons": 0x1 | 0x2}, None),
        ({"sm": 1200, "reasons": 0x2}, None),
        ({"top": None}, None),
    ],
)
def test_idle_clocks_throughout_are_noticed_and_clocks_that_someone_set_are_not(
    fake_nvml: Any, card: dict[str, Any], told: str | None
) -> None:
    card = {"sm": 345, "reasons": 0x1, "pids": [os.getpid()], **card}
    if card.get("top", 1980) is None:
        card["top"] = fake_nvml.NVMLError(fake_nvml.NOT_SUPPORTED)
    with Monitor(["cuda"], PARAMS, Card(fake_nvml.FakeNvml(**card))) as watch:
        assert [watch.disturbed(), watch.disturbed()] == [told, told]
    assert ("top_sm_mhz" in watch.conditions().missing) is isinstance(card.get("top"), Exception)
    with Monitor(["cuda", "cpu"], PARAMS, Card(fake_nvml.FakeNvml(**card))) as watch:
        assert watch.disturbed() is None


def test_a_set_clock_that_was_named_once_holds_for_idle_readings_too(fake_nvml: Any) -> None:
    nvml = fake_nvml.FakeNvml(sm=1200, reasons=0x2, pids=[os.getpid()])
    with Monitor(["cuda"], PARAMS, Card(nvml)) as watch:
        nvml.state["reasons"] = 0x1
        assert watch.disturbed() is None
        nvml.state["sm"] = 345
        assert watch.disturbed() == "the GPU's clock was lower than it had been"


@pytest.mark.parametrize("limit", ["power", "thermal"])
def test_a_limit_may_be_tolerated_and_the_clocks_under_it(limit: Any) -> None:
    reason = {"power": "software power cap", "thermal": "software thermal slowdown"}[limit]
    held = {"power": 5.0, "thermal": 0.0, limit: 55.0}
    now = replace(CALM, at_s=0.06, reasons=(reason,), sm_mhz=1300, held_back_ms=held)
    assert spoilt(CALM, now, 1980, 1980, PARAMS) is not None
    assert spoilt(CALM, now, 1980, 1980, BenchmarkParams(tolerate=(limit,))) is None
    idle = replace(now, reasons=("idle", reason))
    assert spoilt(CALM, idle, 1980, 1980, BenchmarkParams(tolerate=(limit,))) is None
    other: Any = {"power": "thermal", "thermal": "power"}[limit]
    assert spoilt(CALM, now, 1980, 1980, BenchmarkParams(tolerate=(other,))) is not None


def test_conditions_hold_before_during_and_after(fake_nvml: Any, tmp_path: Path) -> None:
    nvml = fake_nvml.FakeNvml(pids=[os.getpid()])
    with Monitor(["cuda"], PARAMS, Card(nvml)) as watch:
        assert watch.disturbed() is None
        nvml.state.update(sm=1200, temperature=80, power=690_000, reasons=0x40, held={0: 0, 1: 9e9})
        assert watch.disturbed() == "the GPU was throttled: hardware thermal slowdown"
        nvml.state.update(sm=1980, temperature=60, reasons=0)
    found = watch.conditions()
    assert (found.sm_mhz, found.temperature_c, found.power_w) == ((1200, 1980), (41, 80), (350.0, 690.0))
    assert found.reasons == ("hardware thermal slowdown",)
    assert found.held_back_ms == {"power": 0.0, "thermal": 9000.0}
    assert (found.readings, found.others, found.gpu_name) == (4, 0, "NVIDIA H200")
    assert found.before.gpu is not None
    assert found.after.gpu is not None
    assert (found.before.gpu.temperature_c, found.after.gpu.temperature_c) == (41, 60)
    write_json(tmp_path / "c.json", found)
    assert lines(read_json(tmp_path / "c.json")) == lines(asdict(found))
    assert "multiprocessors 1200 to 1980 MHz" in lines(asdict(found))[1]
    assert "throttled: hardware thermal slowdown, held back by thermal 9000 ms" in lines(asdict(found))[1]


def test_parts_of_a_measurement_have_the_conditions_of_all(fake_nvml: Any) -> None:
    def part() -> monitor.Conditions:
        with Monitor(["cuda"], PARAMS, Card(fake_nvml.FakeNvml(pids=[os.getpid()]))) as watch:
            for _ in range(2):
                watch.disturbed()
        return watch.conditions()

    parts = [replace(part(), seconds=1.0, switches=3, steal_share=0.1), replace(part(), seconds=3.0, switches=4)]
    parts[1] = replace(parts[1], steal_share=0.02, sm_mhz=(1000, 2500), reasons=("idle",), held_back_ms={"power": 2.0})
    parts[1] = replace(parts[1], temperature_c=None, missing={"temperature_c": "not told"})
    whole = monitor.merged(parts)
    assert (whole.before, whole.after) == (parts[0].before, parts[1].after)
    assert (whole.seconds, whole.switches, whole.readings) == (4.0, 7, parts[0].readings + parts[1].readings)
    assert whole.steal_share == pytest.approx((0.1 * 1 + 0.02 * 3) / 4)
    assert parts[0].sm_mhz is not None and whole.sm_mhz == (1000, max(2500, parts[0].sm_mhz[1]))
    assert whole.temperature_c == parts[0].temperature_c and whole.missing["temperature_c"] == "not told"
    assert whole.reasons is not None and "idle" in whole.reasons
    assert whole.held_back_ms is not None and whole.held_back_ms["power"] >= 2.0
    assert monitor.merged(parts[:1]) == parts[0]


def test_without_a_gpu_engine_none_is_read_and_the_reason_is_told() -> None:
    with Monitor(["cpu"], PARAMS) as watch:
        assert watch.disturbed() is None
    found = watch.conditions()
    assert found.gpu_name is None
    assert (found.sm_mhz, found.reasons, found.held_back_ms) == (None, None, None)
    assert found.missing["gpu"] == "no engine of the measurement runs on a GPU"
    assert asdict(found)["before"]["gpu"] is None
    assert lines(asdict(found))[0].startswith("CPU: load ")
    assert len(lines(asdict(found))) == 1


def test_beside_an_engine_on_the_cpu_the_gpus_clock_may_fall(fake_nvml: Any) -> None:
    nvml = fake_nvml.FakeNvml(pids=[os.getpid()])
    told = []
    for devices in (["cuda", "cuda"], ["cuda", "cpu"]):
        nvml.state["sm"] = 1980
        with Monitor(devices, PARAMS, Card(nvml)) as watch:
            nvml.state["sm"] = 345
            told.append(watch.disturbed())
    assert told == ["the GPU's clock was lower than it had been", None]


def test_heat_that_slows_the_cpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([3, 3, 4, 4])
    real = cpu_state.read()
    monkeypatch.setattr(monitor.cpu_state, "read", lambda: replace(real, throttled=next(counts)))
    with Monitor(["cpu"], PARAMS) as watch:
        assert [watch.disturbed(), watch.disturbed()] == [None, "the CPU was slowed by heat"]
    assert watch.conditions().throttled == 1


def test_throttled_windows_of_a_measurement_are_thrown_away(fake_nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that throttles during a quarter of the readings: those windows don't count, and are counted."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 100)
    readings = iter(range(100_000))
    nvml = fake_nvml.FakeNvml(pids=[os.getpid()], reasons=lambda: 0x40 if next(readings) % 8 > 5 else 0)
    settings = BenchmarkParams(rounds=8, max_rounds=8, window_ms=2, warmup_ms=2, max_lost=1000)
    import numpy as np

    with Monitor(["cuda"], settings, Card(nvml)) as watch:
        sessions = {"a": Early(1e-4), "b": Early(1e-4)}
        timings = measure.interleave(sessions, {"x": np.zeros((8, 1))}, settings, disturbed=watch.disturbed)
    thrown = timings["a"].discarded | timings["b"].discarded
    assert set(thrown) == {"the GPU was throttled: hardware thermal slowdown"}
    assert len(timings["a"].medians) == 8
    assert timings["a"].busy is None
    assert watch.conditions().reasons == ("hardware thermal slowdown",)


@pytest.mark.gpu
def test_a_real_card_is_read_around_a_measurement() -> None:
    with Monitor(["cuda"], PARAMS) as watch:
        for _ in range(10):
            watch.disturbed()
    found = watch.conditions()
    assert found.gpu_name is not None
    assert found.readings == 12
    assert found.reading_ms < 100
    assert len(lines(asdict(found))) == 2

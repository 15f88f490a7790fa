"""What a GPU says of itself, decoded; on a fake card, and on a real one where there is one."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tasks import gpu_state
from tasks.errors import Unavailable
from tasks.gpu_state import Card, names


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (0, ()),
        (0x1, ("idle",)),
        (0x2, ("application clocks",)),
        (0x4 | 0x40, ("software power cap", "hardware thermal slowdown")),
        (0x8 | 0x10 | 0x20, ("hardware slowdown", "sync boost", "software thermal slowdown")),
        (0x80 | 0x100, ("hardware power brake", "display clock setting")),
        (0x4 | 0x800, ("software power cap", "reason 0x800")),
    ],
)
def test_reasons_have_names(mask: int, told: tuple[str, ...]) -> None:
    assert names(mask) == told


def test_the_names_are_those_of_nvidias_own_bindings() -> None:
    pynvml = pytest.importorskip("pynvml")
    for word, constant in (
        ("idle", "GpuIdle"),
        ("application clocks", "ApplicationsClocksSetting"),
        ("software power cap", "SwPowerCap"),
        ("hardware slowdown", "HwSlowdown"),
        ("sync boost", "SyncBoost"),
        ("software thermal slowdown", "SwThermalSlowdown"),
        ("hardware thermal slowdown", "HwThermalSlowdown"),
        ("hardware power brake", "HwPowerBrakeSlowdown"),
        ("display clock setting", "DisplayClockSetting"),
    ):
        assert names(getattr(pynvml, f"nvmlClocksEventReason{constant}")) == (word,)
    assert {"power": pynvml.NVML_PERF_POLICY_POWER, "thermal": pynvml.NVML_PERF_POLICY_THERMAL} == gpu_state.POLICIES


def test_a_reading_has_units(fake_nvml: Any) -> None:
    nvml = fake_nvml.FakeNvml(reasons=0x4, held={0: 2_500_000, 1: 0}, pids=[os.getpid(), 7])
    found = Card(nvml).read()
    assert (found.sm_mhz, found.memory_mhz, found.temperature_c) == (1980, 3201, 41)
    assert (found.power_w, found.power_limit_w) == (350.0, 700.0)
    assert found.reasons == ("software power cap",)
    assert found.held_back_ms == {"power": 2.5, "thermal": 0.0}
    assert (found.others, found.others_busy, found.missing) == (1, 0.0, {})
    assert found.top_sm_mhz == 1980


def test_what_a_card_may_run_at_is_its_highest_clock_or_the_one_that_is_set(fake_nvml: Any) -> None:
    unknown = fake_nvml.NVMLError(fake_nvml.NOT_SUPPORTED)
    for told, top in (
        ({"top": 1980, "application": 1500}, 1500),
        ({"top": 1410, "application": 1980}, 1410),
        ({"top": 1980, "application": 0}, 1980),
        ({"top": 1980, "application": unknown}, 1980),
        ({"top": unknown, "application": 1500}, None),
    ):
        assert Card(fake_nvml.FakeNvml(**told)).read().top_sm_mhz == top


def test_what_the_driver_does_not_tell_is_null_with_the_reason(fake_nvml: Any) -> None:
    unknown = fake_nvml.NVMLError(fake_nvml.NOT_SUPPORTED)
    keys = ("sm", "memory", "temperature", "power", "limit", "reasons", "held", "pids", "top", "application")
    found = Card(fake_nvml.FakeNvml(**dict.fromkeys(keys, unknown))).read()
    told = ("sm_mhz", "memory_mhz", "temperature_c", "power_w", "power_limit_w", "reasons", "others", "others_busy")
    told += ("top_sm_mhz",)
    assert all(getattr(found, name) is None and found.missing[name] == "Not Supported" for name in told)
    assert found.held_back_ms == {}
    assert found.missing["held_back_ms.power"] == "Not Supported"


def test_the_busiest_other_process_counts_and_old_samples_do_not(fake_nvml: Any) -> None:
    samples = [fake_nvml.work(7, 35, 100), fake_nvml.work(8, 10, 110), fake_nvml.work(os.getpid(), 99, 120)]
    card = Card(fake_nvml.FakeNvml(pids=[os.getpid(), 7, 8], work=samples))
    assert card.read().others_busy == 0.35
    assert card.read().others_busy == 0.0


@pytest.mark.parametrize(
    ("pids", "others", "why"),
    [
        ([], None, "the driver lists no processes here, not even this one"),
        ([1_000_001, 1_000_002], 1, "the driver numbers processes otherwise than this system"),
    ],
)
def test_in_a_container_nothing_is_said_of_others_work(
    fake_nvml: Any, monkeypatch: pytest.MonkeyPatch, pids: list[int], others: int | None, why: str
) -> None:
    monkeypatch.setattr(gpu_state, "using", lambda: True)
    found = Card(fake_nvml.FakeNvml(pids=pids, work=[fake_nvml.work(1_000_001, 90, 5)])).read()
    assert (found.others, found.others_busy, found.missing["others_busy"]) == (others, None, why)


def test_a_driver_of_the_older_name_is_asked_by_it(fake_nvml: Any) -> None:
    nvml = fake_nvml.FakeNvml(reasons=fake_nvml.NVMLError(fake_nvml.FUNCTION_NOT_FOUND))
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x20
    assert Card(nvml).read().reasons == ("software thermal slowdown",)


def test_a_card_is_closed_once(fake_nvml: Any) -> None:
    nvml = fake_nvml.FakeNvml()
    card = Card(nvml)
    assert nvml.opened == 1
    card.close()
    card.close()
    assert nvml.opened == 0


def test_without_a_driver_it_says_so_in_one_line(fake_nvml: Any) -> None:
    class Bare(fake_nvml.FakeNvml):
        def nvmlInit(self) -> None:
            raise fake_nvml.NVMLError(fake_nvml.NOT_FOUND)

    with pytest.raises(Unavailable, match=r"^no NVIDIA GPU can be read here: Not Found$"):
        Card(Bare())


@pytest.mark.gpu
def test_a_real_card_tells_plausible_numbers() -> None:
    card = Card()
    try:
        first = card.read()
        start, joules = time.perf_counter(), card.joules()
        time.sleep(1.0)
        second, elapsed = card.read(), time.perf_counter() - start
        watts = (card.joules() - joules) / elapsed
    finally:
        card.close()
    assert first.sm_mhz is not None
    assert 100 <= first.sm_mhz <= 4000
    assert first.top_sm_mhz is not None
    assert first.sm_mhz <= 1.1 * first.top_sm_mhz
    assert first.temperature_c is not None
    assert 10 <= first.temperature_c <= 95
    assert first.power_w is not None
    assert first.power_limit_w is not None
    assert 5 < first.power_w <= 1.2 * first.power_limit_w
    assert 0.2 * first.power_w < watts < 5 * first.power_w
    assert first.reasons is not None
    assert not any(reason.startswith("reason 0x") for reason in first.reasons)
    for limit, held in second.held_back_ms.items():
        assert -1e-6 <= held - first.held_back_ms[limit] <= 1.1e3 * elapsed

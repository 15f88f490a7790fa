"""What an engine costs beside time, out of its benchmark's record."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from tasks import costs
from tasks.costs import Cost
from tasks.energy import Energy
from tasks.footprint import Footprint
from tasks.stats import Interval

START = Footprint(
    batch=1, import_s=1.0, load_s=0.2, first_call_s=0.1, first_inference_s=1.3, host_bytes=100, host_peak_bytes=300,
    device_bytes=None, device_peak_bytes=None, session_bytes=None, activation_bytes=50, how="",
)  # fmt: skip
METERED = Energy(
    meter="a meter", reason=None, raw_mj_per_inference=Interval(3.0, 2.9, 3.1),
    net_mj_per_inference=Interval(1.0, 0.9, 1.1), idle_w=5.0, power_w=9.0, batch=1,
)  # fmt: skip


def record(**changes: Any) -> dict[str, Any]:
    """A benchmark's record as its JSON has it, as far as costs read it."""
    return {"footprint": asdict(START), "energy": asdict(METERED), "not_run": None, **changes}


def test_all_numbers_of_a_record_are_kept() -> None:
    assert costs.of_record(record()) == Cost(
        energy_mj=Interval(3.0, 2.9, 3.1),
        energy_net_mj=Interval(1.0, 0.9, 1.1),
        load_s=0.2,
        first_inference_s=1.3,
        host_peak_bytes=300,
        activation_bytes=50,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"energy": asdict(Energy(meter=None, reason="no RAPL here"))}, "no RAPL here"),
        ({"energy": None}, costs.OLDER),
        ({"energy": None, "footprint": None, "not_run": "no such GPU"}, "no such GPU"),
    ],
)
def test_without_an_energy_there_is_a_reason(changes: dict[str, Any], reason: str) -> None:
    found = costs.of_record(record(**changes))
    assert (found.energy_mj, found.energy_net_mj, found.energy_reason) == (None, None, reason)


def test_a_record_of_an_earlier_version_has_no_costs() -> None:
    assert costs.of_record({"not_run": None}) == Cost(energy_reason=costs.OLDER)


@pytest.mark.parametrize("key", ["load_s", "first_inference_s", "host_peak_bytes", "activation_bytes"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        costs.of_record(record(footprint={**asdict(START), key: value}))


@pytest.mark.parametrize("key", ["raw_mj_per_inference", "net_mj_per_inference"])
def test_an_energy_that_is_not_finite_is_refused(key: str) -> None:
    energy = {**asdict(METERED), key: {"value": 3.0, "low": -math.inf, "high": 4.0}}
    with pytest.raises(ValueError, match=key):
        costs.of_record(record(energy=energy))


@pytest.mark.parametrize(("device", "memory"), [(None, 300), (900, 900), (0, 0)])
def test_memory_is_the_devices_where_there_is_one(device: int | None, memory: int) -> None:
    found = costs.of_record(record(footprint={**asdict(START), "device_peak_bytes": device}))
    assert found.memory_bytes == memory
    assert costs.plain(asdict(found))["memory_bytes"] == memory


@pytest.mark.parametrize(("device", "memory"), [(None, None), (900, 900)])
def test_the_hosts_memory_does_not_stand_in_for_a_gpus(device: int | None, memory: int | None) -> None:
    """A GPU without NVML, such as a Jetson's, tells none."""
    found = costs.of_record(record(footprint={**asdict(START), "device_peak_bytes": device}), on_gpu=True)
    assert (found.memory_bytes, found.host_peak_bytes) == (memory, 300)
    told = costs.plain(asdict(found))
    assert told["memory_bytes"] == memory and "on_gpu" not in told
    assert costs.restored(asdict(found)) == found


def test_a_cost_survives_json() -> None:
    found = costs.of_record(record())
    assert costs.restored(asdict(found)) == found
    assert costs.restored({}) == Cost()


def test_energy_allows_for_another_opening() -> None:
    metered = {"value": 100.0, "low": 99.0, "high": 101.0}
    energy = {"raw_mj_per_inference": metered, "net_mj_per_inference": {"value": 50.0, "low": 49.0, "high": 51.0}}
    found = [costs.of_record({"energy": {**energy, "reason": None}}, True, sd) for sd in (0.0, 0.034)]
    plain, allowed = (cost.energy_mj for cost in found)
    assert (plain.low, plain.high) == (99.0, 101.0)
    assert found[1].energy_net_mj.high - 50 == pytest.approx(allowed.high - 100)
    assert allowed.value == 100
    assert allowed.high - 100 == pytest.approx((1 + (1.96 * 3.4 / 2**0.5) ** 2) ** 0.5, rel=1e-3)

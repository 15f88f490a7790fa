"""Energy per inference, on meters that count known joules."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import energy, meters
from tasks.errors import Unavailable
from tasks.gpu_state import Card
from tasks.meters import GpuMeter, Rapl
from tasks.planted import Early, Planted
from tasks.settings import BenchmarkParams
from tasks.stats import Interval

PARAMS = BenchmarkParams(energy_s=1, batch=2)
POOL = [{"x": np.zeros((2, 1), np.float32)}] * 4


class Clock:
    """Time that passes when it is told to, in place of the module time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Steps:
    """A counter of `watts` and of `millijoules` for each call of a session, that steps every `step_s`."""

    name = "steps"

    def __init__(self, clock: Clock, watts: float, step_s: float, millijoules: float = 0.0) -> None:
        self.clock, self.watts, self.step_s, self.millijoules = clock, watts, step_s, millijoules
        self.calls, self._step, self._joules = 0, -1, 0.0

    def joules(self) -> float:
        step = math.floor(self.clock.now / self.step_s)
        if step != self._step:
            self._step = step
            self._joules = step * self.step_s * self.watts + self.calls * self.millijoules / 1e3
        return self._joules


class Cooling(Steps):
    """A counter of `watts` and of `warm` watts more, which fade by half in `half_s` once no call was made."""

    def __init__(self, clock: Clock, watts: float, warm: float, half_s: float) -> None:
        super().__init__(clock, watts, 0.001)
        self.warm, self.half_s, self._then, self._heat, self._seen = warm, half_s, clock.now, warm, 0

    def joules(self) -> float:
        passed, self._then = self.clock.now - self._then, self.clock.now
        if self.calls > self._seen:
            self._seen, self._heat = self.calls, self.warm
            self._joules += passed * (self.watts + self.warm)
            return self._joules
        left = self._heat * 0.5 ** (passed / self.half_s)
        self._joules += passed * self.watts + (self._heat - left) * self.half_s / math.log(2)
        self._heat = left
        return self._joules


class Wavy(Steps):
    """A counter of a power that sways by 3.5 W, about once a second."""

    def joules(self) -> float:
        return super().joules() + math.sin(7 * math.floor(self.clock.now / self.step_s) * self.step_s) / 2


class Session(Planted):
    """A session whose calls take a time of the clock, and energy of the meter."""

    def __init__(self, clock: Clock, meter: Steps, seconds: float = 1e-3) -> None:
        self.clock, self.meter, self.seconds, self.loaded = clock, meter, seconds, 0

    def run(self, batch: Any) -> Any:
        self.meter.calls += 1
        self.clock.sleep(self.seconds)
        return {}

    def synchronize(self) -> None:
        pass

    def load(self, batch: Any) -> None:
        self.loaded += 1

    def device_ms(self, calls: int) -> float:
        for _ in range(calls):
            self.run({})
        return self.seconds * 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(energy, "time", made)
    return made


@pytest.mark.parametrize("step_s", [0.001, 0.03, 0.1])
def test_what_a_call_takes_is_found_above_idle(clock: Clock, step_s: float) -> None:
    """50 W idle and 40 mJ for each call of two samples, which takes 1 ms: 20 mJ for each, and 25 mJ of idling."""
    meter = Steps(clock, 50.0, step_s, millijoules=40.0)
    found = energy.measure(Session(clock, meter), POOL, PARAMS, meter, lambda: None)
    assert found.idle_w == pytest.approx(50, rel=0.02)
    assert (len(found.idle_windows_w), found.idle_settled) == (4, True)
    assert found.unclear_net_mj_per_inference is None
    assert found.net_mj_per_inference is not None
    assert found.raw_mj_per_inference is not None
    assert found.net_mj_per_inference.value == pytest.approx(20, rel=0.03)
    assert found.raw_mj_per_inference.value == pytest.approx(45, rel=0.03)
    assert found.net_mj_per_inference.low <= found.net_mj_per_inference.value <= found.net_mj_per_inference.high
    assert (found.windows, found.batch, found.reason, found.meter) == (4, 2, None, "steps")
    assert found.seconds >= 4 * PARAMS.energy_s
    assert found.inferences == pytest.approx(2e3 * found.seconds, rel=0.03)
    assert found.power_w == pytest.approx(90, rel=0.03)


@pytest.mark.parametrize("step_s", [0.02, 0.05, 0.1])
def test_idle_power_is_as_steady_as_the_device_however_the_counter_steps(clock: Clock, step_s: float) -> None:
    windows = [watts for _ in range(6) for watts in energy.idle_w(Steps(clock, 120.0, step_s), 0.5)[0]]
    assert windows == pytest.approx([120.0] * len(windows), rel=0.005)


def test_idle_power_is_waited_for_until_it_settled(clock: Clock) -> None:
    """200 W more right after work, half of it gone each 0.3 s: none of it is left in the windows."""
    windows, settled = energy.idle_w(Cooling(clock, 100.0, 200.0, 0.3), 0.5)
    assert settled
    assert windows == pytest.approx([100.0, 100.0], rel=0.01)


def test_the_wait_for_idle_power_is_bounded_and_told(clock: Clock) -> None:
    began = clock.now
    windows, settled = energy.idle_w(Cooling(clock, 100.0, 200.0, 10.0), 0.5)
    assert not settled
    assert clock.now - began == pytest.approx(10 * 0.5, rel=0.15)
    assert windows[0] > windows[1] > 200
    meter = Cooling(clock, 100.0, 200.0, 10.0)
    found = energy.measure(Session(clock, meter), POOL, PARAMS, meter, lambda: None)
    assert found.idle_settled is False
    assert "W idle, unsettled;" in energy.lines(asdict(found))[0]


def test_the_error_of_idle_power_is_in_the_net_energy() -> None:
    joules, seconds, n = np.array([20.0, 20.2, 19.8, 20.0]), np.full(4, 1.0), np.full(4, 100.0)
    sure = energy.above_idle(joules, seconds, n, np.full(4, 10.0), 0.95)
    assert (sure.value, sure.high - sure.low) == (
        pytest.approx(100),
        pytest.approx(2 * 3.18245 * np.sqrt(0.08 / 12) * 10, 1e-4),
    )
    idle = np.array([9.0, 9.2, 11.0, 10.8])
    found = energy.above_idle(joules, seconds, n, idle, 0.95)
    half = 3.18245 / 2 * np.hypot(joules.std(ddof=1), idle.std(ddof=1)) * 10
    assert (found.value, found.value - found.low, found.high - found.value) == pytest.approx(
        (100, half, half), rel=1e-4
    )


def test_the_interval_of_the_net_energy_covers_the_truth() -> None:
    rng, trials, covered = np.random.default_rng(0), 2000, 0
    for spread, idle_spread in ((1.0, 0.1), (0.5, 0.5), (0.1, 1.0)):
        for _ in range(trials):
            joules, idle = rng.normal(120, spread, 4), rng.normal(100, idle_spread, 4)
            found = energy.above_idle(joules, np.ones(4), np.full(4, 1000), idle, 0.95)
            covered += found.low <= 20 <= found.high
    assert covered / (3 * trials) >= 0.945


@pytest.mark.parametrize(("kind", "above"), [(Wavy, 0.1), (Steps, -3.0)])
def test_what_is_not_told_apart_from_idle_is_none_with_the_reason(
    clock: Clock, kind: type[Steps], above: float
) -> None:
    """An engine that takes hardly more than idling does, and one that takes 3 W less: the value is kept apart."""
    meter = kind(clock, 100.0, 0.001, millijoules=above)
    found = energy.measure(Session(clock, meter), POOL, PARAMS, meter, lambda: None)
    assert found.raw_mj_per_inference is not None
    assert found.net_mj_per_inference is None
    assert found.unclear_net_mj_per_inference is not None
    assert found.unclear_net_mj_per_inference.low <= 0
    assert found.unclear_net_mj_per_inference.value == pytest.approx(above / 2, abs=1.5)
    assert found.reason is not None
    assert re.fullmatch(r"not told apart from idle: .* W at work, .* W idle \(.* to .* W in 4 windows\)", found.reason)
    line = energy.lines(asdict(found))[0]
    assert found.reason in line and "above idle" not in line
    assert energy.restored(asdict(found)).unclear_net_mj_per_inference == found.unclear_net_mj_per_inference


def test_a_record_of_an_earlier_version_is_read() -> None:
    told = energy.Energy("NVML", None, Interval(2.0, 1.9, 2.1), Interval(1.0, 0.9, 1.1), 100.0, 200.0, 1, 40, 4.0, 4)
    new = ("unclear_net_mj_per_inference", "idle_windows_w", "idle_settled")
    assert energy.restored({key: value for key, value in asdict(told).items() if key not in new}) == told


def test_without_the_steps_of_the_counter_a_window_would_be_off(clock: Clock) -> None:
    """Of a counter that steps once in 100 ms, a window of 0.15 s begins and ends at a step, and is right."""
    meter = Steps(clock, 100.0, 0.1)

    def rest() -> int:
        clock.sleep(0.001)
        return 1

    for _ in range(3):
        clock.sleep(0.037)
        joules, seconds, done = energy._window(meter, rest, 0.15)
        assert joules == pytest.approx(20)
        assert joules / seconds == pytest.approx(100, rel=0.06)
        assert done == pytest.approx(seconds / 0.001, rel=0.02)


def test_a_counter_that_stands_still_is_a_reason(clock: Clock) -> None:
    meter = Steps(clock, 0.0, 1.0)
    found = energy.measure(Session(clock, meter), POOL, PARAMS, meter, lambda: None)
    assert found.raw_mj_per_inference is None
    assert found.reason == "the counter stood still for 1 s (steps)"
    assert energy.lines(asdict(found)) == ["energy: not known, the counter stood still for 1 s (steps)"]


def test_disturbed_windows_are_made_again_and_counted(clock: Clock) -> None:
    meter, told = Steps(clock, 50.0, 0.001), iter([None, "too hot", *[None] * 100])
    found = energy.measure(Session(clock, meter), POOL, PARAMS, meter, lambda: next(told))
    assert (found.discarded, found.disturbed, found.windows) == ({"too hot": 1}, None, 4)
    found = energy.measure(Session(clock, meter), POOL, PARAMS, meter, lambda: "too hot")
    assert (found.discarded, found.disturbed) == ({"too hot": 8}, "too hot")


def test_the_device_clocks_launches_are_counted(clock: Clock) -> None:
    meter = Steps(clock, 1.0, 0.001, millijoules=40.0)
    session = Session(clock, meter, 1e-4)
    params = BenchmarkParams(energy_s=0.5, batch=2, clock="device")
    found = energy.measure(session, POOL, params, meter, lambda: None)
    assert session.loaded == 1
    assert found.raw_mj_per_inference is not None
    assert found.raw_mj_per_inference.value == pytest.approx(20, rel=0.02)


def test_an_interval_of_a_mean_is_students() -> None:
    found = energy.mean(np.array([1.0, 2.0, 3.0]), 0.95)
    assert (found.value, found.high - found.value) == (2.0, pytest.approx(4.30265 / math.sqrt(3), 1e-4))
    assert found.value - found.low == pytest.approx(found.high - found.value)
    for values in ([1.0], [1.0, np.nan], [np.inf, 1.0]):
        with pytest.raises(ValueError, match="all of them finite"):
            energy.mean(np.array(values), 0.95)


def test_switched_off_or_without_a_meter_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = {"x": np.zeros((4, 1))}
    off = energy.prepare("cpu", None, BenchmarkParams(energy=False))
    assert energy.of(Early(0.0), inputs, PARAMS, off, lambda: None).reason == "benchmark.energy is false"
    monkeypatch.setattr(meters, "Rapl", lambda: Rapl(tmp_path))
    none = energy.prepare("cpu", None, PARAMS)
    assert none == "no energy counter here: no RAPL package under /sys/class/powercap"
    assert energy.prepare("cuda", None, PARAMS) == "the GPU can't be read here"


def zone(root: Path, number: str, name: str, uj: int) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir()
    for file, text in (("name", name), ("energy_uj", str(uj)), ("max_energy_range_uj", "1000000")):
        (folder / file).write_text(f"{text}\n")
    return folder


def test_rapl_adds_packages_and_memories_and_goes_on_when_a_counter_starts_again(tmp_path: Path) -> None:
    package, memory = zone(tmp_path, "0", "package-0", 900_000), zone(tmp_path, "0:1", "dram", 10)
    zone(tmp_path, "0:0", "core", 5)
    zone(tmp_path, "1", "psys", 5)
    meter = Rapl(tmp_path)
    assert meter.name == "RAPL, package-0, dram"
    assert meter.joules() == 0
    (package / "energy_uj").write_text("100000\n")
    (memory / "energy_uj").write_text("50010\n")
    assert meter.joules() == pytest.approx(0.25)
    (package / "energy_uj").write_text("150000\n")
    assert meter.joules() == pytest.approx(0.30)


def test_rapl_that_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no RAPL package"):
        Rapl(tmp_path)
    (zone(tmp_path, "0", "package-0", 1) / "energy_uj").write_text("much\n")
    with pytest.raises(Unavailable, match="can't be read"):
        Rapl(tmp_path)


def test_a_gpus_meter_is_the_whole_cards(fake_nvml: Any) -> None:
    nvml = fake_nvml.FakeNvml(energy=7_500)
    meter = GpuMeter(Card(nvml))
    assert (meter.name, meter.joules()) == ("NVML, NVIDIA H200", 7.5)
    nvml.state["mig"] = [1, 1]
    with pytest.raises(Unavailable, match="cut into slices"):
        GpuMeter(Card(nvml))
    with pytest.raises(Unavailable, match="NVIDIA H200 tells no energy: Not Supported"):
        GpuMeter(Card(fake_nvml.FakeNvml(energy=fake_nvml.NVMLError(fake_nvml.NOT_SUPPORTED))))


def test_energy_is_said_in_a_sentence() -> None:
    told = energy.Energy("NVML", None, Interval(2.0, 1.9, 2.1), Interval(1.0, 0.9, 1.1), 100.0, 200.0, 1, 40, 4.0, 4)
    line = energy.lines(asdict(told))[0]
    assert line.startswith("energy: 2 mJ an inference [1.9, 2.1], 1 mJ [0.9, 1.1] above idle; 200 W")


@pytest.mark.gpu
def test_a_real_card_takes_more_at_work_than_idle() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    class Products(Early):
        def run(self, batch: Any) -> Any:
            for _ in range(4):
                a @ a
            return {}

        def synchronize(self) -> None:
            torch.cuda.synchronize()

    session, card = Products(0.0), Card()
    try:
        metered = energy.prepare("cuda", card, PARAMS)
        assert not isinstance(metered, str), metered
        found = energy.measure(session, POOL, BenchmarkParams(batch=2), metered, lambda: None)
    finally:
        card.close()
    assert found.power_w is not None
    assert found.idle_w is not None
    assert found.power_w > 1.3 * found.idle_w > 0
    assert found.net_mj_per_inference is not None, found.reason
    assert found.raw_mj_per_inference is not None
    raw = found.raw_mj_per_inference
    assert (raw.high - raw.low) / raw.value < 0.5  # Other tests may be at work on the card.

"""Interleaved timing, on sessions of known slowness."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tasks import disturbance, measure, sequential
from tasks import timing as clocks
from tasks.errors import Fault
from tasks.files import read_json, write_json
from tasks.planted import Early, Slowed
from tasks.settings import BenchmarkParams
from tasks.stats import ratio, reopened


class Sleeper:
    """A session that takes a known time; it keeps what it was called with."""

    def __init__(self, seconds: float, log: list[Any] | None = None, name: str = "") -> None:
        self.seconds, self.log, self.name, self.synchronized = seconds, log, name, 0

    def run(self, batch: Any) -> Any:
        if self.log is not None:
            self.log.append((self.name, batch["x"]))
        time.sleep(self.seconds)

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def params() -> Any:
    return lambda **changes: BenchmarkParams(
        **{
            **{
                "openings": 1,
                "rounds": 8,
                "max_rounds": 8,
                "window_ms": 6,
                "warmup_ms": 5,
                "max_width": 0.99,
                "max_lost": 1000,
            },
            **changes,
        }
    )


INPUTS = {"x": np.arange(100, dtype=np.float32).reshape(100, 1)}


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of a few batches, whatever this machine's cache."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 100)


def test_a_session_three_times_as_slow_is_told(params: Any) -> None:
    timings = measure.interleave({"fast": Sleeper(1e-3), "slow": Sleeper(3e-3)}, INPUTS, params())
    gain = measure.speedup(timings, "fast", "slow", 0.95)
    assert gain.low <= gain.value <= gain.high
    assert 1.4 < gain.value < 6
    assert measure.speedup(timings, "slow", "fast", 0.95).value == pytest.approx(1 / gain.value)
    assert timings["slow"].mean >= 3


def test_a_timing_is_made_of_its_rounds(params: Any) -> None:
    timing = measure.interleave({"a": Sleeper(1e-3)}, INPUTS, params(batch=4))["a"]
    assert (timing.batch, len(timing.medians)) == (4, 8)
    assert timing.n >= 8 * 3
    assert timing.throughput_per_s == pytest.approx(4 / timing.mean * 1e3)
    assert (timing.p50 is None, timing.p99) == (timing.n < 11, None)
    rate = timing.bounds["throughput_per_s"]
    assert rate.value == pytest.approx(timing.throughput_per_s) and rate.low <= rate.value <= rate.high
    assert ("p50" in timing.bounds, "p99" in timing.bounds) == (timing.n >= 11, False)
    assert measure.restored(json.loads(json.dumps(asdict(timing)))) == timing


def test_every_call_is_synchronized_in_random_rounds_on_rotating_inputs(params: Any) -> None:
    log: list[Any] = []
    sessions = {name: Sleeper(2e-4, log, name) for name in ("a", "b", "c")}
    measure.interleave(sessions, INPUTS, params(batch=2))
    assert sum(s.synchronized for s in sessions.values()) == len(log)
    runs = [name for i, (name, _) in enumerate(log) if i == 0 or log[i - 1][0] != name]
    orders = {"".join(runs[i : i + 3]) for i in range(3, len(runs) - 2)}
    turns = {"abc", "bca", "cab"}
    assert orders & turns
    assert orders - turns
    for name in sessions:
        mine = [batch for n, batch in log if n == name]
        assert all(b.shape == (2, 1) and b.flags.c_contiguous for b in mine)
        assert not any(np.shares_memory(x, y) for x, y in pairwise(mine))


def test_rounds_go_on_while_the_interval_is_wide_and_end_once_it_is_clear(params: Any) -> None:
    def rounds(**changes: Any) -> int:
        sessions = {"a": Device(noisy(1.0, 0)), "b": Device(noisy(5.0, 1))}
        timings = measure.interleave(sessions, INPUTS, params(max_rounds=18, clock="device", **changes))
        return len(timings["a"].medians)

    assert rounds(max_width=1e-6) == 18
    assert rounds(max_width=0.999) == 8


def test_rounds_go_on_while_the_answer_is_open(params: Any) -> None:
    timings = measure.interleave(
        {"a": Device(noisy(1.0, 0)), "b": Device(noisy(1.0, 1))}, INPUTS, params(max_rounds=20, clock="device")
    )
    assert timings["a"].looks == timings["b"].looks == (8, 13, 18, 20)
    assert (len(timings["a"].medians), timings["a"].horizon) == (20, 20)


def test_a_difference_that_is_plain_ends_at_the_first_look(params: Any) -> None:
    sessions = {"a": Device(noisy(1.0, 0)), "b": Device(noisy(2.0, 1))}
    timings = measure.interleave(sessions, INPUTS, params(rounds=10, max_rounds=20, clock="device"))
    assert timings["a"].looks == (10,)
    gain = measure.speedup(timings, "a", "b", 0.95)
    sure = sequential.confidence_at((10,), 20, 0.95)
    rounds = ratio(np.array(timings["b"].medians), np.array(timings["a"].medians), sure)
    expected = reopened(rounds, 0.007, sure)
    assert (gain.low, gain.high) == (expected.low, expected.high)
    assert clocks.confidence_of(timings["a"], 0.95) == sure > 0.95


def test_the_more_engines_are_judged_the_longer_it_goes_on(params: Any) -> None:
    """Eight rounds can't tell one of a hundred engines apart, as they can one alone."""
    sessions = {"a": Device(noisy(1.0, 0)), "b": Device(noisy(2.0, 1))}
    settings = params(max_rounds=23, clock="device", confidence=0.9)
    alone = measure.interleave(sessions, INPUTS, settings)
    many = measure.interleave(sessions, INPUTS, settings, family=100)
    assert (len(alone["a"].medians), len(many["a"].medians)) == (8, 13)


def test_the_time_budget_ends_rounds_after_the_fewest(params: Any) -> None:
    sessions = {"a": Sleeper(2e-4), "b": Sleeper(2e-4)}
    timings = measure.interleave(sessions, INPUTS, params(max_rounds=400, max_width=1e-6, window_ms=1, budget_s=0.05))
    assert 8 <= len(timings["a"].medians) < 60
    assert timings["a"].horizon == 400


def test_the_time_budget_leaves_the_rounds_that_the_family_needs(params: Any) -> None:
    sessions = {"a": Sleeper(2e-4), "b": Sleeper(6e-4)}
    settings = params(rounds=8, max_rounds=20, max_width=1e-6, window_ms=1, budget_s=0.001)
    timing = measure.interleave(sessions, INPUTS, settings, family=12)["a"]
    assert not sequential.too_few(len(timing.medians), clocks.confidence_of(timing, settings.confidence, 12))
    assert len(timing.medians) < 20


def test_finalists_are_told_apart_from_the_fastest_and_not_from_the_first(params: Any) -> None:
    sessions = {"slow": Device(noisy(9.0, 0)), "b": Device(noisy(1.0, 1)), "c": Device(noisy(1.0, 2))}
    settings = params(rounds=10, max_rounds=15, clock="device")
    assert measure.interleave(sessions, INPUTS, settings)["b"].looks == (10,)
    assert measure.interleave(sessions, INPUTS, settings, fastest=True)["b"].looks == (10, 15)


def test_what_a_first_call_does_once_leaves_the_warm_up_its_time(params: Any) -> None:
    class Captures(Sleeper):
        def run(self, batch: Any) -> None:
            time.sleep(1e-3 if self.synchronized else 0.2)

    assert measure.interleave({"a": Captures(0)}, INPUTS, params(warmup_ms=5, window_ms=10))["a"].warm


def test_a_difference_as_small_as_that_of_two_openings_is_never_clear(params: Any) -> None:
    def looks(sd: float) -> tuple[int, ...]:
        sessions = {"a": Device(noisy(1.0, 0)), "b": Device(noisy(1.1, 1))}
        settings = params(rounds=20, max_rounds=40, clock="device", reopen_sd=sd)
        return measure.interleave(sessions, INPUTS, settings)["a"].looks

    assert looks(0.0) == (20,)
    assert looks(0.1) == (20, 25, 30, 35, 40)


def test_one_of_several_openings_stops_once_its_ratio_is_known_whatever_it_is(params: Any) -> None:
    def looks(openings: int, max_width: float) -> tuple[int, ...]:
        sessions = {"a": Device(noisy(1.0, 0)), "b": Device(noisy(1.0, 1))}
        settings = params(rounds=20, max_rounds=40, clock="device", openings=openings, max_width=max_width)
        return measure.interleave(sessions, INPUTS, settings)["a"].looks

    assert looks(1, 0.5) == (20, 25, 30, 35, 40)
    assert looks(3, 0.5) == (20,)
    assert looks(3, 1e-9) == (20, 25, 30, 35, 40)


def test_by_the_devices_clock_only_the_launching_thread_is_watched(params: Any) -> None:
    def watched(clock: str) -> Any:
        return vars(measure.Measurement({"a": Device(1.0)}, INPUTS, params(clock=clock)).watches[0])["_threads"]

    assert watched("device") == str(threading.get_native_id())


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 3), (9e-3, 1), (3e-2, 0)])
def test_the_longer_a_call_the_fewer_come_before_a_window(params: Any, seconds: float, calls: int) -> None:
    log: list[Any] = []
    measured = measure.Measurement({"a": Sleeper(seconds, log)}, INPUTS, params())
    measured.round()
    log.clear()
    measured.round()
    assert len(log) - len(measured.rounds[-1]["a"].samples) == calls


def test_a_latency_that_never_settles_is_not_warm(params: Any) -> None:
    class Unsteady(Sleeper):
        def run(self, batch: Any) -> None:
            self.seconds *= 1.2 if self.seconds < 0.02 else 0.01
            super().run(batch)

    sessions = {"steady": Sleeper(2e-3), "not": Unsteady(2e-4)}
    timings = measure.interleave(sessions, INPUTS, params(warmup_ms=4, max_width=0.1))
    assert not timings["not"].warm


@pytest.mark.parametrize(("batch", "bytes_"), [(1, 0), (1, 1000), (3, 5000), (150, 5000)])
def test_a_pool_outgrows_what_was_asked_with_all_samples_in_turn(batch: int, bytes_: int) -> None:
    pool = measure.make_pool(INPUTS, batch, bytes_)
    flat = np.concatenate([b["x"] for b in pool])[:, 0]
    assert all(b["x"].shape == (batch, 1) and b["x"].flags.c_contiguous for b in pool)
    assert flat.nbytes > bytes_
    assert len(pool) >= 4
    assert np.array_equal(flat, np.arange(len(flat)) % 100)


def test_a_pool_has_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "MAX_POOL_BYTES", 1000)
    assert sum(b["x"].nbytes for b in measure.make_pool(INPUTS, 1, 1 << 40)) <= 1004


def noisy(milliseconds: float, seed: int) -> Iterator[float]:
    """Times with 2 % of noise."""
    rng = np.random.default_rng(seed)
    while True:
        yield milliseconds * rng.lognormal(0, 0.02)


class Device:
    """A session with a clock of its own, which runs apart from the host's."""

    def __init__(self, milliseconds: float | Iterator[float]) -> None:
        times = milliseconds if isinstance(milliseconds, Iterator) else itertools.repeat(milliseconds)
        self.milliseconds, self.loaded, self.calls = times, 0, 0

    def load(self, batch: Any) -> None:
        self.loaded += 1

    def device_ms(self, calls: int) -> float:
        self.calls += calls
        time.sleep(5e-4)
        return next(self.milliseconds)


def test_the_devices_clock_is_its_own(params: Any) -> None:
    sessions = {"fast": Device(1.0), "slow": Device(2.5)}
    timings = measure.interleave(sessions, INPUTS, params(clock="device", batch=4))
    assert measure.speedup(timings, "fast", "slow", 0.95).value == pytest.approx(2.5)
    assert timings["slow"].clock == "device"
    assert (timings["slow"].p90, timings["slow"].p99) == (None, None)
    assert timings["slow"].throughput_per_s == pytest.approx(4 / 2.5 * 1e3)
    assert sessions["fast"].calls == clocks.DEVICE_CALLS * sessions["fast"].loaded


def test_the_devices_clock_needs_a_device(params: Any) -> None:
    with pytest.raises(Fault, match="b on the CPU"):
        measure.interleave({"a": Device(1.0), "b": Sleeper(1e-3)}, INPUTS, params(clock="device"))


@pytest.mark.parametrize("taken", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_is_no_number_of_milliseconds_is_refused(params: Any, taken: float) -> None:
    with pytest.raises(Fault, match="a call's time is no number"):
        measure.interleave({"a": Device(taken)}, INPUTS, params(clock="device"))


def test_a_session_that_cannot_be_synchronized_is_refused(params: Any) -> None:
    class Loose(Sleeper):
        synchronize = None  # type: ignore[assignment]

    with pytest.raises(Fault, match="can't be synchronized"):
        measure.interleave({"a": Sleeper(1e-4), "loose": Loose(1e-4)}, INPUTS, params())


def test_a_runner_that_returns_early_is_timed_at_its_true_length(params: Any) -> None:
    sessions = {"early": Early(4e-3), "other": Slowed(Early(2e-3), 0.0)}
    timings = measure.interleave(sessions, INPUTS, params(window_ms=20))
    assert min(timings["early"].medians) >= 4
    assert min(timings["other"].medians) >= 2
    assert measure.speedup(timings, "other", "early", 0.95).value > 1.3


def test_nothing_to_time_and_nothing_timed_are_refused(params: Any) -> None:
    with pytest.raises(Fault, match="nothing to time"):
        measure.interleave({}, INPUTS, params())
    measured = measure.Measurement({"a": Sleeper(1e-4)}, INPUTS, params())
    with pytest.raises(Fault, match="nothing was timed"):
        measured.timings()
    measured.round()
    with pytest.raises(Fault, match="got:      1 rounds"):
        measured.timings()


@pytest.mark.parametrize(
    "changes", [{"rounds": 0}, {"rounds": 1}, {"max_rounds": 1}, {"warmup_ms": 0}, {"window_ms": 0}, {"budget_s": 0}]
)
def test_settings_without_warm_up_rounds_or_time_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        BenchmarkParams.model_validate(changes)


TIMING = measure.Timing(1, "host", 1.0, None, None, 1.0, 30, 1e3, True, (1.0, 1.1, 1.2), (3,), 3)


@pytest.mark.parametrize(
    "other",
    [{"batch": 2}, {"clock": "device"}, {"medians": (1.0, 1.0)}, {"looks": (2, 3)}, {"horizon": 9}, {"reopen_sd": 0.1}],
    ids=lambda value: next(iter(value)),
)
def test_timings_of_other_batches_clocks_or_rounds_are_not_compared(other: dict[str, Any]) -> None:
    with pytest.raises(Fault, match="a and b weren't timed together"):
        measure.speedup({"a": TIMING, "b": replace(TIMING, **other)}, "a", "b", 0.95)


def test_empty_timings_are_not_compared() -> None:
    empty = replace(TIMING, medians=(), looks=())
    with pytest.raises(Fault, match="nothing was timed"):
        measure.speedup({"a": empty, "b": empty}, "a", "b", 0.95)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_medians_that_are_not_finite_are_not_compared(bad: float) -> None:
    with pytest.raises(ValueError, match="measurements"):
        measure.speedup({"a": TIMING, "b": replace(TIMING, medians=(1.0, bad, 1.0))}, "a", "b", 0.95)


def test_a_timing_comes_back_from_json(tmp_path: Any) -> None:
    timing = replace(TIMING, discarded={"a reason": 2}, busy="too much")
    write_json(tmp_path / "t.json", timing)
    assert measure.restored(read_json(tmp_path / "t.json")) == timing


@pytest.mark.parametrize("fresh", [0.0, 10.0])
def test_disturbed_windows_are_thrown_away_made_again_and_counted(
    params: Any, monkeypatch: pytest.MonkeyPatch, fresh: float
) -> None:
    """Every call of a disturbed window takes 7 ms, of others 1; whether or not each window's start is looked at."""
    monkeypatch.setattr(measure, "FRESH_S", fresh)
    slow, turns = [False], itertools.cycle([True, False, False])

    class Throttled(Device):
        def device_ms(self, calls: int) -> float:
            return 7.0 if slow[0] else 1.0

    def disturbed() -> str | None:
        was, slow[0] = slow[0], next(turns)
        return "it throttled" if was else None

    sessions = {"a": Throttled(1.0), "b": Throttled(1.0)}
    timings = measure.interleave(sessions, INPUTS, params(clock="device"), disturbed=disturbed)
    assert sum(timing.discarded.get("it throttled", 0) for timing in timings.values()) >= 4
    for timing in timings.values():
        assert timing.discarded.keys() <= {"it throttled"} and timing.busy is None
        assert len(timing.medians) == 8 and timing.mean == 1.0


def test_a_machine_that_is_always_disturbed_says_so(params: Any) -> None:
    settings = params(clock="device", budget_s=0.01)
    timings = measure.interleave({"a": Device(1.0), "b": Device(2.0)}, INPUTS, settings, disturbed=lambda: "too hot")
    assert timings["a"].busy == f"only 0 of {len(timings['a'].medians)} rounds were undisturbed: too hot"


class Spinner(Sleeper):
    """A session that leaves a thread computing for a while after a call, as some runtimes' pools do."""

    def run(self, batch: Any) -> None:
        end = time.perf_counter() + self.seconds
        threading.Thread(
            target=lambda: [sum(range(50)) for _ in iter(lambda: time.perf_counter() < end, False)]
        ).start()


class Worker(Sleeper):
    """A session that computes for a fixed amount of work, which another thread's computing slows."""

    def run(self, batch: Any) -> None:
        sum(range(300_000))


def test_an_engine_that_goes_on_computing_does_not_tax_the_next(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def median() -> float:
        sessions = {"worker": Worker(0), "spinner": Spinner(0.12)}
        timings = measure.interleave(sessions, INPUTS, params(window_ms=10, warmup_ms=1))
        return float(np.median(timings["worker"].medians))

    def untaxed() -> bool:
        settled = median()
        with monkeypatch.context() as patch:
            patch.setattr(measure, "settle", lambda: None)
            return settled < 0.8 * median()

    assert any(untaxed() for _ in range(4))


def test_settling_takes_as_long_as_something_computes_and_no_longer() -> None:
    def settling(seconds: float) -> float:
        Spinner(seconds).run({})
        start = time.perf_counter()
        assert disturbance.settle() is None
        return time.perf_counter() - start

    assert min(settling(0.0) for _ in range(5)) < 0.02
    assert 0.03 < max(settling(0.05) for _ in range(5)) < 0.3


def test_what_goes_on_computing_for_too_long_is_told() -> None:
    def told() -> str | None:
        Spinner(0.4).run({})
        reason = disturbance.settle()
        time.sleep(0.3)
        return reason

    assert any(told() == disturbance.SPUN for _ in range(4))

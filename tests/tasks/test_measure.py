"""Interleaved timing, on sessions of known slowness."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tasks import measure
from tasks.settings import BenchmarkParams


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
        **{"rounds": 8, "max_rounds": 8, "window_ms": 6, "warmup_ms": 5, "max_width": 0.99, **changes}
    )


INPUTS = {"x": np.arange(100, dtype=np.float32).reshape(100, 1)}


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of a few batches, whatever this machine's cache."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 100)


def test_a_session_three_times_as_slow_is_told(params: Any) -> None:
    timings = measure.interleave({"fast": Sleeper(1e-3), "slow": Sleeper(3e-3)}, INPUTS, params())
    gain = measure.speedup(timings, "fast", "slow", 0.95)
    assert 1.8 < gain.low <= gain.value <= gain.high < 4
    assert measure.speedup(timings, "slow", "fast", 0.95).value == pytest.approx(1 / gain.value)
    assert timings["slow"].mean >= 3


def test_a_timing_is_made_of_its_rounds(params: Any) -> None:
    timing = measure.interleave({"a": Sleeper(1e-3)}, INPUTS, params(batch=4))["a"]
    assert (timing.batch, len(timing.medians)) == (4, 8)
    assert timing.n >= 8 * 3
    assert timing.throughput_per_s == pytest.approx(4 / timing.mean * 1e3)
    assert (timing.p50 is None, timing.p99) == (timing.n < 20, None)


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


def test_rounds_go_on_while_the_interval_is_wide(params: Any) -> None:
    sessions = {"a": Sleeper(2e-4), "b": Sleeper(2e-4)}
    many = measure.interleave(sessions, INPUTS, params(max_rounds=12, max_width=1e-6, window_ms=1))
    few = measure.interleave(sessions, INPUTS, params(max_rounds=12, max_width=0.999, window_ms=1))
    assert (len(many["a"].medians), len(few["a"].medians)) == (12, 8)


def test_a_latency_that_never_settles_is_not_warm(params: Any) -> None:
    class Unsteady(Sleeper):
        def run(self, batch: Any) -> None:
            self.seconds *= 1.2 if self.seconds < 0.02 else 0.01
            super().run(batch)

    timings = measure.interleave({"steady": Sleeper(2e-3), "not": Unsteady(2e-4)}, INPUTS, params(warmup_ms=4))
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
    monkeypatch.setattr(measure, "MAX_POOL_BYTES", 1000)
    assert sum(b["x"].nbytes for b in measure.make_pool(INPUTS, 1, 1 << 40)) <= 1004

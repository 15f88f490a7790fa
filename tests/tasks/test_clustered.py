"""Intervals of percentiles and means of calls in windows that differ."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from tasks import clustered
from tasks.stats import Interval


def windows(rng: np.random.Generator, k: int, n: int, between: float) -> list[np.ndarray]:
    """`k` windows of `n` calls, normal around 10 with a deviation of 1; a window's centre deviates by `between`."""
    return [rng.normal(10 + between * rng.normal(), 1, n) for _ in range(k)]


@pytest.mark.parametrize("between", [0.0, 0.3, 1.0], ids=["alike", "windows differ a little", "windows differ"])
@pytest.mark.parametrize("q", [50, 90])
def test_an_interval_holds_the_percentile_as_often_as_it_says(q: float, between: float) -> None:
    rng, true = np.random.default_rng(4), norm.ppf(q / 100, 10, np.hypot(1, between))
    found = [clustered.percentile(windows(rng, 24, 100, between), q, 0.95) for _ in range(400)]
    held = np.mean([i is not None and i.low <= true <= i.high for i in found])
    assert 0.92 <= held <= 0.99


@pytest.mark.parametrize("between", [0.0, 1.0])
def test_an_interval_holds_the_mean_as_often_as_it_says(between: float) -> None:
    rng = np.random.default_rng(5)
    found = [clustered.mean(windows(rng, 12, 50, between), 0.95) for _ in range(600)]
    held = np.mean([i is not None and i.low <= 10 <= i.high for i in found])
    assert 0.92 <= held <= 0.98


def test_windows_that_differ_tell_less_than_as_many_calls_alike() -> None:
    rng = np.random.default_rng(6)
    alike, apart = (clustered.percentile(windows(rng, 12, 100, between), 50, 0.95) for between in (0.0, 2.0))
    assert alike and apart and apart.high - apart.low > 5 * (alike.high - alike.low)


def test_calls_that_all_agree_are_known_to_be_so() -> None:
    assert clustered.percentile([np.full(50, 3.0)] * 8, 90, 0.95) == Interval(3.0, 3.0, 3.0)
    assert clustered.mean([np.full(50, 3.0)] * 8, 0.95) == Interval(3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("found", "q"),
    [([np.arange(900.0)], 50), ([np.arange(4.0)] * 2, 50), ([np.arange(300.0)] * 2, 99)],
    ids=["one window", "8 calls", "600 calls"],
)
def test_too_little_has_no_interval(found: list[np.ndarray], q: float) -> None:
    assert clustered.percentile(found, q, 0.95) is None


def test_slow_calls_all_in_one_window_bound_no_p99() -> None:
    """Two of a hundred are slow in each of 24 windows, or all of them in one: only in the first case is p99 bounded."""
    quick, slow = np.full(98, 1.0), np.full(2, 9.0)
    spread = [np.concatenate([quick, slow])] * 24
    burst = [np.full(100, 1.0)] * 23 + [np.concatenate([np.full(52, 1.0), np.full(48, 9.0)])]
    assert clustered.percentile(spread, 99, 0.95) is not None
    assert clustered.percentile(burst, 99, 0.95) is None


def test_the_mean_of_one_window_has_no_interval() -> None:
    assert clustered.mean([np.arange(9.0)], 0.95) is None

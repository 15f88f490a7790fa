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


@pytest.mark.parametrize("k", [8, 24])
@pytest.mark.parametrize("q", [90, 99])
@pytest.mark.parametrize("between", [0.0, 0.3, 1.0])
def test_an_interval_lies_below_the_truth_seldom_however_windows_differ(k: int, q: float, between: float) -> None:
    """What a gate of a largest latency lets pass: where windows differ, it is that nothing bounds the percentile."""
    rng, true = np.random.default_rng(7), norm.ppf(q / 100, 10, np.hypot(1, between))
    found = [clustered.percentile(windows(rng, k, 120, between), q, 0.95) for _ in range(400)]
    assert np.mean([i is not None and i.high < true for i in found]) <= 0.08
    if not between:
        assert np.mean([i is not None for i in found]) > 0.7


def test_windows_are_as_long_and_slow_ones_have_fewer_calls() -> None:
    """The mean of all calls is the harmonic mean of the windows', not their mean."""
    rng, held = np.random.default_rng(9), []
    for _ in range(400):
        centres = np.exp(0.3 * rng.normal(size=16))
        found = clustered.mean([rng.normal(m, 0.1, int(60 / m)) for m in centres], 0.95)
        held.append(found is not None and found.low <= np.exp(-(0.3**2) / 2) <= found.high)
    assert 0.91 <= np.mean(held) <= 0.98


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


@pytest.mark.parametrize(("k", "confidence"), [(3, 0.95), (5, 0.95), (5, 0.99), (24, 0.95)])
def test_as_many_calls_as_are_enough_bound_a_percentile_where_windows_are_alike(k: int, confidence: float) -> None:
    n = clustered.enough(90, k, confidence)
    assert clustered.percentile([np.full(-(-n // k), 2.0)] * k, 90, confidence) == Interval(2.0, 2.0, 2.0)
    assert 64 <= n < clustered.enough(99, k, confidence)


def test_a_percentile_is_told_with_its_interval_or_that_there_is_none() -> None:
    assert clustered.in_two_lines(1.23456, Interval(1.23456, 1.2, 1.3), 2) == "1.23\n[1.20, 1.30]"
    assert clustered.in_two_lines(1.23456, None, 3) == "1.235\nnot bounded"
    assert clustered.in_two_lines(None, None, 3) == "–"


def test_slow_calls_all_in_one_window_bound_no_p99() -> None:
    """Two of a hundred are slow in each of 24 windows, or all of them in one: only in the first case is p99 bounded."""
    quick, slow = np.full(98, 1.0), np.full(2, 9.0)
    spread = [np.concatenate([quick, slow])] * 24
    burst = [np.full(100, 1.0)] * 23 + [np.concatenate([np.full(52, 1.0), np.full(48, 9.0)])]
    assert clustered.percentile(spread, 99, 0.95) is not None
    assert clustered.percentile(burst, 99, 0.95) is None


def test_one_slow_window_leaves_a_throughput_with_an_interval_above_0() -> None:
    slow = [np.full(100, 1.0)] * 7 + [np.full(1, 4000.0)]
    assert clustered.mean(slow, 0.95).low < 0  # type: ignore[union-attr]
    rate = clustered.of_calls(slow, (50,), 4, 0.95)["throughput_per_s"]
    assert 0 < rate.low < rate.value == pytest.approx(4 * 701 / 4700 * 1e3) and rate.value < rate.high < np.inf
    alike = clustered.of_calls([np.array([1.0, 1.01] * 50)] * 4 + [np.array([1.0, 1.03] * 50)] * 4, (50,), 4, 0.95)
    # Windows of 100 calls are off by 5e-3: the mean, 1.01, by (8 / 7 * 8)^0.5 * 0.5 / 800, times Student's 2.3646.
    error = 2.3646 * (64 / 7) ** 0.5 * 0.5 / 800
    assert alike["throughput_per_s"].low == pytest.approx(4e3 / 1.01 / np.exp(error / 1.01), rel=1e-5)


def test_the_mean_of_one_window_has_no_interval() -> None:
    assert clustered.mean([np.arange(9.0)], 0.95) is None

"""Percentiles and means of calls that were made in windows, with intervals that allow for how windows differ.

Calls of one window resemble each other: as many calls in fewer windows tell less. So windows count as clusters, as in a
survey (Cochran 1977, Sampling Techniques, chapter 10; Woodruff 1952, JASA 47:635, for percentiles).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

from tasks.stats import Interval, needed


def percentile(windows: Sequence[np.ndarray], q: float, confidence: float) -> Interval | None:
    """The q-th percentile (0 … 100) of all calls in `windows`, each [calls].

    The share of calls below it is off by what a ratio of clusters is, by Student's t of the windows, or by what as many
    independent calls are, by the normal law, whichever is more; the interval holds the percentiles of the shares within
    that. None for a single window, for fewer calls than `stats.needed` asks for, and where it would reach beyond the
    largest call.
    """
    calls, share = np.sort(np.concatenate(windows)), q / 100
    n, k, sure = len(calls), len(windows), (1 + confidence) / 2
    if k < 2 or n < needed(q):
        return None
    value = float(np.percentile(calls, q))
    # Of calls that took just that long, half count as below it.
    below = [((window < value).mean() + (window <= value).mean()) / 2 for window in windows]
    half = max(float(stdtrit(k - 1, sure)) * _error(below, windows), float(ndtri(sure)) * _binomial(share, n))
    if share + half >= 1 - 1 / n:
        return None
    low, high = (float(np.percentile(calls, 100 * at)) for at in (max(0.0, share - half), share + half))
    return Interval(value, min(value, low), max(value, high))


def mean(windows: Sequence[np.ndarray], confidence: float) -> Interval | None:
    """The mean of all calls in `windows`, each [calls]; None for a single window."""
    k = len(windows)
    if k < 2:
        return None
    value = float(np.concatenate(windows).mean())
    half = float(stdtrit(k - 1, (1 + confidence) / 2)) * _error([window.mean() for window in windows], windows)
    return Interval(value, value - half, value + half)


def bounds(windows: Sequence[np.ndarray], percents: Sequence[int], confidence: float) -> dict[str, Interval]:
    """The intervals of several percentiles, by name (p50 …), of those that have one."""
    found = {f"p{q}": percentile(windows, q, confidence) for q in percents}
    return {name: interval for name, interval in found.items() if interval}


def of_calls(
    windows: Sequence[np.ndarray], percents: Sequence[int], batch: int, confidence: float
) -> dict[str, Interval]:
    """As `bounds`, of milliseconds a call, and of `throughput_per_s`, the samples a second at their mean.

    The error of the mean is that of its logarithm, as a share: one slow window leaves a rate that is above 0.
    """
    found, call = bounds(windows, percents, confidence), mean(windows, confidence)
    if call:
        rate, factor = batch / call.value * 1e3, float(np.exp((call.high - call.value) / call.value))
        found["throughput_per_s"] = Interval(rate, rate / factor, rate * factor)
    return found


def enough(q: float, k: int, confidence: float) -> int:
    """The fewest calls that bound the q-th percentile in `k` windows, 2 at least, which tell an error as it is."""
    share, t, n = q / 100, float(stdtrit(k - 1, (1 + confidence) / 2)), needed(q)
    while share + t * _binomial(share, n) >= 1 - 1 / n:
        n += 1
    return n


def in_two_lines(value: float | None, interval: Interval | None, digits: int) -> str:
    """A percentile, and in a second line its interval, or that nothing bounds it; a dash where it isn't known."""
    if value is None:
        return "–"
    ends = f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]" if interval else "not bounded"
    return f"{value:.{digits}f}\n{ends}"


def _binomial(share: float, n: int) -> float:
    return float(np.sqrt(share * (1 - share) / n))


def _error(means: Sequence[float], windows: Sequence[np.ndarray]) -> float:
    """The standard error of the mean of all calls, of the mean of each window's: that of a ratio of clusters."""
    calls = np.array([len(window) for window in windows])
    off = calls * (means - np.average(means, weights=calls))
    return float(np.sqrt(len(calls) / (len(calls) - 1) * (off**2).sum()) / calls.sum())

"""How far two openings of one engine differ: what rounds of one opening can't tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri

from tasks.stats import Interval, log_error
from tasks.timing import Opening, Timing, restored

FEWEST, CONFIDENCE = 5, 0.95
RATE = "throughput_per_s"
# Rounds that all agree, by a coarse clock, don't know their ratio better than this.
LEAST_ERROR = 1e-6


@dataclass(frozen=True)
class Openings:
    """What `trials` measurements of an engine against itself, opened anew for each, tell of its openings.

    `sd` is the relative standard deviation of the ratio of two openings (`benchmark.reopen_sd`), with its interval at
    95 %; `noise` is the standard error of one such ratio that its rounds tell, the median of all trials.
    """

    sd: Interval
    noise: float
    trials: int


def of_record(timed: Mapping[str, Any]) -> list[Opening]:
    """The openings in a benchmark's report, or in what it holds of another batch."""
    return [Opening(restored(raw["timing"]), restored(raw["baseline"])) for raw in (timed, *timed.get("again", ()))]


def latency(timed: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Milliseconds over the openings in a benchmark's report, or what it holds of another batch; see `latency_of`."""
    return latency_of([opening.timing for opening in of_record(timed)])


def latency_of(timings: Sequence[Timing]) -> dict[str, float | int | None]:
    """Milliseconds over an engine's openings: the mean of their medians (geometric), the highest other percentiles.

    A percentile that one of them has too few calls for is None; `n` is the fewest calls of an opening.
    """
    p50, p90, p99 = ([getattr(t, key) for t in timings] for key in ("p50", "p90", "p99"))
    return {
        "p50": None if None in p50 else _mean(p50),
        "p90": None if None in p90 else max(p90),
        "p99": None if None in p99 else max(p99),
        "n": min(t.n for t in timings),
        "batch": timings[0].batch,
    }


def throughput(timed: Mapping[str, Any]) -> float:
    """Samples a second over the openings, their geometric mean."""
    return _mean([opening.timing.throughput_per_s for opening in of_record(timed)])


def bounds(timed: Mapping[str, Any]) -> dict[str, Interval]:
    """Intervals over the openings in a benchmark's report, or what it holds of another batch; see `bounds_of`."""
    return bounds_of([opening.timing for opening in of_record(timed)])


def bounds_of(timings: Sequence[Timing]) -> dict[str, Interval]:
    """Intervals of p50, p90, p99 and `throughput_per_s`, by name: from the lowest end of an opening's to the highest.

    So each holds what every opening took, and the mean of all. One that some opening doesn't know isn't given.
    """
    found, told = [timing.bounds for timing in timings], latency_of(timings)
    rate = _mean([timing.throughput_per_s for timing in timings])
    values = {**{key: told[key] for key in ("p50", "p90", "p99")}, RATE: rate}
    return {
        key: Interval(value, min(one[key].low for one in found), max(one[key].high for one in found))
        for key, value in values.items()
        if value is not None and all(key in one for one in found)
    }


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else geometric_mean(values)


def contrasts(plain: Sequence[Interval]) -> list[tuple[float, float]]:
    """Ratios of each opening after the first to those before it (Helmert), scaled to vary as one does, and errors.

    `plain` are the speed-ups of each, of what its rounds tell, at `CONFIDENCE`.
    """
    logs = np.log([found.value for found in plain])
    errors = np.array([log_error(found, CONFIDENCE) for found in plain])
    told = []
    for n in range(1, len(plain)):
        scale = np.sqrt(n / (n + 1))
        noise = np.hypot(np.sqrt((errors[:n] ** 2).sum()) / n, errors[n])
        told.append((float(np.exp(scale * (logs[:n].mean() - logs[n]))), float(scale * noise)))
    return told


def spread(ratios: Sequence[float], errors: Sequence[float]) -> Openings | None:
    """The spread of openings behind `ratios` [pairs of openings], whose logarithms have the standard errors `errors`.

    The variance that has to be added to each error's for the weighted squares to sum up to their degrees of freedom
    (Paule and Mandel 1982, J. Res. NBS 87:377), within the interval of the Q-profile method (Viechtbauer 2007,
    Statistics in Medicine 26:37); a noisy one counts for little. It is taken about a ratio of 1, so that a shift
    between the first and the second opening counts. None for fewer than five.
    """
    logs, own, n = np.log(np.asarray(ratios, float)), np.maximum(errors, LEAST_ERROR) ** 2, len(ratios)
    if n < FEWEST:
        return None

    def variance(wanted: float) -> float:
        """The added variance at which the weighted sum of squares is as large as wanted, or 0."""
        if _squares(0.0, logs, own) <= wanted:
            return 0.0
        return float(brentq(lambda v: _squares(v, logs, own) - wanted, 0.0, 1.0 + 10 * float(logs @ logs)))

    share = (1 - CONFIDENCE) / 2
    low, value, high = (float(np.sqrt(variance(wanted))) for wanted in (chdtri(n, share), n, chdtri(n, 1 - share)))
    return Openings(Interval(value, low, high), float(np.median(errors)), n)


def _squares(added: float, logs: np.ndarray, own: np.ndarray) -> float:
    """The squares of the logarithms [pairs], each over its variance."""
    return float((logs**2 / (own + added)).sum())

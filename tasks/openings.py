"""How far two openings of one engine differ: what rounds of one opening can't tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri

from tasks.stats import Interval

FEWEST, CONFIDENCE = 5, 0.95
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


def spread(ratios: Sequence[float], errors: Sequence[float], kept: bool) -> Openings | None:
    """The spread of openings behind `ratios` [trials], whose logarithms have the standard errors `errors`.

    The variance that has to be added to each error's for the weighted squares to sum up to their degrees of freedom
    (Paule and Mandel 1982, J. Res. NBS 87:377), within the interval of the Q-profile method (Viechtbauer 2007,
    Statistics in Medicine 26:37); a noisy trial counts for little. If both engines were opened for each trial, it is
    taken about a ratio of 1, so that a shift between the first and the second counts. If one was `kept` open
    throughout, it is taken about the mean, and doubled, since only the other one varied: a shift isn't in it.
    None for fewer than five.
    """
    logs, own, n = np.log(np.asarray(ratios, float)), np.maximum(errors, LEAST_ERROR) ** 2, len(ratios)
    if n < FEWEST:
        return None
    free = n - kept

    def variance(wanted: float) -> float:
        """The added variance at which the weighted sum of squares is as large as wanted, or 0."""
        if _squares(0.0, logs, own, kept) <= wanted:
            return 0.0
        return float(brentq(lambda v: _squares(v, logs, own, kept) - wanted, 0.0, 1.0 + 10 * float(logs @ logs)))

    share = (1 - CONFIDENCE) / 2
    low, value, high = (
        float(np.sqrt((1 + kept) * variance(wanted))) for wanted in (chdtri(free, share), free, chdtri(free, 1 - share))
    )
    return Openings(Interval(value, low, high), float(np.median(errors)), n)


def _squares(added: float, logs: np.ndarray, own: np.ndarray, about_mean: bool) -> float:
    """The squares of the logarithms [trials], each over its variance, about 0 or their weighted mean."""
    weights = 1 / (own + added)
    center = weights @ logs / weights.sum() if about_mean else 0.0
    return float(weights @ (logs - center) ** 2)

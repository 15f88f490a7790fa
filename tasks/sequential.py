"""How sure an interval has to be at each look at a growing measurement, and for how many engines.

A measurement that stops as soon as its interval leaves 1 errs more often than the interval says: it has had many
chances. Here the error that may be made is spent over the looks (Lan and DeMets 1983, Biometrika 70:659, with their
spending function of Pocock's kind), and each look's interval is a repeated confidence interval (Jennison and Turnbull
1989, JRSS B 51:305): all of them hold the truth together, with the confidence asked for, whatever made one stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from tasks.settings import min_rounds
from tasks.stats import Interval, ratio, reopened

LOOK_EVERY = 5
POINTS = 401
LARGEST_Z = 9.0


def spent(share: float, alpha: float) -> float:
    """The error that may have been made once a share (0 … 1) of the longest measurement is there."""
    return alpha * math.log1p((math.e - 1) * min(1.0, share))


def confidence_at(looks: Sequence[int], horizon: int, confidence: float, family: int = 1) -> float:
    """The confidence that the last look's interval needs, so that all looks' together have `confidence`.

    `looks` are the numbers of rounds at which was looked, rising; `horizon` is the largest that could be. `family`
    is the number of ratios that are judged together: each may err with its share of 1 - `confidence` (Bonferroni,
    which unlike Holm's procedure leaves an interval, and one that doesn't hang on the others' results).
    """
    if not looks or any(a >= b for a, b in pairwise(looks)) or looks[0] < 1 or family < 1:
        raise ValueError(f"looks at {looks} rounds of a family of {family}: rising numbers of rounds are needed")
    return _confidence(tuple(min(1.0, n / max(horizon, looks[0])) for n in looks), (1 - confidence) / family)


def speedup(
    slow: Sequence[float],
    fast: Sequence[float],
    looks: Sequence[int],
    horizon: int,
    confidence: float,
    family: int = 1,
    reopen_sd: float = 0.0,
) -> Interval:
    """The ratio of paired medians (`slow` over `fast`), with the interval that the looks and the family ask for.

    `reopen_sd` is how far two openings of an engine differ; see `stats.reopened`.
    """
    sure = confidence_at(looks, horizon, confidence, family)
    return reopened(ratio(np.array(slow), np.array(fast), sure), reopen_sd, sure)


def clear(interval: Interval, rounds: int, confidence: float) -> bool:
    """Whether an interval, of a confidence that its rounds can give, lies all above or all below 1."""
    return not too_few(rounds, confidence) and (interval.low > 1 or interval.high < 1)


def too_few(rounds: int, confidence: float) -> str | None:
    """Why so few rounds say nothing at the confidence that is needed, or None."""
    least = min_rounds(confidence)
    if rounds >= least:
        return None
    return f"{rounds} rounds can't give an interval of confidence {confidence:.3%}, {least} can: raise benchmark.rounds"


@lru_cache(maxsize=4096)
def _confidence(shares: tuple[float, ...], alpha: float) -> float:
    """1 minus the nominal two-sided level of the last look, at shares of the information, spending alpha.

    The standardised signed-rank statistic at n rounds is, but for the rounding of a rank, a Brownian motion at time
    n / horizon over that time's root (Sen 1981, Sequential Nonparametrics, chapter 4). Its density where no look has
    yet decided is carried on from look to look (Armitage, McPherson and Rowe 1969, JRSS A 132:235).
    """
    grid, density, before, gone = np.zeros(1), np.ones(1), 0.0, 0.0
    for share in shares:
        if share <= before:
            continue
        step, root = math.sqrt(share - before), math.sqrt(share)
        target = spent(share, alpha) - gone
        held = (grid, density, step, root)
        bound = brentq(lambda z, held=held, target=target: _leaves(z, *held) - target, 0.0, LARGEST_Z, xtol=1e-10)
        gone, before = spent(share, alpha), share
        new = np.linspace(-bound * root, bound * root, POINTS)
        moves = np.exp(-(((new[:, None] - grid) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        weights = np.full(POINTS, new[1] - new[0])
        weights[[0, -1]] /= 2
        grid, density = new, (moves @ density) * weights
    return float(2 * ndtr(bound) - 1)


def _leaves(z: float, grid: np.ndarray, density: np.ndarray, step: float, root: float) -> float:
    """The probability to be beyond ±z at this look, of what was undecided before."""
    return float(density @ (ndtr((grid - z * root) / step) + ndtr((-z * root - grid) / step)))

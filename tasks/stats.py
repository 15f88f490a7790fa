"""Intervals: of accuracies, of their paired changes, and of paired speed ratios."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, ndtri, stdtrit

from tasks.errors import Fault

PERCENTILE_CONFIDENCE = 0.99


@dataclass(frozen=True)
class Interval:
    """A point estimate within its two-sided confidence interval."""

    value: float
    low: float
    high: float

    def named(self, name: str) -> dict[str, float]:
        """The estimate under a name, and its ends as NAME_low and NAME_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def mean_score(scores: np.ndarray, confidence: float) -> Interval:
    """Mean of per-sample scores [n] in 0 … 1.

    Scores that are all 0 or 1 get Wilson's interval (Wilson 1927, JASA 22:209), others Student's t with a score of 0
    and one of 1 added, as Agresti and Coull (1998, American Statistician 52:119) do, so that scores which happen to be
    equal leave some width. Raises ValueError if there are none, or one isn't finite.
    """
    _finite(scores, "scores")
    n, mean = len(scores), float(scores.mean())
    if not binary(scores):
        more = np.append(scores, (0.0, 1.0))
        center = float(more.mean())
        half = float(stdtrit(n + 1, (1 + confidence) / 2) * more.std(ddof=1) / np.sqrt(n + 2))
        return Interval(mean, max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half)))
    z = float(ndtri((1 + confidence) / 2))
    center = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * float(np.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2)))
    return Interval(mean, max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half)))


def paired_change(scores: np.ndarray, baseline: np.ndarray, confidence: float) -> Interval:
    """Mean of `scores` - `baseline`, both [n] and of the same samples in the same order.

    Binary scores get the interval of Agresti and Min (2005, Statistics in Medicine 24:729),
    which stays wide enough when few samples changed; others the same form with Student's t, of 2 samples at least, else
    Fault.
    """
    center, error = paired_statistic(scores, baseline)
    value = float((scores - baseline).mean())
    share = (1 + confidence) / 2
    half = error * float(ndtri(share) if binary(scores, baseline) else stdtrit(len(scores) - 1, share))
    return Interval(value, min(value, center - half), max(value, center + half))


def paired_statistic(scores: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
    """The centre of the mean change of paired scores, both [n], and its standard error, as `paired_change` takes them.

    Both are those of Agresti and Min: of the differences and two more, of which a gained and a lost one weigh 1/2 each
    and an unchanged one 1. The error of binary scores is a normal law's; else Student's, of n - 1, which a single
    sample hasn't: Fault.
    """
    if scores.shape != baseline.shape:
        raise ValueError(f"paired scores of {scores.shape} and {baseline.shape} samples")
    _finite(np.stack([scores, baseline]), "paired scores")
    n, difference = len(scores), scores - baseline
    if n < 2 and not binary(scores, baseline):
        raise Fault(
            "a change of scores that aren't all 0 or 1 has no interval",
            got=f"{n} sample",
            expected="at least 2 samples",
            do="make the test split larger: data.test in params.yaml",
        )
    total, squares = float(difference.sum()), float(np.square(difference).sum())
    return total / (n + 2), float(np.sqrt(squares + 1 - total**2 / (n + 2))) / (n + 2)


def ratio(numerator: np.ndarray, denominator: np.ndarray, confidence: float) -> Interval:
    """Ratio of paired positive measurements [rounds], such as baseline ms over engine ms.

    The Hodges-Lehmann estimate of the log ratios and Wilcoxon's signed-rank interval (Hollander,
    Wolfe and Chicken 2014, section 3.2 and 3.3): no normality is assumed, and a few disturbed
    rounds don't move it. Too few rounds for the confidence give the widest interval there is.
    """
    logs = np.log(np.asarray(numerator, float) / np.asarray(denominator, float))
    if len(logs) < 2 or not np.isfinite(logs).all():
        raise ValueError(f"{len(logs)} paired measurements, all finite and positive ones are needed, at least 2")
    i, j = np.triu_indices(len(logs))
    walsh = np.sort((logs[i] + logs[j]) / 2)
    cut = _signed_rank_cut(len(logs), 1 - confidence)
    low, high = walsh[cut], walsh[len(walsh) - 1 - cut]
    return Interval(*(float(np.exp(v)) for v in (np.median(walsh), low, high)))


def reopened(interval: Interval, sd: float, confidence: float) -> Interval:
    """The interval of a ratio, widened by what opening both engines anew would change of it.

    Rounds of one opening don't show that: where memory lies, for one, stays the same. `sd` is its relative standard
    deviation; half-widths of the logarithm add in quadrature, as for errors that are independent.
    """
    extra = float(ndtri((1 + confidence) / 2)) * sd
    down = np.hypot(np.log(interval.value / interval.low), extra)
    up = np.hypot(np.log(interval.high / interval.value), extra)
    return Interval(interval.value, interval.value * float(np.exp(-down)), interval.value * float(np.exp(up)))


def log_error(interval: Interval, confidence: float) -> float:
    """The standard error of a ratio's logarithm that an interval of it stands for."""
    return float(np.log(interval.high / interval.low) / 2 / ndtri((1 + confidence) / 2))


def quotient(a: Interval, b: Interval) -> Interval:
    """a / b of two ratios whose errors are independent: log half-widths add in quadrature."""
    value = a.value / b.value
    down = np.hypot(np.log(a.value / a.low), np.log(b.high / b.value))
    up = np.hypot(np.log(a.high / a.value), np.log(b.value / b.low))
    return Interval(value, value * float(np.exp(-down)), value * float(np.exp(up)))


def percentile(samples: np.ndarray, q: float) -> float | None:
    """The q-th percentile (0 … 100), or None with fewer samples than `needed(q)`."""
    return float(np.percentile(samples, q)) if len(samples) >= needed(q) else None


@lru_cache
def needed(q: float) -> int:
    """The fewest samples from which the q-th percentile (0 … 100) is bounded with 99 % confidence.

    The bound of MLPerf Inference's early stopping (inference_rules.adoc, appendix "Early Stopping Criterion"): the
    largest of n samples is such a bound if, with a share of 1 - q/100 of all calls beyond the percentile, at most
    one of n is so with a probability of at most 1 %. It gives 11 samples for the median, 64 for p90, 662 for p99.
    """
    n = 2
    while bdtr(1, n, 1 - q / 100) > 1 - PERCENTILE_CONFIDENCE:
        n += 1
    return n


def _finite(values: np.ndarray, what: str) -> None:
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"{values.shape[-1]} {what}: some are needed, and all of them finite")


def binary(*scores: np.ndarray) -> bool:
    """Whether every score is 0 or 1."""
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in scores)


def _signed_rank_cut(n: int, alpha: float) -> int:
    """How many Walsh averages to drop at each end: the largest c with P(W <= c) <= alpha / 2, or 0."""
    return max(0, int(np.searchsorted(_signed_rank_law(n), alpha / 2, side="right")) - 1)


@lru_cache
def _signed_rank_law(n: int) -> np.ndarray:
    """P(W <= w) of the signed-rank statistic of n differences, for w = 0 … n (n + 1) / 2."""
    counts = np.zeros(n * (n + 1) // 2 + 1)
    counts[0] = 1
    for rank in range(1, n + 1):
        counts[rank:] = counts[rank:] + counts[:-rank].copy()
    return np.cumsum(counts / 2.0**n)

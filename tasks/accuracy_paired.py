"""Two engines on the same samples: McNemar's test, non-inferiority, agreement, and what changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, ndtr, stdtr

from tasks.accuracy_records import Scored, check_pair, classes, enough
from tasks.settings import Params
from tasks.stats import Interval, binary, mean_score, paired_change, paired_statistic

TOP = 20


@dataclass(frozen=True)
class ClassChange:
    """The paired change of a class's accuracy, in shares of 1."""

    label: int
    change: Interval | None


@dataclass(frozen=True)
class Changed:
    """A sample of the test split whose score or prediction changed; `what` is lost, gained or same score.

    `before` is the other engine's prediction and `after` the variant's; None, like `label`, without classes.
    """

    index: int
    what: str
    label: int | None
    before: int | None
    after: int | None
    score_before: float
    score_after: float


@dataclass(frozen=True)
class Paired:
    """A variant against `other`, which is its `role`: baseline, parent, "baseline and parent", or asked for.

    `gained` and `lost` count samples that only one of the two gets right; `p_value` is of McNemar's exact test
    on them (McNemar 1947); all three are None for scores between 0 and 1. `change` is the paired change with its
    interval (Agresti and Min 2005 for scores of 0 and 1). The variant is non-inferior if that whole interval lies above
    `margin`, and `non_inferiority_p` is the one-sided p-value of the same statistic; None without a margin in the
    gates. `agreement` is the share of equal predictions. `samples` are the first of the `changed`, the lost ahead.
    """

    role: str
    other: str
    change: Interval
    gained: int | None
    lost: int | None
    p_value: float | None
    margin: float | None
    non_inferior: bool | None
    non_inferiority_p: float | None
    agreement: Interval | None
    classes: tuple[ClassChange, ...]
    changed: int
    samples: tuple[Changed, ...]


def mcnemar(gained: int, lost: int) -> float:
    """The two-sided p-value of McNemar's exact test (1947, Psychometrika 12:153).

    Of the samples that only one of two engines gets right, either is as likely to be the right one: a binomial of 1/2.
    """
    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def non_inferiority(scores: np.ndarray, other: np.ndarray, margin: float) -> float:
    """The one-sided p-value of "the mean change of `scores` from `other`, both [n], is at most `margin`".

    By the statistic of `stats.paired_change`: it is below (1 - confidence) / 2 where that interval lies above `margin`.
    """
    center, error = paired_statistic(scores, other)
    distance = (margin - center) / error
    return float(ndtr(distance) if binary(scores, other) else stdtr(len(scores) - 1, distance))


def paired(one: Scored, other: Scored, role: str, params: Params) -> Paired:
    """Compare two engines sample by sample; Fault unless both were evaluated in the same way on the same samples."""
    check_pair(one, other)
    confidence, margin = params.evaluate.confidence, params.gates.accuracy_change.min
    change = paired_change(one.scores, other.scores, confidence)
    gained, lost = int((one.scores > other.scores).sum()), int((one.scores < other.scores).sum())
    counted = binary(one.scores, other.scores)
    by_class = []
    for label, of in classes(one):
        pair = one.scores[of], other.scores[of]
        by_class.append(ClassChange(label, paired_change(*pair, confidence) if enough(*pair) else None))
    equal = None
    if one.predictions is not None and other.predictions is not None:
        equal = (one.predictions == other.predictions).astype(np.float64)
    samples = changed(one, other)
    return Paired(
        role=role,
        other=other.name,
        change=change,
        gained=gained if counted else None,
        lost=lost if counted else None,
        p_value=mcnemar(gained, lost) if counted else None,
        margin=margin,
        non_inferior=None if margin is None else change.low > margin,
        non_inferiority_p=None if margin is None else non_inferiority(one.scores, other.scores, margin),
        agreement=None if equal is None else mean_score(equal, confidence),
        classes=tuple(by_class),
        changed=len(samples),
        samples=samples[:TOP],
    )


def changed(one: Scored, other: Scored) -> tuple[Changed, ...]:
    """Every sample whose score or prediction differs: the lost, the gained, the rest; the largest change first."""
    delta = one.scores - other.scores
    moved = delta != 0
    if one.predictions is not None and other.predictions is not None:
        moved |= one.predictions != other.predictions
    kind = np.where(delta < 0, 0, np.where(delta > 0, 1, 2))
    order = [int(i) for i in np.lexsort((np.arange(len(delta)), -np.abs(delta), kind)) if moved[i]]

    def at(values: np.ndarray | None, i: int) -> int | None:
        return None if values is None else int(values[i])

    return tuple(
        Changed(
            i,
            ("lost", "gained", "same score")[kind[i]],
            at(one.labels, i),
            at(other.predictions, i),
            at(one.predictions, i),
            float(other.scores[i]),
            float(one.scores[i]),
        )
        for i in order
    )

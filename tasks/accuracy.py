"""What a variant gains and loses against the baseline and its parent, sample by sample and class by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from tasks.accuracy_paired import Paired, paired
from tasks.accuracy_records import Scored, classes, enough, scored
from tasks.errors import Fault, Unavailable, in_words
from tasks.params import Tree
from tasks.stats import Interval, mean_score

SCHEMA = 1
PLAIN = frozenset({"export", "build"})
NO_CLASSES = "nothing is told apart by class: its outputs and metric name none (see docs/accuracy.md)"


@dataclass(frozen=True)
class ClassAccuracy:
    """A class of the test split: how many samples bear its label, and their accuracy with Wilson's interval (1927).

    The interval is None where a single sample has a score between 0 and 1.
    """

    label: int
    support: int
    accuracy: Interval | None


@dataclass(frozen=True)
class Accuracy:
    """A variant's accuracy by class, and what it is compared with.

    `reason` says why there is nothing, `notes` say what is missing.
    """

    name: str
    parent: str | None
    n: int = 0
    accuracy: Interval | None = None
    classes: tuple[ClassAccuracy, ...] = ()
    versus: tuple[Paired, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str | None = None


def parent(tree: Tree, name: str) -> str | None:
    """The engine that a variant's change is read against, None if there is none before it in the tree.

    Of two engines with a common beginning of their lineages, one comes before the other if from there on it is only
    exported and built, and the other is either changed there (pruned, quantised …) or takes more steps to be built:
    the eager engine of a checkpoint comes before that of its export. Of those before, the parent is the one with the
    longest common beginning; then one of the same backend; then the first in the file.
    """
    line, backend = tree.lineage(name), tree.params.build[name].backend
    found: list[tuple[int, bool, int, str]] = []
    for other in tree.engines:
        against = tree.lineage(other)
        shared = next((i for i, pair in enumerate(zip(line, against, strict=False)) if pair[0] != pair[1]), len(line))
        if other == name or not shared:
            continue
        own, its = line[shared:], against[shared:]
        changed = any(tree.nodes[step].step not in PLAIN for step in own)
        if all(tree.nodes[step].step in PLAIN for step in its) and (changed or len(its) < len(own)):
            found.append((-shared, tree.params.build[other].backend != backend, len(found), other))
    return min(found)[-1] if found else None


def by_class(one: Scored, confidence: float) -> tuple[ClassAccuracy, ...]:
    """Support and accuracy of each class of the test split, by label; nothing without classes."""
    groups = ((label, one.scores[of]) for label, of in classes(one))
    return tuple(ClassAccuracy(label, len(s), mean_score(s, confidence) if enough(s) else None) for label, s in groups)


def of_engine(tree: Tree, name: str, versus: str | None = None, lookup: Callable[[str], Scored] = scored) -> Accuracy:
    """An engine's accuracy by class, against the baseline and its parent, or against `versus`.

    Raises Fault or Unavailable where its own records, or those of `versus`, are no good; a note says so of others.
    """
    own, before, baseline = lookup(name), parent(tree, name), tree.params.baseline
    others = {baseline: "baseline", **({before: "parent"} if before else {})}
    if before == baseline:
        others = {baseline: "baseline and parent"}
    others = {versus: "other"} if versus else {k: role for k, role in others.items() if k != name}
    pairs, notes = [], [] if own.labels is not None else [NO_CLASSES]
    for other, role in others.items():
        try:
            pairs.append(paired(own, lookup(other), role, tree.params))
        except (Fault, Unavailable) as error:
            if versus:
                raise
            notes.append(f"not compared with the {role} {other}: {in_words(error)}")
    confidence = tree.params.evaluate.confidence
    mean = mean_score(own.scores, confidence)
    return Accuracy(name, before, len(own.scores), mean, by_class(own, confidence), tuple(pairs), tuple(notes))


def of_tree(tree: Tree, names: Iterable[str]) -> list[Accuracy]:
    """`of_engine` of each of the named engines, the baseline first; one that can't be read comes with its reason."""
    lookup, found = cache(scored), []
    for name in sorted(names, key=lambda n: n != tree.params.baseline):
        if name not in tree.engines:
            found.append(Accuracy(name, None, reason="params.yaml has no such engine any more"))
            continue
        try:
            found.append(of_engine(tree, name, lookup=lookup))
        except (Fault, Unavailable, ValueError, KeyError, TypeError) as error:
            found.append(Accuracy(name, parent(tree, name), reason=in_words(error)))
    return found


def document(tree: Tree, found: Iterable[Accuracy]) -> dict[str, Any]:
    """The content of `accuracy.json`; docs/accuracy.md describes each key."""
    return {
        "schema": SCHEMA,
        "metric": tree.params.evaluate.metric,
        "baseline": tree.params.baseline,
        "confidence": tree.params.evaluate.confidence,
        "margin": tree.params.gates.accuracy_change.min,
        "variants": [asdict(one) for one in found],
    }

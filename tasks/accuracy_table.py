"""Accuracy by class, tests and changed samples as tables in the terminal, and as cells for the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tasks.accuracy import Accuracy
from tasks.accuracy_paired import Changed, Paired
from tasks.gates import shown
from tasks.stats import Interval

CLASSES = 20
SAMPLES = ("sample", "what", "label", "before", "after")


def headings(found: Accuracy) -> tuple[str, ...]:
    """The columns of the table of classes."""
    return ("class", "samples", "accuracy", *(f"change from {pair.other}" for pair in found.versus))


def rows(found: Accuracy, most: int | None = None) -> list[tuple[str, ...]]:
    """A row under `headings` for each class, by label; with `most`, of so many only.

    They are those that lost most by the first comparison; without one, those with the lowest accuracy.
    """
    changes = [{one.label: one.change for one in pair.classes} for pair in found.versus]

    def rank(label: int, accuracy: Interval | None) -> float:
        leading = changes[0].get(label) if changes else accuracy
        return leading.value if leading else 0.0

    ranked = sorted(found.classes, key=lambda one: rank(one.label, one.accuracy))[:most]
    return [
        (
            str(one.label),
            f"{one.support:,}",
            _interval("accuracy", one.accuracy),
            *(_interval("accuracy_change", change.get(one.label)) for change in changes),
        )
        for one in sorted(ranked, key=lambda one: one.label)
    ]


def sentence(pair: Paired) -> str:
    """A comparison in a sentence: the change, McNemar's test, the margin, agreement."""
    parts = [f"{shown('accuracy_change', pair.change)} against {_who(pair)}"]
    if pair.p_value is not None:
        parts.append(f"{pair.gained} gained, {pair.lost} lost, McNemar {probability(pair.p_value)}")
    if pair.margin is not None and pair.non_inferiority_p is not None:
        held = "non-inferior" if pair.non_inferior else "not shown to be non-inferior"
        margin = shown("accuracy_change", pair.margin)
        parts.append(f"{held} at the margin of {margin} ({probability(pair.non_inferiority_p)})")
    if pair.agreement is not None:
        parts.append(f"{shown('accuracy', pair.agreement)} of predictions equal")
    return "; ".join(parts)


def probability(p: float) -> str:
    """A p-value as text."""
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.4f}"


def samples(pair: Paired) -> list[tuple[str, ...]]:
    """Index in the test split, what happened, label, and prediction or score before and after of changed samples."""

    def cell(prediction: int | None, score: float) -> str:
        return f"score {score:.3f}" if prediction is None else str(prediction)

    def row(one: Changed) -> tuple[str, ...]:
        label = "–" if one.label is None else str(one.label)
        return str(one.index), one.what, label, cell(one.before, one.score_before), cell(one.after, one.score_after)

    return [row(one) for one in pair.samples]


def section(found: Iterable[Accuracy]) -> list[dict[str, Any]]:
    """What the report's page shows of each engine."""
    return [
        {
            "name": one.name,
            "reason": one.reason,
            "accuracy": _interval("accuracy", one.accuracy),
            "n": one.n,
            "headings": headings(one),
            "rows": rows(one, CLASSES),
            "more": max(0, len(one.classes) - CLASSES),
            "notes": one.notes,
            "versus": [
                {"who": _who(p), "sentence": sentence(p), "changed": p.changed, "samples": samples(p)}
                for p in one.versus
            ],
        }
        for one in found
    ]


def show(found: Accuracy, console: Console) -> None:
    """Print the classes, then for each comparison its tests and the samples that changed."""
    console.print(f"{found.name}: {_interval('accuracy', found.accuracy)} of {found.n:,} test samples", markup=False)
    if found.classes:
        _print(console, headings(found), rows(found))
    for pair in found.versus:
        console.print(sentence(pair), markup=False, soft_wrap=True)
        if pair.samples:
            console.print(f"changed from {pair.other}: {len(pair.samples)} of {pair.changed:,} samples", markup=False)
            _print(console, SAMPLES, samples(pair))
    for note in found.notes:
        console.print(f"careful: {note}", markup=False, soft_wrap=True)


def _print(console: Console, columns: Iterable[str], lines: Iterable[tuple[str, ...]]) -> None:
    table = Table()
    for column in columns:
        table.add_column(escape(column), justify="left" if column == "what" else "right")
    for line in lines:
        table.add_row(*(escape(cell) for cell in line))
    console.print(table)


def _who(pair: Paired) -> str:
    return pair.other if pair.role == "other" else f"the {pair.role} {pair.other}"


def _interval(name: str, value: Interval | None) -> str:
    return "–" if value is None else shown(name, value)

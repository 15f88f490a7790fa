"""Learning curves out of the reports of the model steps."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks import layout
from tasks.files import read_json
from tasks.params import Tree
from tasks.settings import MODEL_STEPS


@dataclass(frozen=True)
class Point:
    """The end of one epoch; epochs of a step that trains several times are counted on."""

    artifact: str
    step: str
    epoch: int
    loss: float
    validation: float


def points(tree: Tree, names: Iterable[str]) -> list[Point]:
    """The curves of these artifacts, as far as they were trained and their reports are there."""
    found = []
    for node in (tree.nodes[name] for name in names):
        path = layout.report(node.step, node.name)
        if node.step in MODEL_STEPS and path.is_file():
            curve = read_json(path).get("curve", [])
            found += [Point(node.name, node.step, i, p["loss"], p["validation"]) for i, p in enumerate(curve, 1)]
    return found


def write(path: Path, tree: Tree) -> None:
    """All curves of the tree as a table for DVC's plots; no file if there are none, which DVC couldn't plot."""
    if not (found := points(tree, tree.nodes)):
        return
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(Point.__dataclass_fields__)
        writer.writerows((p.artifact, p.step, p.epoch, p.loss, p.validation) for p in found)

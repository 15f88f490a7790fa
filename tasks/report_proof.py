"""What the report page says of each engine beyond its numbers: its layers and parity, its start and conditions."""

from __future__ import annotations

from typing import Any

from tasks import energy, footprint, layers, layout, monitor
from tasks.files import read_json
from tasks.params import Tree


def cells(variant: dict[str, Any]) -> dict[str, str]:
    """An engine's device, precision, fusion and worst parity as text; dashes where nothing is known."""
    known = variant.get("evidence")
    if not known:
        return dict.fromkeys(("device", "precision", "fusion", "parity"), "–")
    worst = max(known["parity"], key=lambda p: p["difference"] / p["tolerance"], default=None)
    return {
        "device": known["device"],
        "precision": precision(known["precision_asked"], known["precision_found"]),
        "fusion": layers.fusion(known["nodes"], known["kernels"]) or "–",
        "parity": f"{worst['difference']:.1e} of {worst['tolerance']:.0e}" if worst else "–",
    }


def precision(asked: str, found: dict[str, int]) -> str:
    """Precision asked and found: "int8" where all is as asked, else "int8: 5 int8, 1 fp32"."""
    if not found or set(found) == {"unknown"}:
        return f"{asked} (not told)"
    if len(found) == 1 and (asked in found or asked not in layers.PRECISIONS):
        return next(iter(found))
    return f"{asked}: {layers.counts(found)}"


def engines(tree: Tree, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each engine that something is known of: its name, cells, parity by output, layers, and how it was measured."""
    found = []
    for variant in variants:
        listed = layers.read(layout.artifact(variant["name"])) if variant["name"] in tree.nodes else ()
        parity = variant["evidence"]["parity"] if variant.get("evidence") else ()
        told = measured(variant["name"]) if variant["name"] in tree.nodes else []
        if listed or parity or told:
            rows = [vars(layer) for layer in listed]
            known = {"name": variant["name"], "cells": cells(variant), "parity": parity, "layers": rows}
            found.append({**known, "measured": told})
    return found


def measured(name: str) -> list[str]:
    """Sentences on an engine's start, memory, energy, and the machine while it was timed; none if it wasn't."""
    path = layout.report("benchmark", name)
    timed = read_json(path) if path.is_file() else {}
    parts = ((footprint, "footprint"), (energy, "energy"), (monitor, "conditions"))
    return [line for module, key in parts if timed.get(key) for line in module.lines(timed[key])]


def searches(tree: Tree) -> list[dict[str, Any]]:
    """The reports of the searches for mixed precision, each with the `name` of the artifact that it was for."""
    paths = {name: layout.report("quantize", name) for name, node in tree.nodes.items() if node.step == "quantize"}
    reports = {name: read_json(path).get("search") for name, path in paths.items() if path.is_file()}
    return [{"name": name, **report} for name, report in reports.items() if report]

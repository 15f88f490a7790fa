"""The roofline and the peaks as tables in the terminal, and as cells for the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks import datasheets
from tasks.errors import in_words
from tasks.params import Tree
from tasks.peaks import Probed, Rate
from tasks.roofline import LayerBound, Predicted, Roofline, of_engine

HEADINGS = ("layer", "kind", "precision", "MFLOP", "KiB", "FLOP/byte", "bound", "limit", "measured", "× bound")
SYSTOLIC = ("tiles of {unit}", "im2col KiB")
TOP = 8


def headings(unit: int) -> tuple[str, ...]:
    """The columns of a table of layers, with a matrix unit of that many rows."""
    return (*HEADINGS, *(heading.format(unit=unit) for heading in SYSTOLIC))


def cells(layer: LayerBound) -> tuple[str, ...]:
    """A layer's row under `headings`; dashes where nothing is known."""
    over = layer.measured_ms / layer.bound_ms if layer.measured_ms and layer.bound_ms else None
    return (
        layer.name,
        layer.kind,
        layer.precision,
        f"{layer.flops / 1e6:,.2f}",
        f"{layer.bytes / 1024:,.1f}",
        "–" if layer.intensity is None else f"{layer.intensity:.2f}",
        microseconds(layer.bound_ms),
        layer.limit,
        "–" if layer.measured_ms is None else microseconds(layer.measured_ms),
        "–" if over is None else f"{over:.1f}",
        "–" if layer.tiles is None else f"{layer.tiles:.0%}",
        f"{layer.unrolled_bytes / 1024:,.1f}" if layer.unrolled_bytes else "–",
    )


def where(device: str, threads: int) -> str:
    """A device in words."""
    return device if device == "cuda" else f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def microseconds(ms: float) -> str:
    """A time as text."""
    return f"{ms * 1e3:,.1f} µs"


def summary(found: Roofline) -> dict[str, str]:
    """An engine's totals as text, for the terminal and the report."""
    return {
        "batch": ", ".join([f"batch {found.batch}", *(f"{size} {axis}" for axis, size in found.lengths.items())]),
        "where": where(found.device, found.threads),
        "flops": f"{found.flops / 1e6:,.1f} MFLOP",
        "bytes": f"{found.bytes / 1024:,.0f} KiB",
        "bound": f"{found.bound_ms:.4g} ms",
        "measured": "–" if found.measured_ms is None else f"{found.measured_ms:.4g} ms",
        "over": "–" if found.over is None else f"{found.over:.1f} ×",
        "limit": found.limit,
    }


def numbers(found: Roofline) -> dict[str, Any]:
    """An engine's totals as `summary.json` has them: floating-point operations, bytes, milliseconds a call."""
    keys = ("batch", "flops", "bytes", "bound_ms", "measured_ms", "over", "limit", "notes")
    return {key: getattr(found, key) for key in keys}


def top(found: Roofline) -> list[LayerBound]:
    """The layers with the longest bounds."""
    return sorted(found.layers, key=lambda layer: -layer.bound_ms)[:TOP]


def predicted(found: Iterable[Predicted]) -> list[tuple[str, str, str, str]]:
    """Device, bound, limit and source of each datasheet's prediction."""
    return [
        (
            one.device,
            one.why_not or "" if one.bound_ms is None else f"{one.bound_ms:.4g} ms",
            one.limit or "–",
            one.source,
        )
        for one in found
    ]


def of_tree(tree: Tree, names: Iterable[str]) -> list[dict[str, Any]]:
    """`section` of every engine whose device was probed here; a reason in its place where it can't be counted."""
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            one = of_engine(tree, name)
            found += section([one]) if one else []
        except Exception as error:  # Whatever is wrong with one engine's files: the report shows the others.
            found.append({"name": name, "reason": in_words(error)})
    return found


def section(rooflines: Iterable[Roofline]) -> list[dict[str, Any]]:
    """What the report's page shows of each engine."""
    return [
        {
            "name": found.name,
            "cells": summary(found),
            "numbers": numbers(found),
            "headings": headings(found.unit),
            "layers": [cells(layer) for layer in top(found)],
            "more": max(0, len(found.layers) - TOP),
            "predicted": predicted(found.predicted),
            "label": datasheets.LABEL,
            "notes": found.notes,
        }
        for found in rooflines
    ]


def show(found: Roofline, console: Console) -> None:
    """Print every layer, the totals, and the predictions by datasheets."""
    told = summary(found)
    table = Table(title=f"{found.name}, {told['batch']}, {told['where']}", title_justify="left")
    for index, heading in enumerate(headings(found.unit)):
        text = heading in ("layer", "kind", "precision", "limit")
        table.add_column(heading, justify="left" if text else "right", no_wrap=index > 1, overflow="fold")
    for layer in found.layers:
        table.add_row(*cells(layer))
    console.print(table)
    console.print(
        f"{told['flops']}, {told['bytes']}; bound {told['bound']}, mostly by {told['limit']}; "
        f"measured {told['measured']}: {told['over']} the bound"
    )
    for note in found.notes:
        console.print(f"careful: {note}", markup=False)
    sheets = Table(title=f"bound on other devices ({datasheets.LABEL})", title_justify="left")
    for heading in ("device", "bound", "limit", "source"):
        sheets.add_column(heading)
    for row in predicted(found.predicted):
        sheets.add_row(*row)
    console.print(sheets)


def show_peaks(found: Probed, console: Console) -> None:
    """Print the probed ceilings with their medians and spread, and what couldn't be probed."""
    table = Table(title="peaks of this machine", title_justify="left")
    for heading in ("device", "what", "best", "median", "lowest", "repeats", "by"):
        table.add_column(heading, justify="left" if heading in ("device", "what", "by") else "right")
    for one in found.peaks:
        device = where(one.device, one.threads)
        rows = [("memory", one.memory, "GB/s"), ("cache", one.cache, "GB/s")]
        for name, rate, unit in (*rows, *((name, rate, "GFLOP/s") for name, rate in one.matrix.items())):
            table.add_row(device, name, *_numbers(rate, unit), str(rate.repeats), rate.by)
        for name, why in one.left_out.items():
            table.add_row(device, name, "–", "–", "–", "–", why)
    for failed in found.failed:
        table.add_row(where(failed.device, failed.threads), "all", "–", "–", "–", "–", failed.reason)
    console.print(table)
    if any(one.disturbed for one in found.peaks):
        console.print("other work disturbed the probe: make it again with --force when the machine is quiet")


def _numbers(rate: Rate, unit: str) -> tuple[str, str, str]:
    best, median, low = (f"{value / 1e9:,.1f}" for value in (rate.best, rate.median, rate.low))
    return f"{best} {unit}", median, low

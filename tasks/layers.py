"""What an engine really runs, against what was asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tasks.files import read_json, write_json
from tasks.manifest import LAYERS, Layer

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4")


def write(folder: Path, layers: Iterable[Layer]) -> None:
    """Write `folder/layers.json`."""
    write_json(folder / LAYERS, [vars(layer) for layer in layers])


def read(folder: Path) -> tuple[Layer, ...]:
    """The layers beside an engine; none where the file is missing or isn't such a list."""
    try:
        raw = read_json(folder / LAYERS)
        return tuple(Layer(**{**layer, "fused_from": tuple(layer["fused_from"])}) for layer in raw)
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def found(layers: Iterable[Layer]) -> dict[str, int]:
    """How many of the layers that multiply or convolve run in each precision, the most frequent first."""
    return dict(Counter(layer.precision for layer in layers if layer.product).most_common())


def not_as_asked(asked: str, layers: Iterable[Layer], sparse: bool = False) -> str | None:
    """Why an engine isn't what was asked for, in a sentence; None if it is, or if the backend doesn't tell.

    A reduced precision has to be found in at least half of the products that the backend tells of; FP32 in all of them,
    where TF32 isn't FP32. With `sparse`, at least one layer has to run a 2:4 kernel, if the backend tells of all.
    "As the model" asks for nothing.
    """
    layers = tuple(layers)
    known = [layer for layer in layers if layer.product and layer.precision != "unknown"]
    if known and asked in PRECISIONS:
        hits = sum(layer.precision == asked for layer in known)
        needed = len(known) if asked == "fp32" else (len(known) + 1) // 2
        if hits < needed:
            return f"asked for {asked}, found in {hits} of {len(known)} products ({counts(found(known))})"
    untold = any(layer.product and layer.sparse is None for layer in layers)
    if sparse and not untold and not any(layer.sparse for layer in layers):
        return "asked for 2:4 kernels, found none"
    return None


def counts(precisions: dict[str, int]) -> str:
    """Products by precision in words: "5 int8, 1 fp32"."""
    return ", ".join(f"{n} {precision}" for precision, n in precisions.items())


def fusion(nodes: int | None, kernels: int) -> str:
    """How many nodes of the source became how many kernels, in words; empty where the backend tells of none."""
    if not kernels:
        return ""
    return f"{nodes} nodes in {kernels} kernels" if nodes else f"{kernels} kernels"

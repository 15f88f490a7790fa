"""A speed-up can't be claimed from operations: no gate, verdict or ranking knows the roofline."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks import gates, roofline
from tasks.results import Variant
from tasks.settings import GateParams

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name", ["roofline", "flops", "over", "bound_ms", "multiply_adds", "predicted", "speedup_flops"]
)
def test_no_gate_can_be_put_on_a_roofline(name: str) -> None:
    with pytest.raises(ValidationError):
        GateParams.model_validate({name: {"min": 1.0}})
    with pytest.raises(AttributeError):
        gates.metric(Variant("v", (), "onnxruntime"), name)


def test_what_variants_are_judged_by_holds_nothing_of_it() -> None:
    assert not {f.name for f in fields(Variant)} & {f.name for f in fields(roofline.Roofline)} - {"name"}


def imports(module: str, seen: set[str]) -> set[str]:
    """The modules of this project that one imports, at any depth."""
    file = ROOT / (module.replace(".", "/") + ".py")
    if module in seen or not file.is_file():
        return seen
    seen.add(module)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tasks"):
            imports(node.module, seen)
            for alias in node.names:
                imports(f"{node.module}.{alias.name}", seen)
    return seen


@pytest.mark.parametrize("module", ["gates", "results", "compare", "promote", "stats", "timing", "sequential"])
def test_verdicts_ranking_and_promotion_know_no_roofline(module: str) -> None:
    known = imports(f"tasks.{module}", set())
    assert f"tasks.{module}" in known
    assert not known & {
        f"tasks.{name}" for name in ("roofline", "peaks", "datasheets", "systolic", "onnx_work", "account")
    }

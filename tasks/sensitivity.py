"""Automatic mixed precision: which nodes stay in floating point until an accuracy budget holds.

Wu et al. 2020, arXiv:2004.09602, section 5.1 (partial quantisation): quantise one layer at a time, rank the layers by
what that costs, and keep the most sensitive ones. Ranking each layer by itself is also how HAWQ chooses (Dong et al.
2019, arXiv:1905.03696), by curvature instead. Here the cost is the noise at the outputs, which needs no labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.errors import Fault
from tasks.sensitivity_runs import Bench, Make
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import Workload


@dataclass(frozen=True)
class Sensitivity:
    """One node of the sweep: the outputs' signal-to-noise ratio (dB) and cosine against the parent's, of the worst one.

    In a sweep of `one`, of the model with this node alone quantised: the less, the more sensitive. In one of
    `all_but_one`, of the model with all quantised but this node: the more, the more sensitive. From -200 (outputs that
    aren't finite) to 200 dB (equal ones). `kept` says whether it stays in floating point.
    """

    node: str
    op: str
    snr_db: float
    cosine: float
    kept: bool = False


@dataclass(frozen=True)
class Tried:
    """A model with the `kept` most sensitive nodes in floating point: the metric on validation, 0 … 1, and its loss."""

    kept: int
    metric: float
    loss: float
    within_budget: bool


@dataclass(frozen=True)
class SearchReport:
    """The table of the sweep, most sensitive first, and the path to the fewest nodes found to be enough.

    `budget` and the losses are shares of 1, against `parent_metric`. `models` were made, at most `models_bound`.
    `kept` are the nodes to leave alone. Where `within_budget` is False no quantised model is good enough, and `kept`
    are all nodes; `verdict` says what was found, in a sentence. The table is empty if nothing had to be kept.
    """

    sweep: str
    metric: str
    budget: float
    parent_metric: float
    calibration_samples: int
    validation_samples: int
    models: int
    models_bound: int
    seconds: float
    table: tuple[Sensitivity, ...]
    path: tuple[Tried, ...]
    kept: tuple[str, ...]
    within_budget: bool
    verdict: str


def search(
    source: Path, task: Workload, data: Path, params: QuantizeParams, make: Make, nodes: Sequence[str]
) -> SearchReport:
    """Find the nodes of `source/model.onnx` to leave in floating point, by `params.search`.

    `make(folder, exclude)` writes `folder/model.onnx`, quantised but for the nodes of `exclude`; `nodes` are those
    that it would quantise. Outputs are compared on the first samples of `data/calibration.npz`, the budget is
    held on `data/validation.npz`; no other split is read. Every file runs in ONNX Runtime on the CPU, unoptimised, so
    that its arithmetic is what it says.

    If the model with all nodes quantised is within the budget, that is the end. Otherwise every node is swept, and
    the number of nodes to keep is found by an exponential and then a binary search (Bentley and Yao 1976): a model
    per step, of which there are at most 2 log2(nodes), where adding one node after another would take up to all of
    them. The answer is within the budget and one node less is not; a smaller number that was not tried may do too,
    since the metric need not rise with each node. The parent itself counts as the model with every node kept.

    Raises Fault without `params.search` or nodes, for an unknown metric, or if a file can't run here.
    """
    settings = params.search
    if settings is None or not nodes:
        raise Fault(
            "nothing to search",
            got="no search settings" if settings is None else "no node that would be quantised",
            expected="quantize.*.search, and a model with nodes to quantise",
            do="leave out quantize.*.search, or look at keep and keep_ops",
        )
    start, bench = time.monotonic(), Bench(source, task, data, settings.metric, settings.samples, make)
    bound = 1 + len(nodes) + 2 * max(0, (len(nodes) - 1).bit_length())
    print(f"search: {len(nodes)} nodes, at most {bound} models", flush=True)

    path: dict[int, Tried] = {}

    def within(kept: int, ranked: Sequence[str] = ()) -> bool:
        metric = bench.metric(tuple(ranked[:kept]))
        loss = bench.parent_metric - metric
        # A loss of exactly the budget holds, whatever rounding makes of it.
        path[kept] = Tried(kept, metric, loss, loss <= settings.budget + 1e-9)
        print(f"search: {kept} kept, {settings.metric} {metric:.4f} ({0.0 - 100 * loss:+.2f} points)", flush=True)
        return path[kept].within_budget

    table: list[Sensitivity] = []
    kept = 0
    if not within(0):
        table = _sweep(bench, nodes, settings.sweep)
        ranked = [row.node for row in table]
        kept = fewest(len(ranked), lambda count: within(count, ranked))
    table = [replace(row, kept=i < kept) for i, row in enumerate(table)]
    tried = tuple(path[k] for k in sorted(path))
    held = kept < len(nodes)
    return SearchReport(
        sweep=settings.sweep,
        metric=settings.metric,
        budget=settings.budget,
        parent_metric=bench.parent_metric,
        calibration_samples=bench.calibration_samples,
        validation_samples=len(bench.validation["label"]),
        models=bench.models,
        models_bound=bound,
        seconds=time.monotonic() - start,
        table=tuple(table),
        path=tried,
        kept=tuple(row.node for row in table[:kept]),
        within_budget=held,
        verdict=_verdict(kept, len(nodes), tried, settings.metric, settings.budget),
    )


def fewest(count: int, enough: Callable[[int], bool]) -> int:
    """A number of nodes, 1 … `count`, that is enough while one less is not; 0 is known not to be, `count` to be.

    Doubles the number until it is enough, then halves the gap.
    """
    low, high = 0, 1
    while high < count and not enough(high):
        low, high = high, 2 * high
    high = min(high, count)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _sweep(bench: Bench, nodes: Sequence[str], sweep: str) -> list[Sensitivity]:
    """Every node's noise, the most sensitive node first; nodes that are equal stay in the model's order."""
    rows, start = [], time.monotonic()
    for done, node in enumerate(nodes, 1):
        exclude = (node,) if sweep == "all_but_one" else tuple(other for other in nodes if other != node)
        rows.append(Sensitivity(node, bench.operators.get(node, "unknown"), *bench.noise(exclude)))
        left = (time.monotonic() - start) / done * (len(nodes) - done)
        print(f"sweep {done}/{len(nodes)} · {node} {rows[-1].snr_db:.1f} dB · {left:.0f} s left", flush=True)
    sign = -1 if sweep == "all_but_one" else 1
    return sorted(rows, key=lambda row: sign * row.snr_db)


def _verdict(kept: int, nodes: int, path: Sequence[Tried], metric: str, budget: float) -> str:
    limit = f"the budget of {100 * budget:.2f} points"
    losses = {tried.kept: 100 * tried.loss for tried in path}
    if kept == 0:
        return (
            f"nothing has to stay in floating point: {metric} changes by {0.0 - losses[0]:+.2f} points, within {limit}"
        )
    if kept == nodes:
        most = max(losses)
        return (
            f"no quantised model is within {limit}: with {most} of {nodes} nodes in floating point {metric} still "
            f"changes by {0.0 - losses[most]:+.2f} points"
        )
    return (
        f"{kept} of {nodes} nodes stay in floating point: {metric} changes by {0.0 - losses[kept]:+.2f} points, within "
        f"{limit}; by {0.0 - losses[0]:+.2f} with none"
    )

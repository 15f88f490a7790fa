"""Judge every variant, and time the finalists of the Pareto front head to head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks import curves, layout, results
from tasks.files import digest_of, read_json, sha256
from tasks.gates import judge, shown
from tasks.monitor import Conditions
from tasks.openings import Openings
from tasks.params import Tree
from tasks.record import lineage_params
from tasks.reopening import Timings, all_openings
from tasks.results import Variant
from tasks.settings import BenchmarkParams
from tasks.stats import quotient
from tasks.together import AS_FAST, Together, pairs

MAX_FINALISTS = 8
WINS = "the fastest that passes every gate, or the most accurate of those as fast"


@dataclass(frozen=True)
class Comparison:
    """All variants with verdicts; `winner` is the fastest that passed, by `head_to_head`.

    `head_to_head` holds the finalists' timings in common rounds, `again` those of further openings, all under
    `conditions`. `openings` is how far openings differ, by batch, where enough of them tell; see `scatter.of_run`.
    """

    variants: list[dict[str, Any]]
    head_to_head: Timings
    again: list[Timings]
    winner: str | None
    conditions: Conditions | None = None
    openings: Mapping[int, Openings] = field(default_factory=dict)


def compare(tree: Tree, data: Path) -> Comparison:
    """Read all results, apply the gates, measure the finalists side by side, and rank them."""
    reopened = results.reopened(tree)
    judged = judged_variants(tree, reopened)
    by_name = {name: v for v in judged for name in (v.name, *v.also)}
    names = finalists(tree, judged)
    params = tree.params.benchmark
    timings, conditions = head_to_head(names, data, params) if len(names) > 1 else ([], None)
    together = Together(timings, params.confidence, params.reopen_sd, reopened.get(params.batch))
    judged = [_against_plain(v, tree, by_name, together) for v in judged]
    winner = _winner([v for v in judged if v.verdict == "passed"], together)
    truncated = {v.name for v in front(judged)[MAX_FINALISTS:]}
    judged = [_against_winner(v, winner, together, truncated) for v in judged]
    found = [results.plain(replace(v, content=_content(tree, v, reopened))) for v in judged]
    told = {batch: s.openings for batch, s in reopened.items() if s.openings}
    first, further = (timings[0], timings[1:]) if timings else ({}, [])
    return Comparison(found, first, further, winner, conditions, told)


def judged_variants(tree: Tree, reopened: results.Reopened | None = None) -> list[Variant]:
    """Every variant with the verdict that the recorded files and the gates give.

    One whose numbers aren't finite, or were timed otherwise than the settings now say, has failed.
    """
    inputs_sha256 = sha256(layout.DATA / "validation.npz")
    found = [_usable(v, tree, inputs_sha256) for v in results.variants(tree, reopened)]
    baseline = next((v for v in found if v.name == tree.params.baseline), None)
    return [judge(v, tree.params.gates, baseline) for v in found]


def _usable(variant: Variant, tree: Tree, inputs_sha256: str) -> Variant:
    """The variant, failed if a number of it isn't finite, or if it was timed otherwise than settings and data ask."""
    several = (variant.speedup_at, variant.latency_bounds_ms, variant.throughput_bounds)
    intervals = [
        variant.accuracy,
        variant.accuracy_change,
        variant.speedup,
        *(i for by in several for i in by.values()),
    ]
    numbers = [v for i in intervals if i for v in (i.value, i.low, i.high)]
    numbers += [v for v in (*(variant.latency_ms or {}).values(), *variant.throughput_at.values()) if v is not None]
    if not all(math.isfinite(v) for v in (*numbers, variant.throughput_per_s or 1.0)):
        return replace(variant, verdict="failed", reasons=("a recorded number of it isn't finite", *variant.reasons))
    if variant.speedup is None:
        return variant
    timed, asked = read_json(layout.report("benchmark", variant.name)), tree.params.benchmark
    for what, got, expected in (
        ("batch", timed["timing"]["batch"], asked.batch),
        ("clock", timed["timing"]["clock"], asked.clock),
        ("length", timed.get("length"), asked.length),
    ):
        if got != expected:
            told = f"it was timed at {what} {got}, and benchmark.{what} is {expected}: run `dvc repro`"
            return replace(variant, verdict="failed", reasons=(told, *variant.reasons))
    if timed.get("validation_sha256") != inputs_sha256:
        told = "it was timed on other inputs than data/validation.npz holds now: run `dvc repro`"
        return replace(variant, verdict="failed", reasons=(told, *variant.reasons))
    return variant


def finalists(tree: Tree, judged: list[Variant]) -> list[str]:
    """Names of the fastest of the Pareto front, at most 8, and each of their backends' plain engines."""
    first = front(judged)[:MAX_FINALISTS]
    names = [v.name for v in first]
    plains = {tree.plain(v.backend) for v in first}
    return names + [v.name for v in judged if v.name in plains and v.name not in names and v.speedup]


def front(judged: list[Variant]) -> list[Variant]:
    """The passed variants on the Pareto front of accuracy and speed, within their intervals; the fastest first."""
    passed = [v for v in judged if v.verdict == "passed" and v.accuracy and v.speedup]
    found = [v for v in passed if not any(_dominates(o, v) for o in passed)]
    return sorted(found, key=lambda v: -v.speedup.value if v.speedup else 0.0)


def head_to_head(names: list[str], data: Path, params: BenchmarkParams) -> tuple[list[Timings], Conditions]:
    """Time several engines in common rounds on validation inputs, until all are told apart from the fastest.

    They are opened as often as a benchmark opens its engines. Several openings go on until the mean of all tells apart
    what counts as a difference, or their rounds are used up.
    """
    settings = params.model_copy(update={"max_width": min(params.max_width, AS_FAST - 1)})
    folders = {name: layout.artifact(name) for name in names}
    return all_openings(folders, data, settings, family=pairs(len(names)), fastest=True)


def _dominates(a: Variant, b: Variant) -> bool:
    """At least as accurate, and faster beyond what the two intervals leave open."""
    assert a.accuracy and b.accuracy and a.speedup and b.speedup
    return a.accuracy.value >= b.accuracy.value and a.speedup.low > b.speedup.high


def _winner(passed: list[Variant], together: Together) -> str | None:
    """The fastest; among those within 5 % that can't be told apart from it, the most accurate."""
    ranking = sorted(passed, key=lambda v: _rank(v, together))
    if not ranking or not together.usable(ranking[0].name):
        return ranking[0].name if ranking else None
    first = ranking[0].name
    tied = [v for v in ranking if together.usable(v.name) and together.tied(first, v.name)]
    return max(tied, key=lambda v: v.accuracy.value if v.accuracy else 0.0).name


def _rank(variant: Variant, together: Together) -> tuple[bool, float]:
    """Finalists by their common measurement first, where it can be used; others by speed-up over the baseline."""
    if together.usable(variant.name):
        return False, together.typical_ms(variant.name)
    assert variant.speedup
    return True, -variant.speedup.value


def _against_plain(variant: Variant, tree: Tree, by_name: dict[str, Variant], together: Together) -> Variant:
    """Tell a variant that is faster than the baseline but not than its backend's plain engine."""
    name = tree.plain(variant.backend)
    other = by_name.get(name) if name else None
    if (
        other is None
        or other.name == variant.name
        or not variant.speedup
        or not other.speedup
        or variant.name == tree.params.baseline
    ):
        return variant
    common = together.usable(variant.name, other.name)
    gain = together.gain(variant.name, other.name) if common else quotient(variant.speedup, other.speedup)
    if gain.low > 1:
        return variant
    how = "slower than" if gain.high < 1 else "not faster than"
    return replace(
        variant,
        reasons=(
            *variant.reasons,
            f"{how} the plain {variant.backend} engine {other.name}: {shown('speedup', gain)} of its speed"
            + ("" if common else ", by separate measurements"),
        ),
    )


def _against_winner(variant: Variant, winner: str | None, together: Together, truncated: set[str]) -> Variant:
    """Tell why a variant that passed has won or not; of a finalist whose common rounds can't be used, why not."""
    timed = variant.name in together.names
    why_not = together.unusable(variant.name) if timed else None
    told = (f"head to head, {why_not}: judged by its separate measurement",) if why_not else ()
    if winner is None or variant.verdict != "passed":
        return replace(variant, reasons=(*variant.reasons, *told))
    if variant.name == winner:
        return replace(variant, reasons=(WINS, *variant.reasons, *told))
    if together.usable(variant.name, winner):
        gain = together.gain(winner, variant.name)
        how = "is faster than" if gain.low > 1 else "is not told apart from" if gain.high >= 1 else "is slower than"
        why = f"head to head, {winner} {how} it: {shown('speedup', gain)}"
    elif variant.name in truncated:
        why = f"by separate measurements, it is slower than the {MAX_FINALISTS} that were timed head to head"
    elif timed:
        why = f"it is not told apart from {winner}, since they have no common rounds that can be used"
    else:
        why = "by separate measurements, another variant is at least as accurate and faster"
    return replace(variant, reasons=(why, *variant.reasons, *told))


def _content(tree: Tree, variant: Variant, reopened: results.Reopened) -> str:
    """A digest of what is recorded of a variant, with its lineage's settings and curves: equal when nothing changed."""
    settings = {key: str(value) for key, value in lineage_params(tree, variant.lineage).items()}
    curve = [asdict(point) for point in curves.points(tree, variant.lineage)]
    files = [layout.report(step, variant.name) for step in ("build", "evaluate", "benchmark")]
    failed = variant.reasons if variant.verdict == "failed" else ()
    return digest_of(
        [
            variant.name,
            variant.verdict,
            list(failed),
            [asdict(gain) for gain in (variant.speedup, *variant.speedup_at.values()) if gain],
            settings,
            curve,
            *(read_json(f) if f.is_file() else None for f in files),
            *(asdict(found) for found in reopened.values()),
        ]
    )

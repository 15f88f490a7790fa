"""The judgement: finalists, the winner, and what each loser is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import gates, layout, results
from tasks.compare import WINS, _winner, compare, finalists, head_to_head, judged_variants
from tasks.data import read, write
from tasks.files import read_json, write_json
from tasks.measure import Timing
from tasks.params import Tree, load
from tasks.results import Variant
from tasks.scatter import Scatter
from tasks.settings import BenchmarkParams
from tasks.stats import Interval
from tasks.together import Together


def variant(name: str, accuracy: float, speed: float, width: float = 0.02, verdict: str = "passed") -> Variant:
    return Variant(
        name,
        ("base", name),
        "onnxruntime",
        accuracy=Interval(accuracy, accuracy - 0.01, accuracy + 0.01),
        speedup=Interval(speed, speed * (1 - width), speed * (1 + width)),
        verdict=verdict,
    )


def timing(ms: float, seed: int) -> Timing:
    """Twelve rounds with noise of 0.1 %."""
    medians = tuple(ms * np.random.default_rng(seed).normal(1, 1e-3, 12))
    return Timing(1, "host", ms, ms, None, ms, 600, 1e3 / ms, True, medians, (12,), 12)


def test_finalists_are_the_front_and_the_plain_engines(tree: Tree) -> None:
    judged = [
        variant("base-ort", 0.9, 1.5),
        variant("fast", 0.9, 3.0),
        variant("accurate", 0.95, 2.0),
        variant("beaten", 0.89, 1.9),
        variant("close", 0.9, 2.98),
        variant("refused", 0.99, 9.0, verdict="rejected"),
    ]
    assert finalists(tree, judged) == ["fast", "close", "accurate", "base-ort"]


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"a": 1.0, "b": 2.0}, "a"),
        ({"a": 2.0, "b": 1.0}, "b"),
        ({"a": 1.0, "b": 1.0001}, "b"),
        ({"a": 1.0001, "b": 1.0}, "b"),
    ],
    ids=["a is faster", "b is faster", "tied, b is more accurate", "tied, b is both"],
)
def test_the_fastest_wins_and_among_the_tied_the_most_accurate(times: dict[str, float], winner: str) -> None:
    passed = [variant("a", 0.90, 2.0), variant("b", 0.95, 2.0)]
    timings = {n: timing(t, seed) for seed, (n, t) in enumerate(times.items())}
    assert _winner(passed, Together([timings], 0.95)) == winner


def test_the_common_measurement_counts_before_the_separate_ones() -> None:
    passed = [variant("a", 0.9, 9.0), variant("b", 0.9, 2.0)]
    assert _winner(passed, Together([{"a": timing(2.0, 0), "b": timing(1.0, 1)}], 0.95)) == "b"
    assert _winner(passed, Together()) == "a"


def test_nothing_passed_is_no_winner() -> None:
    assert _winner([], Together()) is None


@pytest.fixture
def planted(tree: Tree) -> Any:
    """`planted(name, speed)`: rewrite an engine's benchmark as so many times the baseline's speed."""

    def plant(name: str, speed: float) -> None:
        path = layout.report("benchmark", name)
        raw = read_json(path)
        raw["timing"]["medians"] = [m / speed * (1 + 1e-4 * i) for i, m in enumerate(raw["baseline"]["medians"])]
        write_json(path, {**raw, "unstable": None})

    for name in tree.engines:
        if name != "base-rtx":
            plant(name, 1.0)
    return plant


def test_the_plain_engine_stays_what_a_compressed_one_is_held_against(tree: Tree, planted: Any) -> None:
    planted("base-ort", 4.0)
    planted("slim-kd-ort", 2.0)
    planted("base-int8-ort", 0.5)
    comparison = compare(tree, layout.DATA)
    found = {v["name"]: v for v in comparison.variants}
    assert comparison.winner == "base-ort"
    assert found["base-ort"]["reasons"][0] == WINS
    assert any("than the plain onnxruntime engine base-ort" in r for r in found["base-int8-ort"]["reasons"])
    assert found["base-int8-ort"]["verdict"] == "rejected"
    assert found["base-eager"]["reasons"] == ("it is the baseline",)
    assert found["base-rtx"]["verdict"] == "not_run"


def test_finalists_are_measured_head_to_head_in_common_rounds(tree: Tree, planted: Any) -> None:
    for name in ("base-ort", "slim-kd-ort"):
        planted(name, 4.0)
    comparison = compare(tree, layout.DATA)
    assert set(comparison.head_to_head) == {"base-ort", "slim-kd-ort"}
    assert {len(t.medians) for t in comparison.head_to_head.values()} == {8}
    assert comparison.winner in comparison.head_to_head
    loser = next(
        v for v in comparison.variants if v["name"] in comparison.head_to_head and v["name"] != comparison.winner
    )
    assert loser["reasons"][0].startswith(f"head to head, {comparison.winner} is ")


def test_finalists_are_opened_as_often_as_a_benchmark_and_their_ranking_is_of_all_openings(
    tree: Tree, planted: Any
) -> None:
    for name in ("base-ort", "slim-kd-ort"):
        planted(name, 4.0)
    raw = json.loads(layout.PARAMS.read_text())
    raw["benchmark"] |= {"openings": 3, "max_width": 0.9}
    layout.PARAMS.write_text(json.dumps(raw))
    comparison = compare(load(layout.PARAMS), layout.DATA)
    openings = [comparison.head_to_head, *comparison.again]
    assert [set(timings) for timings in openings] == 3 * [{"base-ort", "slim-kd-ort"}]
    assert comparison.conditions is not None and comparison.conditions.readings > 3 * 2 * 8
    together = Together(openings, 0.95, raw["benchmark"].get("reopen_sd", BenchmarkParams().reopen_sd))
    loser = ({"base-ort", "slim-kd-ort"} - {comparison.winner}).pop()
    told = next(v["reasons"][0] for v in comparison.variants if v["name"] == loser)
    assert told.endswith(gates.shown("speedup", together.gain(comparison.winner, loser)))


@pytest.mark.parametrize(("openings", "width"), [(1, 0.05), (3, 0.05 * 3**0.5)])
def test_finalists_are_timed_until_their_ratios_are_known_to_5_percent(
    monkeypatch: pytest.MonkeyPatch, openings: int, width: float
) -> None:
    plans = []
    monkeypatch.setattr("tasks.reopening.opened", lambda plan: plans.append(plan) or ([{}], None))
    monkeypatch.setattr("tasks.reopening.again", lambda plan: [])
    monkeypatch.setattr("tasks.reopening.merged", lambda seen: seen)
    params = BenchmarkParams(openings=openings, also=(8,), max_width=0.15)
    assert head_to_head(["a", "b", "c"], layout.DATA, params) == ([{}], [None])
    (plan,) = plans
    (settings,) = plan.batches
    assert settings.max_width == pytest.approx(width)
    assert (list(plan.folders), plan.family, plan.fastest, settings.also) == (["a", "b", "c"], 3, True, ())


def test_a_worse_accuracy_is_rejected_however_fast(tree: Tree, planted: Any) -> None:
    planted("slim-kd-ort", 9.0)
    planted("base-ort", 2.0)
    scores = read(layout.scores("slim-kd-ort"))["scores"]
    scores[:150] = 0
    write(layout.scores("slim-kd-ort"), {"scores": scores})
    comparison = compare(tree, layout.DATA)
    slim = next(v for v in comparison.variants if v["name"] == "slim-kd-ort")
    assert slim["verdict"] == "rejected"
    assert "accuracy_change" in slim["reasons"][0]
    assert comparison.winner == "base-ort"


def test_all_rejected_is_no_winner_and_no_measurement(tree: Tree, planted: Any) -> None:
    comparison = compare(tree, layout.DATA)
    assert comparison.winner is None
    assert (comparison.head_to_head, comparison.again) == ({}, [])


def test_contents_change_with_the_records_alone(tree: Tree, planted: Any) -> None:
    first, again = (compare(tree, layout.DATA).variants for _ in range(2))
    assert [v["content"] for v in first] == [v["content"] for v in again]
    planted("base-ort", 3.0)
    changed = compare(tree, layout.DATA).variants
    assert [a["name"] for a, b in zip(first, changed, strict=True) if a["content"] != b["content"]] == ["base-ort"]


def changed_contents(before: Tree, after: Tree, change: Any = None) -> list[str]:
    """Names of the variants whose content differs between two trees, with a change made between."""
    first = compare(before, layout.DATA).variants
    if change:
        change()
    second = compare(after, layout.DATA).variants
    return [a["name"] for a, b in zip(first, second, strict=True) if a["content"] != b["content"]]


def test_contents_change_with_the_settings_of_the_lineage(tree: Tree, planted: Any) -> None:
    """A setting that left the bytes as they were, as another calibration batch may."""
    raw = json.loads(layout.PARAMS.read_text())
    raw["quantize"]["base-int8"]["batch"] += 1
    layout.PARAMS.write_text(json.dumps(raw))
    assert changed_contents(tree, load(layout.PARAMS)) == ["base-int8-ort"]


def test_contents_change_with_the_learning_curves(tree: Tree, planted: Any) -> None:
    path = layout.report("distill", "slim-kd")
    raw = read_json(path)
    raw["curve"][0]["loss"] += 1
    assert changed_contents(tree, tree, lambda: write_json(path, raw)) == ["slim-kd-ort"]


@pytest.fixture
def common(tree: Tree, planted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`common(**timings)`: the comparison of finalists that were timed so head to head; slim-kd-ort is the faster."""
    planted("base-ort", 4.0)
    planted("slim-kd-ort", 4.2)

    def compared(base: Timing, slim: Timing, *again: dict[str, Timing]) -> Any:
        timings = [{"base-ort": base, "slim-kd-ort": slim}, *again]
        monkeypatch.setattr("tasks.compare.head_to_head", lambda *_: (timings, None))
        found = compare(tree, layout.DATA)
        return found.winner, {v["name"]: v["reasons"] for v in found.variants}

    return compared


def test_a_finalist_whose_latency_did_not_settle_does_not_win_by_it(common: Any) -> None:
    assert common(timing(2.0, 0), timing(1.0, 1))[0] == "slim-kd-ort"
    winner, reasons = common(timing(2.0, 0), replace(timing(1.0, 1), warm=False))
    assert winner == "base-ort"
    told = "head to head, its latency did not settle during warm-up: judged by its separate measurement"
    assert reasons["slim-kd-ort"][-1] == told
    assert reasons["slim-kd-ort"][0].startswith("it is not told apart from base-ort")
    assert not any("settle" in reason for name in reasons if name != "slim-kd-ort" for reason in reasons[name])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"busy": "only 3 of 8 rounds were undisturbed"}, "only 3 of 8"),
        ({"medians": (1.0, 1.0), "looks": (2,)}, "2 rounds can't give"),
    ],
)
def test_common_rounds_that_can_not_be_used_decide_nothing(common: Any, change: Any, told: str) -> None:
    """By them base-ort is twice as fast; by the separate measurements slim-kd-ort is a little faster."""
    winner, reasons = common(replace(timing(1.0, 0), **change), replace(timing(2.0, 1), **change))
    assert winner == "slim-kd-ort"
    assert all(f"head to head, {told}" in reasons[name][-1] for name in ("base-ort", "slim-kd-ort"))


def test_one_opening_that_can_not_be_used_decides_nothing_for_its_engine(common: Any) -> None:
    good = {"base-ort": timing(1.0, 2), "slim-kd-ort": timing(2.0, 3)}
    assert common(timing(1.0, 0), timing(2.0, 1), good)[0] == "base-ort"
    busy = {**good, "base-ort": replace(good["base-ort"], busy="only 3 of 8 rounds were undisturbed")}
    winner, reasons = common(timing(1.0, 0), timing(2.0, 1), busy)
    assert winner == "slim-kd-ort"
    assert "head to head, only 3 of 8" in reasons["base-ort"][-1]
    assert not any("only 3 of 8" in reason for reason in reasons["slim-kd-ort"])


def test_a_variant_comes_back_from_the_comparison(tree: Tree, planted: Any) -> None:
    planted("base-ort", 3.0)
    comparison = compare(tree, layout.DATA)
    judged = {v.name: v for v in judged_variants(tree)}
    for raw in comparison.variants:
        back = results.restore(raw)
        assert replace(back, reasons=(), content=None) == replace(judged[back.name], reasons=(), content=None)


def test_no_result_of_the_baseline_promotes_nothing(tree: Tree, planted: Any, project_copy: Path) -> None:
    planted("base-ort", 3.0)
    layout.report("evaluate", "base-eager").unlink()
    comparison = compare(tree, layout.DATA)
    assert comparison.winner is None
    assert {v["verdict"] for v in comparison.variants} <= {"failed", "rejected", "not_run"}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("batch", 32, "it was timed at batch 32, and benchmark.batch is 1: run `dvc repro`"),
        ("clock", "device", "it was timed at clock device, and benchmark.clock is host: run `dvc repro`"),
    ],
)
def test_what_was_timed_at_another_batch_or_clock_is_not_ranked(
    tree: Tree, planted: Any, key: str, value: Any, told: str
) -> None:
    planted("base-ort", 9.0)
    planted("slim-kd-ort", 2.0)
    path = layout.report("benchmark", "base-ort")
    raw = read_json(path)
    for who in ("timing", "baseline"):
        raw[who][key] = value
    write_json(path, raw)
    found = {v.name: v for v in judged_variants(tree)}
    assert (found["base-ort"].verdict, found["base-ort"].reasons[0]) == ("failed", told)
    assert compare(tree, layout.DATA).winner == "slim-kd-ort"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"length": 7}, "it was timed at length 7, and benchmark.length is None"),
        ({"validation_sha256": "of others"}, "it was timed on other inputs than data/validation.npz holds now"),
    ],
)
def test_what_was_timed_on_other_inputs_is_not_ranked(tree: Tree, planted: Any, change: Any, told: str) -> None:
    planted("base-ort", 9.0)
    path = layout.report("benchmark", "base-ort")
    write_json(path, {**read_json(path), **change})
    found = {v.name: v for v in judged_variants(tree)}
    assert found["base-ort"].verdict == "failed" and found["base-ort"].reasons[0].startswith(told)


def test_a_baseline_that_is_not_as_fast_as_itself_is_told(tree: Tree, planted: Any) -> None:
    planted("base-eager", 1.1)
    found = {v.name: v for v in judged_variants(tree)}["base-eager"]
    assert (found.verdict, found.reasons[0]) == ("rejected", "it is the baseline")
    assert found.reasons[1].startswith("timed against itself it is 1.10×")


def test_an_engine_timed_otherwise_than_the_baseline_beside_it_has_failed(tree: Tree, planted: Any) -> None:
    planted("base-ort", 9.0)
    path = layout.report("benchmark", "base-ort")
    raw = read_json(path)
    raw["baseline"]["batch"] = 32
    write_json(path, raw)
    found = {v.name: v for v in judged_variants(tree)}
    assert found["base-ort"].verdict == "failed"
    assert "weren't timed together" in found["base-ort"].reasons[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["medians", "p50", "throughput_per_s"])
def test_a_number_that_is_not_finite_enters_no_ranking(tree: Tree, planted: Any, where: str, bad: float) -> None:
    planted("base-ort", 9.0)
    planted("slim-kd-ort", 2.0)
    path = layout.report("benchmark", "base-ort")
    raw = read_json(path)
    raw["timing"][where] = [bad, *raw["timing"]["medians"][1:]] if where == "medians" else bad
    path.write_text(json.dumps(raw))
    found = {v.name: v for v in judged_variants(tree)}
    assert found["base-ort"].verdict == "failed"
    assert "finite" in found["base-ort"].reasons[0]
    assert compare(tree, layout.DATA).winner == "slim-kd-ort"


def test_scores_that_are_not_finite_enter_no_ranking(tree: Tree, planted: Any) -> None:
    planted("base-ort", 9.0)
    scores = read(layout.scores("base-ort"))["scores"]
    scores[3] = np.nan
    write(layout.scores("base-ort"), {"scores": scores})
    found = {v.name: v for v in judged_variants(tree)}
    assert (found["base-ort"].verdict, compare(tree, layout.DATA).winner) == ("failed", None)
    assert "finite" in found["base-ort"].reasons[0]


def test_more_engines_in_the_tree_ask_each_for_more(tree: Tree, planted: Any) -> None:
    """A speed-up that four engines' intervals show, forty engines' don't: eight rounds can't."""
    planted("base-ort", 4.0)
    few = {v.name: v for v in judged_variants(tree)}["base-ort"]
    raw = json.loads(layout.PARAMS.read_text())
    raw["build"] |= {f"more-{i}": {"from": "base-onnx", "backend": "onnxruntime"} for i in range(36)}
    layout.PARAMS.write_text(json.dumps(raw))
    many = {v.name: v for v in judged_variants(load(layout.PARAMS))}["base-ort"]
    assert few.verdict == "passed"
    assert many.verdict == "unstable"
    assert many.reasons[0].startswith("8 rounds can't give an interval of confidence 99.87")


def test_several_openings_head_to_head_tell_more_than_one_and_one_bad_one_spoils_them() -> None:
    openings = [{"a": timing(1.0, 2 * seed), "b": timing(1.03, 2 * seed + 1)} for seed in range(3)]
    one, three = Together(openings[:1], 0.95, 0.02), Together(openings, 0.95, 0.02)
    assert one.tied("a", "b") and not three.tied("a", "b")
    assert one.typical_ms("b") == pytest.approx(1.03, rel=0.01)
    swift = Together([{"a": timing(1.0, 0)}, {"a": timing(4.0, 1)}])
    assert swift.typical_ms("a") == pytest.approx(2.0, rel=0.01)
    spoilt = [openings[0], {**openings[1], "b": replace(openings[1]["b"], busy="other processes took its cores")}]
    assert Together(spoilt, 0.95).unusable("b") == "other processes took its cores"
    assert Together(spoilt, 0.95).usable("a") and not Together(spoilt, 0.95).usable("a", "b")
    few = [{name: replace(t, medians=t.medians[:2]) for name, t in timings.items()} for timings in openings]
    assert "rounds can't give" in str(Together(few[:2], 0.95).unusable("a"))
    assert Together(few, 0.95).unusable("a") is None


def test_a_pair_head_to_head_allows_for_its_own_two_engines_alone() -> None:
    timings = {"a": timing(1.0, 0), "b": timing(1.04, 1), "restless": timing(1.04, 2)}
    found = Scatter({"a": 0.001, "b": 0.001, "restless": 0.2}, 6.0, 0.001, 6, None)
    together = Together([timings], 0.95, 0.002, found)
    assert together.gain("a", "b").low > 1 and not together.tied("a", "b")
    assert together.gain("a", "restless").low < 1 and together.tied("a", "restless")
    assert together.gain("a", "b") == Together([timings], 0.95, 0.002).gain("a", "b")

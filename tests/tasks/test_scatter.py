"""What a run tells of its openings, and the intervals that allow for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from tasks import layout, results, scatter
from tasks.files import read_json, write_json
from tasks.openings import of_record
from tasks.params import Tree
from tasks.scatter import PRIOR_AT_MOST, moderated
from tasks.stats import Interval
from tasks.timing import Opening, over


@pytest.fixture
def reopened(tree: Tree) -> Any:
    """`reopened(sd)`: every engine of the tree timed in four openings, whose ratios differ by so much."""
    rng = np.random.default_rng(5)

    def timing(raw: dict[str, Any], ms: float) -> dict[str, Any]:
        """Eight rounds with noise of 0.1 %."""
        return {**raw, "medians": list(ms * rng.normal(1, 1e-3, 8)), "warm": True, "busy": None}

    def plant(sd: float) -> Tree:
        for name in tree.engines:
            raw = read_json(layout.report("benchmark", name))
            if raw["timing"]:
                pairs = [
                    {"timing": timing(raw["timing"], off / 2), "baseline": timing(raw["baseline"], 1.0)}
                    for off in np.exp(sd * rng.normal(size=4))
                ]
                write_json(layout.report("benchmark", name), {**raw, **pairs[0], "again": pairs[1:], "unstable": None})
        return tree

    return plant


def told(tree: Tree) -> scatter.Scatter:
    return results.reopened(tree)[tree.params.benchmark.batch]


def test_a_run_tells_how_far_openings_differ(reopened: Any) -> None:
    tree = reopened(0.05)
    found = told(tree)
    assert found.openings is not None and found.openings.trials == found.common_free == 4 * 3
    assert found.openings.sd.low < 0.05 < found.openings.sd.high
    assert found.openings.noise < 0.002
    assert found.common == pytest.approx(found.openings.sd.value, rel=0.1)
    assert len(found.sd) == 4 and min(found.sd.values()) < found.common < max(found.sd.values())


def test_what_is_unstable_or_was_opened_once_tells_nothing(reopened: Any) -> None:
    tree = reopened(0.05)
    names = [n for n in tree.engines if read_json(layout.report("benchmark", n))["timing"]]
    for name, change in zip(names, ({"again": []}, {"unstable": "it is"}, {}, {}), strict=True):
        path = layout.report("benchmark", name)
        write_json(path, {**read_json(path), **change})
    assert told(tree).common_free == 2 * 3
    for name in names[2:]:
        write_json(layout.report("benchmark", name), {**read_json(layout.report("benchmark", name)), "again": []})
    assert results.reopened(tree) == {}


def test_a_record_that_is_not_usable_fails_its_variant_alone(reopened: Any) -> None:
    tree = reopened(0.05)
    whole = told(tree).common_free
    path = layout.report("benchmark", "base-ort")
    raw = read_json(path)
    for spoilt in (
        {"engine_sha256": "of another"},
        {"again": [{"timing": {**raw["timing"], "medians": []}, "baseline": raw["baseline"]}]},
        {"again": [{"timing": {**raw["timing"], "batch": 32}, "baseline": raw["baseline"]}]},
    ):
        write_json(path, {**raw, **spoilt})
        verdicts = {v.name: v.verdict for v in results.variants(tree)}
        assert verdicts["base-ort"] == "failed" and verdicts["slim-kd-ort"] == ""
        assert told(tree).common_free == whole - 3


def test_speed_ups_allow_for_what_the_run_tells_of_openings(reopened: Any) -> None:
    def gain(sd: float) -> Interval:
        found = {v.name: v.speedup for v in results.variants(reopened(sd))}["base-ort"]
        assert found is not None
        return found

    def width(found: Interval) -> float:
        return float(np.log(found.high / found.low))

    assert width(gain(0.08)) > 3 * width(gain(0.0))
    assert 0.85 < gain(0.08).value / 2 < 1.2


@pytest.mark.parametrize("free", [2, 4])
def test_variances_that_differ_by_chance_alone_are_drawn_together(free: int) -> None:
    rng = np.random.default_rng(2)
    own = 0.01**2 * rng.chisquare(free, 4000) / free
    found, degrees = moderated(list(own), [free] * 4000)
    assert degrees == free + PRIOR_AT_MOST
    middle = (free * own + PRIOR_AT_MOST * own.mean()) / (free + PRIOR_AT_MOST)
    assert np.allclose(found, middle)


def test_variances_that_really_differ_keep_to_themselves() -> None:
    """Drawn from an inverse chi-squared law of 1.5 degrees of freedom, which is found again."""
    rng = np.random.default_rng(4)
    true = 0.01**2 * 1.5 / rng.chisquare(1.5, 20000)
    found, degrees = moderated(list(true * rng.chisquare(2, 20000) / 2), [2] * 20000)
    assert degrees == pytest.approx(2 + 1.5, abs=0.1)
    assert np.corrcoef(np.log(found), np.log(true))[0, 1] > 0.8
    assert moderated([4e-4], [2]) == ([pytest.approx(4e-4)], 2.0)


def pretend(line: Path, sds: list[float], rng: np.random.Generator) -> dict[str, list[Opening]]:
    """Three openings of engines that are as fast as the baseline, whose ratios scatter by so much, each its own."""
    one = of_record({**read_json(line / layout.report("benchmark", "base-ort")), "again": []})[0].timing

    def opening(sd: float) -> Opening:
        off, medians = float(np.exp(sd * rng.normal())), 1 + 2e-3 * rng.normal(size=(2, 8))
        return Opening(
            replace(one, medians=tuple(off * medians[0]), warm=True, busy=None),
            replace(one, medians=tuple(medians[1]), warm=True, busy=None),
        )

    return {f"engine-{i}": [opening(sd) for _ in range(3)] for i, sd in enumerate(sds)}


@pytest.mark.parametrize(
    "sds",
    [[0.03], [0.02] * 6, [0.05, *[0.005] * 7], [0.03, *[0.005] * 10], [0.0025, 0.005, 0.01, 0.02, 0.04]],
    ids=["one", "alike", "one of eight", "one of eleven", "all unlike"],
)
def test_a_false_faster_is_rarer_than_one_tree_in_twenty(line: Path, sds: list[float]) -> None:
    """All engines of a tree as fast as the baseline: none may be called faster, however differently they scatter."""
    rng, trees, wrong = np.random.default_rng(8), 300, 0
    for _ in range(trees):
        logs, openings = {}, pretend(line, sds, rng)
        for name, opened in openings.items():
            logs[name] = [float(np.log(o.plain().speedup(0.95).value)) for o in opened]
        found, family = scatter._scatter(logs, None), len(sds)
        wrong += any(
            over(opened, 0.95, family, 0.007, found.allowance([name], 0.95, family)).low > 1
            for name, opened in openings.items()
        )
    assert wrong <= 0.05 * trees + 2 * (0.05 * 0.95 * trees) ** 0.5


@pytest.mark.parametrize("base", [0.0, 0.02], ids=["steady baseline", "restless baseline"])
def test_two_engines_head_to_head_are_held_equal_as_often_as_it_says(base: float) -> None:
    """Eight engines over one baseline in three openings each; then two of them against each other, opened anew."""
    rng, trees, wrong = np.random.default_rng(3), 1500, 0
    for _ in range(trees):
        own, common = 0.02 * rng.normal(size=(8, 3)), base * rng.normal(size=(8, 3))
        logs = {str(i): list(own[i] - common[i]) for i in range(8)}
        allowed = scatter._scatter(logs, None).allowance(["0", "1"], 0.95)
        wrong += abs(0.02 * rng.normal() - 0.02 * rng.normal()) > 1.96 * allowed
    assert wrong <= 0.05 * trees + 2 * (0.05 * 0.95 * trees) ** 0.5


def test_a_few_openings_count_for_more_than_their_spread_says() -> None:
    found = scatter.Scatter({"a": 0.04, "b": 0.02}, 6.0, 0.01, 8, None)

    def allowed(names: list[str], family: int = 1) -> float:
        return scatter.allowance(found, names, 0.95, family)

    assert scatter.allowance(None, ["a"], 0.95) == 0
    assert allowed(["a"]) == pytest.approx(0.04 * 2.447 / 1.960, rel=1e-3)  # Student's t of 6 degrees of freedom.
    assert allowed(["b"]) == pytest.approx(0.02 * 2.447 / 1.960, rel=1e-3)
    assert allowed(["unknown"]) == allowed(["a"])
    assert allowed(["a", "b"]) == pytest.approx(np.hypot(0.04, 0.02) * 2.447 / 1.960, rel=1e-3)
    assert allowed(["b"], family=9) > allowed(["b"])
    quiet = scatter.Scatter({"a": 0.001}, 6.0, 0.03, 8, None)
    assert scatter.allowance(quiet, ["a"], 0.95) == pytest.approx(0.03 * 2.306 / 1.960, rel=1e-3)


RECORDED = scatter.Scatter({"a": 0.01, "b": 0.01}, 6.0, 0.01, 20, None)


def allowed(
    logs: list[float], found: scatter.Scatter | None = RECORDED, more: dict[str, list[float]] | None = None
) -> float:
    """What is allowed of b over a, in a series of these two, or of more."""
    return scatter.in_series(found, ["a", "b"], logs, {"b": logs, **(more or {})}, 0.95)


def false_verdicts(hour: float, own: bool, trials: int = 4000) -> float:
    """The share of equal pairs of which three openings call one faster, in an hour with such a deviation of ratios."""
    rng, found = np.random.default_rng(3), 0
    for _ in range(trials):
        logs = list(rng.normal(0, hour, 3))
        sd = allowed(logs) if own else scatter.allowance(RECORDED, ["a", "b"], 0.95)
        found += np.mean(logs) > 1.96 * sd / 3**0.5
    return found / trials


def test_a_series_in_a_restless_hour_is_judged_by_its_own_openings() -> None:
    assert [false_verdicts(hour, own=True) < 0.06 for hour in (0.014, 0.03, 0.1)] == [True] * 3
    assert false_verdicts(0.10, own=False) > 0.3


def test_a_series_as_its_record_says_is_judged_by_that() -> None:
    recorded = scatter.allowance(RECORDED, ["a", "b"], 0.95)
    assert allowed([0.01, -0.01, 0.0]) == recorded
    assert allowed([0.1, -0.1, 0.0]) > 5 * recorded


def test_without_a_record_the_own_openings_count() -> None:
    assert allowed([0.1, -0.1, 0.0], None) == pytest.approx(0.1 * 4.303 / 1.96, rel=1e-3)


def test_others_of_a_series_tell_of_its_hour_too() -> None:
    """Two differences alone leave a factor of 4.3 at 95 %, and of 24 for one of fifteen pairs."""
    logs, others = [0.1, -0.1, 0.0], {f"c{i}": [0.1, 0.0, -0.1] for i in range(4)}
    assert allowed(logs, more=others) < 0.7 * allowed(logs)
    many = scatter.in_series(RECORDED, ["a", "b"], logs, {"b": logs, **others}, 0.95, 15)
    alone = scatter.in_series(RECORDED, ["a", "b"], logs, {"b": logs}, 0.95, 15)
    assert many < 0.3 * alone


def test_two_openings_moderate_less_than_three() -> None:
    """One engine of ten that scatters ten times as much: with one difference each, the others count for two at most."""
    rng = np.random.default_rng(2)
    for openings in (2, 3):
        free, found = openings - 1, 0
        for _ in range(1000):
            sds = np.array([10.0] + [1.0] * 9)
            logs = rng.normal(0, 1, (10, openings)) * sds[:, None]
            each, degrees = moderated(list(logs.var(axis=1, ddof=1)), [free] * 10)
            sure = 1 - 0.05 / 9 / 2
            wide = stdtrit(degrees, sure) * np.sqrt(each) / openings**0.5
            common = stdtrit(free * 10, sure) * np.sqrt(np.mean(logs.var(axis=1, ddof=1))) / openings**0.5
            found += bool((logs.mean(axis=1) > np.maximum(wide, common)).any())
        assert found / 1000 < 0.075, openings

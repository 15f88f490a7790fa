"""The PLASTER scorecard: each letter against the files that it comes of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import layout, plaster, results
from tasks.costs import Cost
from tasks.engines.protocol import BACKENDS
from tasks.files import read_json, write_json
from tasks.params import Tree, load
from tasks.plaster import backends, metrics, scorecard, step_seconds
from tasks.results import Variant
from tasks.stats import Interval

ROOT = Path(__file__).resolve().parents[2]


def by_name(tree: Tree) -> dict[str, Variant]:
    return {v.name: v for v in results.variants(tree)}


def seconds(stage: str) -> float:
    return float(read_json(layout.report(*stage.split("@")))["wall_s"])


def test_steps_of_the_lineage_and_of_the_teachers_count_once(tree: Tree) -> None:
    made = tree.made_by("slim-kd-ort")
    assert made == ("train@base", "prune@slim", "distill@slim-kd", "export@slim-kd-onnx", "build@slim-kd-ort")
    card = scorecard(tree, by_name(tree)["slim-kd-ort"])
    assert card.programmability.steps == 5


def test_a_teacher_apart_from_the_lineage_counts_with_its_own_steps(project_copy: Path) -> None:
    raw = json.loads(layout.PARAMS.read_text())
    raw["train"]["big"] = raw["train"]["base"]
    raw["distill"]["slim-kd"]["teacher"] = "big"
    layout.PARAMS.write_text(json.dumps(raw))
    made = load(layout.PARAMS).made_by("slim-kd-ort")
    assert made[:4] == ("train@base", "prune@slim", "train@big", "distill@slim-kd")


def test_settings_are_those_that_were_given(project_copy: Path) -> None:
    raw = json.loads(layout.PARAMS.read_text())
    raw["train"]["base"] = {"epochs": 4, "batch": 32, "lr": 1e-2, "model": {}}
    raw["export"]["base-onnx"] = {"from": "base"}
    raw["build"]["base-ort"] = {"from": "base-onnx", "backend": "onnxruntime"}
    layout.PARAMS.write_text(json.dumps(raw))
    tree = load(layout.PARAMS)
    variant = Variant("base-ort", tree.lineage("base-ort"), "onnxruntime")
    assert scorecard(tree, variant).programmability.settings == 3 + 1 + 2, "an empty mapping sets nothing"
    raw["quantize"]["base-int8"]["search"] = {"budget": 0.01, "samples": 8}
    raw["build"]["base-int8-ort"] = {"from": "base-int8", "backend": "onnxruntime"}
    layout.PARAMS.write_text(json.dumps(raw))
    tree = load(layout.PARAMS)
    variant = Variant("base-int8-ort", tree.lineage("base-int8-ort"), "onnxruntime")
    given = {**raw["quantize"]["base-int8"]}
    assert scorecard(tree, variant).programmability.settings == 3 + 1 + (len(given) - 1 + 2) + 2


def test_what_can_build_follows_from_the_artifact(tree: Tree) -> None:
    assert backends(tree, "base") == ("eager",)
    assert backends(tree, "base-onnx") == ("onnxruntime", "tensorrt", "tensorrt_rtx")
    assert backends(tree, "base-int8") == ("onnxruntime",), "TensorRT refuses unsigned activations"
    program = tree.nodes["base-onnx"].settings.model_copy(update={"format": "program"})
    changed = replace(tree, nodes={**tree.nodes, "base-onnx": replace(tree.nodes["base-onnx"], settings=program)})
    assert backends(changed, "base-onnx") == ("inductor",)
    found = {*backends(tree, "base"), *backends(tree, "base-onnx"), *backends(changed, "base-onnx")}
    assert found == set(BACKENDS)


@pytest.mark.parametrize("folder", [".", "reviews"])
def test_every_shipped_engine_is_of_a_backend_that_can_build_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / folder)
    tree = load(layout.PARAMS, models=False)
    for name, build in tree.params.build.items():
        assert build.backend in backends(tree, build.parent), name


def test_a_measured_variant_has_its_own_numbers_as_letters(tree: Tree) -> None:
    variant = replace(
        by_name(tree)["base-ort"],
        throughput_at={"32": 9000.0},
        cost=Cost(energy_mj=Interval(4.0, 2.0, 5.0), host_peak_bytes=7, device_peak_bytes=9),
    )
    card = scorecard(tree, variant)
    assert variant.latency_ms and card.latency
    assert (card.latency.p50_ms, card.latency.p99_ms, card.latency.batch) == (
        variant.latency_ms["p50"],
        variant.latency_ms["p99"],
        1,
    )
    assert card.accuracy == variant.accuracy
    assert (card.size.engine_bytes, card.size.memory_bytes) == (variant.size_bytes["engine"], 9)
    assert card.throughput == {"1": variant.throughput_per_s, "32": 9000.0}
    assert card.energy_efficiency.inferences_per_joule == Interval(250.0, 200.0, 500.0)


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        (Cost(energy_reason="no meter"), "no meter"),
        (Cost(energy_mj=Interval(1.0, -0.5, 2.5)), "the interval of its energy isn't above 0"),
    ],
)
def test_without_an_energy_there_is_no_efficiency_and_a_reason(tree: Tree, cost: Cost, reason: str) -> None:
    card = scorecard(tree, replace(by_name(tree)["base-ort"], cost=cost))
    assert (card.energy_efficiency.inferences_per_joule, card.energy_efficiency.reason) == (None, reason)


def test_a_variant_that_was_not_run_has_the_letters_that_need_no_run(tree: Tree) -> None:
    card = scorecard(tree, by_name(tree)["base-rtx"])
    assert (card.latency, card.accuracy, card.throughput) == (None, None, {})
    assert card.size.engine_bytes and card.rate_of_learning.seconds and card.programmability.steps == 3
    assert card.energy_efficiency.reason and "not run here" in card.energy_efficiency.reason


def test_the_rate_of_learning_adds_up_every_step(tree: Tree) -> None:
    learning = scorecard(tree, by_name(tree)["slim-kd-ort"]).rate_of_learning
    assert learning.by_stage == {stage: seconds(stage) for stage in tree.made_by("slim-kd-ort")}
    assert learning.seconds == pytest.approx(sum(map(seconds, tree.made_by("slim-kd-ort"))))
    assert (learning.at_least, learning.reason) == (False, None)


def test_a_step_without_a_time_leaves_none_and_is_named(tree: Tree) -> None:
    path = layout.report("export", "base-onnx")
    write_json(path, {k: v for k, v in read_json(path).items() if k != "wall_s"})
    learning = scorecard(tree, by_name(tree)["base-int8-ort"]).rate_of_learning
    assert learning.seconds is None and learning.reason == "no time is recorded of export@base-onnx"
    assert learning.by_stage["train@base"] == seconds("train@base")
    layout.report("train", "base").unlink()
    learning = scorecard(tree, by_name(tree)["base-int8-ort"]).rate_of_learning
    assert learning.reason == "no time is recorded of train@base, export@base-onnx"


CURVE = [{"epoch": i + 1, "seconds": s} for i, s in enumerate((2.0, 4.0, 1.5, 3.0, 5.0, 0.5))]


@pytest.mark.parametrize(
    ("report", "found"),
    [
        ({"wall_s": 9.0, "curve": CURVE, "seconds": 1.0}, (9.0, False)),
        ({"wall_s": None, "curve": CURVE}, (9.5, True)),
        ({"curve": CURVE[:2]}, (4.0, True)),
        ({"curve": []}, (0.0, True)),
        ({"seconds": 3.0}, (3.0, True)),
        ({"wall_s": float("nan")}, (None, True)),
        ({"wall_s": "9"}, (None, True)),
        ({}, (None, True)),
    ],
    ids=["whole", "went on", "of earlier", "nothing trained", "a build's", "not finite", "no number", "nothing"],
)
def test_seconds_of_a_step_are_whole_or_said_to_be_a_part(report: Any, found: Any) -> None:
    assert step_seconds(report) == found


def test_trainings_of_an_earlier_version_make_a_lower_bound(tree: Tree) -> None:
    path = layout.report("train", "base")
    old = {k: v for k, v in read_json(path).items() if k != "wall_s"}
    write_json(path, old)
    learning = scorecard(tree, by_name(tree)["base-ort"]).rate_of_learning
    assert learning.at_least and learning.by_stage["train@base"] == old["curve"][-1]["seconds"]
    names = metrics(scorecard(tree, by_name(tree)["base-ort"]))
    assert "plaster.rate_of_learning_s" not in names
    assert names["plaster.rate_of_learning_s_at_least"] == learning.seconds


def test_metrics_are_the_letters_numbers(tree: Tree) -> None:
    card = scorecard(tree, replace(by_name(tree)["base-ort"], cost=Cost(energy_mj=Interval(4.0, 2.0, 5.0))))
    found = metrics(card)
    assert [found[f"plaster.energy_inferences_per_joule{end}"] for end in ("", "_low", "_high")] == [
        250.0,
        200.0,
        500.0,
    ]
    assert found["plaster.throughput_per_s_batch_1"] == card.throughput["1"]
    assert "plaster.size_memory_bytes" not in found, "not measured, so not logged"
    bare = metrics(scorecard(tree, Variant("base-ort", (), "onnxruntime")))
    assert set(bare) == {
        "plaster.programmability_steps",
        "plaster.programmability_settings",
        "plaster.programmability_backends",
        "plaster.rate_of_learning_s",
    }


def test_the_documentation_has_every_metric_and_letter(tree: Tree) -> None:
    text = (ROOT / "docs/plaster.md").read_text()
    card = scorecard(
        tree, replace(by_name(tree)["base-ort"], cost=Cost(energy_mj=Interval(4.0, 2.0, 5.0), host_peak_bytes=1))
    )
    for name in (*metrics(card), *plaster.Scorecard.__dataclass_fields__):
        assert f"`{name.replace('batch_1', 'batch_N')}`" in text, name

"""Variants are computed from what was recorded, and records that don't belong together are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import layout, results
from tasks.data import read, write
from tasks.errors import Fault
from tasks.files import read_json, size_bytes, write_json
from tasks.gates import judge
from tasks.params import Tree, load
from tasks.results import Variant
from tasks.settings import GateParams
from tasks.stats import Interval, mean_score, paired_change


def by_name(tree: Tree) -> dict[str, Variant]:
    return {v.name: v for v in results.variants(tree)}


def change(path: Path, **values: Any) -> None:
    write_json(path, {**read_json(path), **values})


def test_every_engine_is_a_variant_in_the_order_of_the_file(tree: Tree) -> None:
    assert tuple(by_name(tree)) == tree.engines


def test_a_variants_numbers_are_those_of_its_records(tree: Tree) -> None:
    variant = by_name(tree)["base-int8-ort"]
    scores, baseline = (read(layout.scores(n))["scores"] for n in ("base-int8-ort", "base-eager"))
    timed = read_json(layout.report("benchmark", "base-int8-ort"))
    assert variant.accuracy == mean_score(scores, 0.95)
    assert variant.accuracy_change == paired_change(scores, baseline, 0.95)
    assert variant.samples == 300
    assert variant.speedup == Interval(**timed["speedup"])
    assert variant.latency_ms == {k: timed["timing"][k] for k in ("p50", "p90", "p99", "n", "batch")}
    assert variant.throughput_per_s == timed["timing"]["throughput_per_s"]
    bounds = {key: Interval(**found) for key, found in timed["timing"]["bounds"].items()}
    assert variant.throughput_bounds["1"] == bounds.pop("throughput_per_s")
    assert variant.latency_bounds_ms == bounds and "p50" in bounds
    assert variant.clock == timed["timing"]["clock"] == "host"
    assert variant.cost.first_inference_s == timed["footprint"]["first_inference_s"]
    assert variant.cost.memory_bytes == timed["footprint"]["host_peak_bytes"]
    assert (variant.lineage, variant.backend) == (("base", "base-onnx", "base-int8", "base-int8-ort"), "onnxruntime")


def test_a_variant_tells_how_its_engine_runs(tree: Tree) -> None:
    built = read_json(layout.report("build", "base-int8-ort"))
    evidence = by_name(tree)["base-int8-ort"].evidence
    assert evidence is not None
    assert evidence.precision_asked == "int8" and evidence.precision_found == built["precision_found"]
    assert evidence.parity == tuple(built["parity"]) and evidence.parity[0]["output"] == "logits"
    assert (evidence.device, evidence.nodes, evidence.kernels) == ("cpu", built["nodes"], built["kernels"])
    not_run = by_name(tree)["base-rtx"].evidence
    assert not_run is not None and (not_run.device, not_run.parity) == ("cuda", ())
    assert by_name(tree)["base-rtx"].cost.on_gpu and not by_name(tree)["base-int8-ort"].cost.on_gpu


def test_what_is_not_as_asked_or_slow_is_a_reason_and_fails_nothing(tree: Tree) -> None:
    change(layout.report("build", "base-ort"), not_as_asked="asked for int8, found none", slow="of another style")
    change(layout.report("build", "base-rtx"), not_as_asked="asked for 2:4 kernels, found none")
    change(layout.report("benchmark", "base-ort"), unstable=None)
    found = by_name(tree)
    assert (found["base-ort"].verdict, found["base-ort"].reasons[-2:]) == (
        "",
        ("asked for int8, found none", "of another style"),
    )
    assert found["base-rtx"].reasons[1:] == ("asked for 2:4 kernels, found none",)


def test_a_record_of_another_version_fails_its_variant_alone(tree: Tree) -> None:
    path = layout.report("build", "base-ort")
    write_json(path, {k: v for k, v in read_json(path).items() if k != "parity"})
    found = by_name(tree)
    assert found["base-ort"].verdict == "failed" and "not usable" in found["base-ort"].reasons[0]
    assert found["slim-kd-ort"].verdict != "failed"


def test_more_keys_in_a_record_do_no_harm(tree: Tree) -> None:
    before = by_name(tree)["base-ort"]
    for step in ("build", "evaluate", "benchmark"):
        change(layout.report(step, "base-ort"), a_key_of_tomorrow=1)
    assert by_name(tree)["base-ort"] == before


ENERGY = {
    "meter": "a meter", "reason": None, "idle_w": 5.0, "power_w": 9.0, "batch": 1, "inferences": 9, "seconds": 4.0,
    "windows": 4, "discarded": {}, "disturbed": None,
    "raw_mj_per_inference": {"value": 3.0, "low": 2.9, "high": 3.1},
    "net_mj_per_inference": {"value": 1.0, "low": 0.9, "high": 1.1},
}  # fmt: skip


def test_the_energy_of_a_record_can_be_gated(tree: Tree) -> None:
    path = layout.report("benchmark", "base-ort")
    change(path, energy=ENERGY, unstable=None)
    found = by_name(tree)
    energy = found["base-ort"].cost.energy_mj
    assert energy.value == 3.0 and (energy.low, energy.high) == pytest.approx((2.9, 3.1), abs=0.005)
    net = found["base-ort"].cost.energy_net_mj
    assert net.value == 1.0 and (net.low, net.high) == pytest.approx((0.9, 1.1), abs=0.005)
    for limit, fails in ((3.2, False), (3.05, True)):
        gates = GateParams.model_validate({"speedup": {"min": 1e-9}, "energy_mj": {"max": limit}})
        judged = judge(found["base-ort"], gates, found["base-eager"])
        assert any("energy_mj 3 mJ [2.9 mJ, 3.1 mJ]" in reason for reason in judged.reasons) is fails


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("energy", {**ENERGY, "raw_mj_per_inference": {"value": 3.0, "low": float("nan"), "high": 3.1}}, "raw_mj"),
        ("footprint", {"load_s": float("inf"), "host_peak_bytes": 1}, "load_s"),
    ],
)
def test_costs_that_are_not_finite_fail_their_variant_alone(tree: Tree, key: str, value: Any, told: str) -> None:
    path = layout.report("benchmark", "base-ort")
    path.write_text(json.dumps({**read_json(path), key: value}))
    found = by_name(tree)
    assert found["base-ort"].verdict == "failed" and told in found["base-ort"].reasons[0]
    assert found["slim-kd-ort"].verdict != "failed"


def test_sizes_are_of_the_nearest_artifact_of_each_kind(tree: Tree, artifact: Any) -> None:
    sizes = by_name(tree)["slim-kd-ort"].size_bytes
    assert sizes == {
        "model": size_bytes(artifact("slim-kd")),
        "onnx": size_bytes(artifact("slim-kd-onnx") / "model.onnx"),
        "engine": size_bytes(artifact("slim-kd-ort") / "engine.onnx"),
    }


def test_what_cannot_run_here_is_not_run(tree: Tree) -> None:
    variant = by_name(tree)["base-rtx"]
    assert variant.verdict == "not_run"
    assert variant.reasons[0].startswith("built, not run here")
    assert (variant.accuracy, variant.speedup) == (None, None)
    assert variant.size_bytes["engine"] > 0


@pytest.mark.parametrize("step", ["build", "evaluate", "benchmark"])
def test_a_missing_record_fails_its_variant_alone(tree: Tree, step: str) -> None:
    layout.report(step, "base-ort").unlink()
    found = by_name(tree)
    assert found["base-ort"].verdict == "failed"
    assert found["base-ort"].reasons == (f"no result of {step}: run `dvc repro {step}@base-ort`",)
    assert found["slim-kd-ort"].verdict != "failed"


def test_a_failed_parent_fails_what_descends_from_it(tree: Tree) -> None:
    write_json(layout.failure("prune@slim"), {"stage": "prune@slim", "reason": "killed by signal 9"})
    found = by_name(tree)
    assert found["slim-kd-ort"].reasons == ("prune@slim failed: killed by signal 9",)
    assert [n for n, v in found.items() if v.verdict == "failed"] == ["slim-kd-ort"]


@pytest.mark.parametrize(
    ("step", "key", "what"),
    [
        ("build", "engine_sha256", "proof"),
        ("evaluate", "engine_sha256", "accuracy"),
        ("benchmark", "engine_sha256", "latency"),
        ("benchmark", "baseline_sha256", "baseline's latency"),
        ("evaluate", "test_sha256", "test data"),
    ],
)
def test_a_record_of_something_else_fails_its_variant(tree: Tree, step: str, key: str, what: str) -> None:
    change(layout.report(step, "base-ort"), **{key: "0" * 64})
    variant = by_name(tree)["base-ort"]
    assert variant.verdict == "failed"
    assert f"the {what} of base-ort was recorded of something else: got 000000000000" in variant.reasons[0]


def test_an_edited_engine_fails_its_variant(tree: Tree) -> None:
    with (layout.artifact("base-ort") / "engine.onnx").open("ab") as stream:
        stream.write(b"\0")
    assert "is not the one its manifest describes" in by_name(tree)["base-ort"].reasons[0]


def test_scores_of_another_number_of_samples_fail_their_variant(tree: Tree) -> None:
    write(layout.scores("base-ort"), {"scores": np.ones(7)})
    assert by_name(tree)["base-ort"].verdict == "failed"


def test_an_unstable_measurement_keeps_its_numbers_and_says_so(tree: Tree) -> None:
    change(layout.report("benchmark", "base-ort"), unstable="the latency did not settle")
    variant = by_name(tree)["base-ort"]
    assert (variant.verdict, variant.reasons) == ("unstable", ("the latency did not settle",))
    assert variant.speedup is not None


def test_an_unstable_further_batch_is_told_and_fails_nothing(tree: Tree) -> None:
    timed = read_json(layout.report("benchmark", "base-ort"))
    also = {key: timed[key] for key in ("timing", "baseline", "speedup", "unstable")}
    others = [
        {**also, **{who: {**timed[who], "batch": batch} for who in ("timing", "baseline")}, "unstable": why}
        for batch, why in ((8, None), (32, "too noisy"))
    ]
    change(layout.report("benchmark", "base-ort"), also=others, unstable=None)
    found = by_name(tree)
    variant = found["base-ort"]
    assert (variant.verdict, variant.reasons) == ("", ("at batch 32: too noisy",))
    assert set(variant.speedup_at) == {"8"}
    assert variant.throughput_at == {"8": timed["timing"]["throughput_per_s"]}
    judged = judge(variant, GateParams.model_validate({"speedup": {"min": 1e-9}}), found["base-eager"])
    assert (judged.verdict, judged.reasons) == ("passed", ("at batch 32: too noisy",))
    change(layout.report("benchmark", "base-ort"), unstable="the first too")
    assert by_name(tree)["base-ort"].reasons == ("the first too", "at batch 32: too noisy")


def test_engines_of_equal_bytes_are_one_variant(project_copy: Path) -> None:
    raw = json.loads(layout.PARAMS.read_text())
    raw["build"]["twin"] = raw["build"]["base-ort"]
    layout.PARAMS.write_text(json.dumps(raw))
    shutil.copytree(layout.artifact("base-ort"), layout.artifact("twin"))
    for step in ("build", "evaluate", "benchmark"):
        shutil.copy(layout.report(step, "base-ort"), layout.report(step, "twin"))
    shutil.copy(layout.scores("base-ort"), layout.scores("twin"))
    found = by_name(load(layout.PARAMS))
    assert "twin" not in found
    assert found["base-ort"].also == ("twin",)
    assert found["base-eager"].also == ()


def test_a_variant_survives_json(tree: Tree, tmp_path: Path) -> None:
    for variant in (*results.variants(tree), replace(by_name(tree)["base-ort"], also=("twin",), reasons=("why",))):
        write_json(tmp_path / "v.json", results.plain(variant))
        assert results.restore(read_json(tmp_path / "v.json")) == variant


def test_a_missing_file_of_an_earlier_step_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="run `dvc repro compare`"):
        results.required(tmp_path / "compare.json", "dvc repro compare")


def twin(of: str, first: bool) -> None:
    """Add an engine of the same bytes as another to the project in the working directory."""
    raw = json.loads(layout.PARAMS.read_text())
    entry = {"twin": raw["build"][of]}
    raw["build"] = {**entry, **raw["build"]} if first else {**raw["build"], **entry}
    layout.PARAMS.write_text(json.dumps(raw))
    shutil.copytree(layout.artifact(of), layout.artifact("twin"))
    for step in ("build", "evaluate", "benchmark"):
        shutil.copy(layout.report(step, of), layout.report(step, "twin"))
    shutil.copy(layout.scores(of), layout.scores("twin"))


def test_a_twin_listed_first_does_not_replace_the_baseline(project_copy: Path) -> None:
    twin("base-eager", first=True)
    found = by_name(load(layout.PARAMS))
    assert found["base-eager"].also == ("twin",) and "twin" not in found


def test_a_stable_twin_is_kept_over_an_unstable_one(project_copy: Path) -> None:
    change(layout.report("benchmark", "slim-kd-ort"), unstable=None)
    twin("slim-kd-ort", first=True)
    change(layout.report("benchmark", "twin"), unstable="too noisy")
    found = by_name(load(layout.PARAMS))
    assert found["slim-kd-ort"].also == ("twin",) and found["slim-kd-ort"].verdict == ""


def test_twins_that_take_other_batches_are_two_variants(project_copy: Path) -> None:
    twin("base-ort", first=False)
    change(layout.artifact("twin") / "manifest.json", max_batch=3)
    assert {"twin", "base-ort"} <= set(by_name(load(layout.PARAMS)))


@pytest.mark.parametrize("changes", [{"settings": {"precision": "tf32"}}, {"device": "cuda"}])
def test_twins_that_run_otherwise_are_two_variants(project_copy: Path, changes: dict[str, Any]) -> None:
    twin("base-ort", first=False)
    change(layout.artifact("twin") / "manifest.json", **changes)
    found = by_name(load(layout.PARAMS))
    assert found["twin"].verdict == found["base-ort"].verdict != "failed"


def test_every_row_names_the_baseline_s_failure(tree: Tree) -> None:
    write_json(layout.failure("build@base-eager"), {"stage": "build@base-eager", "reason": "no memory"})
    assert {v.reasons[:1] for v in by_name(tree).values()} == {("build@base-eager failed: no memory",)}


def test_a_failed_teacher_is_named_by_its_students(tree: Tree) -> None:
    write_json(layout.failure("train@base"), {"stage": "train@base", "reason": "diverged"})
    assert by_name(tree)["slim-kd-ort"].reasons == ("train@base failed: diverged",)


def test_a_failed_teacher_of_a_teacher_is_the_reason(project_copy: Path) -> None:
    raw = json.loads(layout.PARAMS.read_text())
    raw["train"]["first"] = raw["train"]["base"]
    raw["distill"]["second"] = {**raw["distill"]["slim-kd"], "from": "base", "teacher": "first"}
    raw["distill"]["slim-kd"]["teacher"] = "second"
    layout.PARAMS.write_text(json.dumps(raw))
    write_json(layout.failure("train@first"), {"stage": "train@first", "reason": "diverged"})
    found = by_name(load(layout.PARAMS))
    assert found["slim-kd-ort"].reasons == ("train@first failed: diverged",)
    assert found["base-ort"].verdict != "failed"


def test_a_measurement_of_another_target_fails_its_variant(tree: Tree) -> None:
    change(layout.report("benchmark", "base-ort"), target_id="cpu-other")
    found = by_name(tree)["base-ort"]
    assert found.verdict == "failed" and "cpu-other" in found.reasons[0]

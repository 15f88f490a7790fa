"""What a comparison leaves in MLflow, and what a second one adds."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import compare, layout
from tasks.compare import judged_variants
from tasks.data import read, write
from tasks.files import read_json
from tasks.record import git_commit, in_store
from tasks.record_numbers import flat_metrics
from tasks.results import restore

ENGINES = ["wide-eager", "wide-ort", "thin-ort"]
PARENT = "mlflow.parentRunId"


def told(name: str) -> dict[str, Any]:
    return next(v for v in read_json(layout.COMPARISON)["variants"] if v["name"] == name)


def retime(place: Any, name: str) -> None:
    """A variant measured again, with other numbers."""
    path = layout.report("benchmark", name)
    timing = read_json(path)["timing"]
    place.change(path, timing={**timing, "p50": timing["p50"] * 1.01})
    place.compare()


def files(store: Any, run: str, path: str | None = None) -> set[str]:
    return {
        f
        for item in store.list_artifacts(run, path)
        for f in (files(store, run, item.path) if item.is_dir else {item.path})
    }


def test_one_parent_and_one_nested_run_for_each_variant(place: Any) -> None:
    report = place.record()
    assert (report.experiment, report.logged, report.reused) == ("tiny", 3, 0)
    parent = place.store.get_run(report.parent_run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["baseline"] == "wide-eager"
    assert parent.data.tags["target"] == place.here.id
    assert parent.data.tags["winner"] == read_json(layout.COMPARISON)["winner"]
    assert files(place.store, report.parent_run_id) == {"compare.json"}
    nested = place.runs(f"tags.`{PARENT}` = '{report.parent_run_id}'")
    assert {run.info.run_name: run.info.run_id for run in nested} == report.runs
    assert sorted(report.runs) == sorted(ENGINES)
    assert len(place.runs()) == 4


def test_a_run_holds_lineage_numbers_tags_and_files(place: Any) -> None:
    report = place.record()
    run, variant = place.store.get_run(report.runs["thin-ort"]), told("thin-ort")
    assert run.info.status == "FINISHED"
    assert run.data.params["train.thin.epochs"] == "4"
    assert run.data.params["export.thin-onnx.from"] == "thin"
    assert run.data.params["build.thin-ort.backend"] == "onnxruntime"
    assert not [k for k in run.data.params if ".wide" in k]
    tags = run.data.tags
    assert tags["lineage"] == "thin > thin-onnx > thin-ort"
    assert tags["steps"] == "train > export > build"
    assert tags["target"] == place.here.id
    assert tags["verdict"] == variant["verdict"] == "passed"
    assert tags["engine_sha256"] == read_json(layout.artifact("thin-ort") / "manifest.json")["engine_sha256"]
    assert tags["test_sha256"] == read_json(layout.report("evaluate", "thin-ort"))["test_sha256"]
    metrics = run.data.metrics
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["accuracy"] == variant["accuracy"]["value"]
    assert metrics["speedup_low"] == variant["speedup"]["low"]
    assert metrics["latency_ms"] == variant["latency_ms"]["p50"]
    assert metrics["latency_ms_high"] == variant["latency_bounds_ms"]["p50"]["high"]
    assert metrics["throughput_per_s_low"] == variant["throughput_bounds"]["16"]["low"]
    assert metrics["size_bytes_engine"] == variant["size_bytes"]["engine"]
    assert metrics["first_inference_s"] == variant["cost"]["first_inference_s"]
    assert metrics["memory_bytes"] == metrics["host_peak_bytes"] == variant["cost"]["host_peak_bytes"]
    steps = (("train", "thin"), ("export", "thin-onnx"), ("build", "thin-ort"))
    taken = sum(read_json(layout.report(*step))["wall_s"] for step in steps)
    assert metrics["plaster.rate_of_learning_s"] == pytest.approx(taken)
    path = Path(place.store.download_artifacts(run.info.run_id, "accuracy/thin-ort.json"))
    against = {pair["role"]: pair for pair in read_json(path)["versus"]}["baseline"]
    assert metrics["mcnemar_p_baseline"] == against["p_value"] and metrics["lost_baseline"] == against["lost"]
    assert metrics["agreement_baseline"] == against["agreement"]["value"]
    assert metrics["agreement_baseline_low"] == against["agreement"]["low"]
    assert metrics["plaster.latency_p50_ms"] == variant["latency_ms"]["p50"]
    assert (metrics["plaster.programmability_steps"], metrics["plaster.programmability_backends"]) == (3, 3)
    assert {"accuracy_low", "accuracy_change_high", "throughput_per_s"} <= set(metrics)
    built = read_json(layout.report("build", "thin-ort"))
    assert metrics["parity_logits"] == built["parity"][0]["difference"]
    assert (tags["device"], tags["precision_asked"], tags["not_as_asked"]) == ("cpu", "fp32", "no")
    assert tags["precision_found"] == f"{built['precision_found']['fp32']} fp32"
    assert tags["fusion"] == f"{built['nodes']} nodes in {built['kernels']} kernels"
    assert files(place.store, run.info.run_id) == {
        "manifest/manifest.json",
        "manifest/layers.json",
        "accuracy/thin-ort.json",
        *(f"{step}/thin-ort.json" for step in ("build", "evaluate", "benchmark")),
    }


def test_a_run_holds_the_learning_curves_of_its_lineage(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.record.BATCH", 7)
    report = place.record()
    run = report.runs["thin-ort"]
    curve = read_json(layout.report("train", "thin"))["curve"]
    for key in ("loss", "validation"):
        history = sorted(place.store.get_metric_history(run, f"train/thin/{key}"), key=lambda m: m.step)
        assert [(m.step, m.value) for m in history] == [(e["epoch"], e[key]) for e in curve]
    assert len(curve) == 4
    metrics = place.store.get_run(run).data.metrics
    assert metrics["speedup"] and not [name for name in metrics if "/wide/" in name]


def test_ranking_by_accuracy_latency_and_size(place: Any) -> None:
    scores = read(layout.scores("wide-ort"))["scores"]
    write(layout.scores("wide-ort"), {"scores": np.where(np.arange(len(scores)) < 9, 0.0, scores)})
    place.compare()
    place.record()
    orders: dict[str, Any] = {
        "metrics.accuracy DESC": lambda v: -v["accuracy"]["value"],
        "metrics.latency_ms ASC": lambda v: v["latency_ms"]["p50"],
        "metrics.size_bytes_engine ASC": lambda v: v["size_bytes"]["engine"],
    }
    for order, key in orders.items():
        ranked = [run.info.run_name for run in place.runs("tags.variant LIKE '%'", order_by=[order])]
        values = [key(told(name)) for name in ranked]
        assert len(values) == 3 and values == sorted(values) and values[0] < values[-1], order


def test_nothing_is_logged_twice(place: Any) -> None:
    first, second = place.record(), place.record()
    assert (second.logged, second.reused) == (0, 3)
    assert (second.parent_run_id, second.runs) == (first.parent_run_id, first.runs)
    assert len(place.runs()) == 4


def test_only_the_changed_variant_is_logged_again(place: Any) -> None:
    first = place.record()
    retime(place, "thin-ort")
    second = place.record()
    assert (second.logged, second.reused) == (1, 2)
    assert second.parent_run_id != first.parent_run_id
    assert {n for n in ENGINES if second.runs[n] != first.runs[n]} == {"thin-ort"}
    assert [r.info.run_name for r in place.runs(f"tags.`{PARENT}` = '{second.parent_run_id}'")] == ["thin-ort"]
    third = place.record()
    assert (third.logged, third.parent_run_id, third.runs) == (0, second.parent_run_id, second.runs)
    assert len(place.runs()) == 6


def test_another_winner_of_the_same_numbers_is_a_comparison_of_its_own(place: Any) -> None:
    first = place.record()
    place.change(layout.COMPARISON, winner="wide-ort")
    second = place.record()
    assert (second.logged, second.reused) == (0, 3)
    assert second.parent_run_id != first.parent_run_id
    assert place.store.get_run(second.parent_run_id).data.tags["winner"] == "wide-ort"
    assert place.record().parent_run_id == second.parent_run_id
    place.change(layout.COMPARISON, winner="thin-ort")
    assert place.record().parent_run_id == first.parent_run_id


def test_another_judged_interval_is_logged_anew(place: Any) -> None:
    """As when the tree has more engines, though this one's own record is the same."""
    judged = next(v for v in judged_variants(place.tree) if v.name == "thin-ort")
    wider = replace(judged, speedup=replace(judged.speedup, low=judged.speedup.low / 2))
    same, other = (compare._content(place.tree, variant, {}) for variant in (judged, wider))
    assert same == told("thin-ort")["content"] != other


def test_what_a_run_holds_of_other_artifacts_records_is_logged_anew_when_it_changes(place: Any) -> None:
    """A step's seconds are in no engine's record, nor are the predictions that it is held against."""
    first, train = place.record(), layout.report("train", "thin")
    place.change(train, wall_s=read_json(train)["wall_s"] + 100)
    second = place.record()
    assert {n for n in ENGINES if second.runs[n] != first.runs[n]} == {"thin-ort"}
    seconds = [
        place.store.get_run(r.runs["thin-ort"]).data.metrics["plaster.rate_of_learning_s"] for r in (first, second)
    ]
    assert seconds[1] == pytest.approx(seconds[0] + 100)
    stored = read(layout.scores("wide-eager"))
    write(layout.scores("wide-eager"), {**stored, "predictions": stored["predictions"] + 90})
    third = place.record()
    assert {n for n in ENGINES if third.runs[n] != second.runs[n]} == {"wide-ort", "thin-ort"}
    metrics = place.store.get_run(third.runs["wide-ort"]).data.metrics
    assert metrics["agreement_baseline"] == metrics["agreement_baseline_low"] == 0 < metrics["agreement_baseline_high"]
    assert place.record().logged == 0


def test_an_energy_of_a_disturbed_window_is_told(place: Any) -> None:
    raw = read_json(layout.COMPARISON)
    interval = {"value": 3.0, "low": 2.9, "high": 3.1}
    raw["variants"][1]["cost"] |= {"energy_mj": interval, "energy_reason": None, "energy_disturbed": "power limit"}
    raw["variants"][2]["cost"] |= {"energy_mj": interval, "energy_reason": None, "energy_disturbed": None}
    place.change(layout.COMPARISON, **raw)
    runs = place.record().runs
    told = [place.store.get_run(runs[v["name"]]).data.tags["energy"] for v in raw["variants"][1:]]
    assert told == ["measured in a disturbed window: power limit", "measured"]


def test_a_failed_variant_is_a_failed_run_with_the_reason(place: Any) -> None:
    layout.report("evaluate", "wide-ort").unlink()
    place.compare()
    run = place.store.get_run(place.record().runs["wide-ort"])
    assert run.info.status == "FAILED"
    assert run.data.tags["verdict"] == "failed"
    assert "no result of evaluate" in run.data.tags["reasons"]
    assert place.record().logged == 0


def test_numbers_that_are_not_finite_are_not_logged(place: Any) -> None:
    raw = json.loads(json.dumps(told("thin-ort")))
    raw["accuracy"]["low"], raw["throughput_per_s"] = math.nan, math.inf
    flat = flat_metrics(restore(raw))
    assert "accuracy" in flat and "accuracy_low" not in flat and "throughput_per_s" not in flat


def test_a_half_logged_variant_is_logged_again(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    real = MlflowClient.log_artifact

    def full_disk(self: Any, run: str, path: str, folder: str | None = None) -> None:
        if Path(path).name == "wide-ort.json":
            raise OSError("No space left on device")
        real(self, run, path, folder)

    monkeypatch.setattr(MlflowClient, "log_artifact", full_disk)
    with pytest.raises(OSError, match="No space left"):
        place.record()
    assert {r.info.run_name: r.info.status for r in place.runs("tags.variant LIKE '%'")} == {
        "thin-ort": "FINISHED",
        "wide-eager": "FINISHED",
        "wide-ort": "FAILED",
    }
    assert not place.runs("attributes.status = 'RUNNING'")
    monkeypatch.undo()
    monkeypatch.chdir(place.root)
    report = place.record()
    assert (report.logged, report.reused) == (1, 2)
    assert place.store.get_run(report.parent_run_id).info.status == "FINISHED"


@pytest.mark.parametrize("which", ["parent", "thin-ort"])
def test_a_deleted_run_is_missed_and_made_anew(place: Any, which: str) -> None:
    first = place.record()
    assert in_store()
    gone = first.parent_run_id if which == "parent" else first.runs[which]
    place.store.delete_run(gone)
    assert not in_store()
    second = place.record()
    assert gone not in (second.parent_run_id, *second.runs.values())
    assert second.logged == (0 if which == "parent" else 1)
    assert in_store()


def test_runs_of_another_target_are_not_reused(place: Any) -> None:
    from tasks.record import record

    place.record()
    for name in ENGINES:
        place.change(layout.report("benchmark", name), target_id="cpu-other")
    other = record(place.tree, place.workload, replace(place.here, id="cpu-other"))
    assert (other.logged, other.reused) == (3, 0)


def test_the_commit_tells_of_changes_anywhere_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a subfolder whose code is a link, as the second workload's is; lock files don't count."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *words], cwd=tmp_path, check=True)

    places, files = ("", "reviews"), ("tasks/a.py", "dvc.lock", "reviews/dvc.lock", "reviews/params.yaml")
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("1")
    (tmp_path / "reviews/tasks").symlink_to("../tasks")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "start")
    for changed in files:
        (tmp_path / changed).write_text("2")
        for place in places:
            monkeypatch.chdir(tmp_path / place)
            assert str(git_commit()).endswith("+") == (not changed.endswith("dvc.lock")), (changed, place)
        (tmp_path / changed).write_text("1")

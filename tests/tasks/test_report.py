"""The summary and the page."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tasks import layers, layout, report_proof, target
from tasks.compare import WINS, compare
from tasks.files import read_json, sha256, write_json
from tasks.params import Tree, load
from tasks.report import ordered, page, report, row, summarize

KEYS = {
    "name", "lineage", "also", "backend", "accuracy", "accuracy_change", "latency_ms", "throughput_per_s",
    "speedup", "size_bytes", "memory_bytes", "energy_mj", "energy_net_mj", "energy_reason", "energy_disturbed",
    "load_s", "first_inference_s", "host_peak_bytes", "device_peak_bytes", "activation_bytes", "clock",
    "throughput_at", "latency_bounds_ms", "throughput_bounds", "conditions", "plaster", "evidence", "verdict",
    "reasons", "mlflow_run_id", "engine_sha256", "test_sha256",
}  # fmt: skip


PROMOTION = {
    "promoted": "base-ort",
    "variant": "base-ort",
    "model": "tiny",
    "alias": "champion-here",
    "version": 3,
    "reasons": ["first of its target"],
}


@pytest.fixture(scope="module")
def finished(line: Path, workload_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the line with a planted winner, its promotion and the report."""
    folder = tmp_path_factory.mktemp("finished") / "project"
    shutil.copytree(line, folder)
    with contextlib.chdir(folder):
        path = layout.report("benchmark", "base-ort")
        raw = read_json(path)
        raw["timing"]["medians"] = [m / 9 for m in raw["baseline"]["medians"]]
        write_json(path, {**raw, "unstable": None})
        for name in ("slim-kd-ort", "base-int8-ort"):
            path = layout.report("benchmark", name)
            write_json(path, {**read_json(path), "unstable": "planted"})
        tree = load(layout.PARAMS)
        write_json(layout.COMPARISON, compare(tree, layout.DATA))
        write_json(layout.RECORD, {"runs": {"base-ort": "run1"}})
        write_json(layout.PROMOTION, PROMOTION)
        report(tree, workload_path, target.fingerprint(), layout.DATA, layout.LATEST)
    return folder


@pytest.fixture
def summary(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The summary; the working directory is a copy of the finished project."""
    shutil.copytree(finished, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return read_json(layout.SUMMARY)


@pytest.fixture
def tree(summary: dict[str, Any]) -> Tree:
    return load(layout.PARAMS)


def test_a_comparison_of_before_openings_still_makes_a_summary(
    summary: dict[str, Any], tree: Tree, workload_path: Path
) -> None:
    old = {key: value for key, value in read_json(layout.COMPARISON).items() if key not in ("again", "openings")}
    for variant in old["variants"]:
        del variant["latency_bounds_ms"], variant["throughput_bounds"]
    write_json(layout.COMPARISON, old)
    found = summarize(tree, workload_path, target.fingerprint(), layout.DATA)
    assert (found["head_to_head_again"], found["openings"]) == ([], {})
    cells = [row(variant)["latency"] for variant in found["variants"] if variant["latency_ms"]]
    assert cells and not any("bounded" in cell for cell in cells)


def test_the_summary_holds_what_is_documented(summary: dict[str, Any], tree: Tree) -> None:
    assert summary["schema"] == 1
    assert [v["name"] for v in summary["variants"]] == list(tree.engines)
    assert all(set(v) >= KEYS for v in summary["variants"])
    assert {v["verdict"] for v in summary["variants"]} <= {
        "promoted", "passed", "rejected", "unstable", "failed", "not_run",
    }  # fmt: skip
    assert summary["target"] == target.plain(target.fingerprint())
    assert summary["data_sha256"]["test"] == sha256(layout.DATA / "test.npz")
    assert set(summary["data_sha256"]) == {"train", "calibration", "validation", "test"}


def test_a_measured_variant_has_its_numbers(summary: dict[str, Any]) -> None:
    variant = next(v for v in summary["variants"] if v["name"] == "base-ort")
    assert set(variant["accuracy"]) == {"value", "low", "high", "n"}
    assert set(variant["speedup"]) == {"value", "low", "high", "versus"}
    assert variant["speedup"]["versus"] == "base-eager"
    assert set(variant["latency_ms"]) == {"p50", "p90", "p99", "n", "batch"}
    assert variant["mlflow_run_id"] == "run1"
    assert variant["engine_sha256"] == sha256(layout.artifact("base-ort") / "engine.onnx")


def test_a_variant_says_what_it_costs(summary: dict[str, Any]) -> None:
    variant = next(v for v in summary["variants"] if v["name"] == "base-ort")
    timed = read_json(layout.report("benchmark", "base-ort"))
    assert variant["first_inference_s"] == timed["footprint"]["first_inference_s"]
    assert variant["memory_bytes"] == variant["host_peak_bytes"] == timed["footprint"]["host_peak_bytes"]
    assert (variant["energy_net_mj"] is None) == bool(variant["energy_reason"])
    assert set(variant["plaster"]) == {
        "programmability", "latency", "accuracy", "size", "throughput", "energy_efficiency", "rate_of_learning",
    }  # fmt: skip
    taken = [read_json(layout.report(step, name))["wall_s"] for step, name in (
        ("train", "base"), ("export", "base-onnx"), ("build", "base-ort"),
    )]  # fmt: skip
    assert variant["plaster"]["rate_of_learning"]["seconds"] == pytest.approx(sum(taken))


def test_the_page_says_why_there_is_no_energy_or_has_a_column_of_it(summary: dict[str, Any]) -> None:
    for variant in summary["variants"]:
        variant |= {"energy_mj": None, "energy_reason": "no <RAPL> here" if variant["latency_ms"] else "not run"}
    html = page(summary)
    assert "No energy: no &lt;RAPL&gt; here." in html and "<th>energy</th>" not in html
    summary["variants"][0] |= {"energy_mj": {"value": 2.0, "low": 1.9, "high": 2.1}, "energy_reason": None}
    html = page(summary)
    assert "No energy:" not in html and "<th>energy</th>" in html and "2 mJ\n[1.9 mJ, 2.1 mJ]" in html


def test_the_page_has_the_scorecards(summary: dict[str, Any]) -> None:
    html = (layout.LATEST / "index.html").read_text()
    part = html[html.index("<h2>PLASTER</h2>") :]
    assert "3 steps" in part and "onnxruntime, tensorrt, tensorrt_rtx" in part
    for variant in summary["variants"]:
        assert f"<b>{variant['name']}</b></td><td>" in part
        assert f"\\u003cb\\u003e{variant['name']}\\u003c" in part, "a line of the plot"
        del variant["plaster"]
    assert "PLASTER" not in page(summary), "nothing of a summary of an earlier version"


def test_a_variant_says_how_it_runs(summary: dict[str, Any]) -> None:
    evidence = next(v for v in summary["variants"] if v["name"] == "base-int8-ort")["evidence"]
    built = read_json(layout.report("build", "base-int8-ort"))
    assert set(evidence) == {
        "device", "precision_asked", "precision_found", "not_as_asked", "slow", "parity", "nodes", "kernels", "signed",
    }  # fmt: skip
    assert all(evidence[key] == built[key] for key in evidence)
    assert [p["output"] for p in evidence["parity"]] == ["logits"]


def test_the_page_lists_each_engines_layers_and_parity(summary: dict[str, Any]) -> None:
    html = (layout.LATEST / "index.html").read_text()
    part = html[html.index("What each engine runs") :]
    for name in ("base-ort", "base-int8-ort"):
        for layer in layers.read(layout.artifact(name)):
            assert f"<td>{escape(layer.name)}</td><td>{escape(layer.kind)}</td>" in part
    nodes, kernels = (read_json(layout.report("build", "base-ort"))[key] for key in ("nodes", "kernels"))
    assert f"{nodes} nodes in {kernels} kernels" in part
    assert re.search(r"<td>logits</td>.*validation sample \d in a batch of \d", part)
    assert part.count("<details>") == len(summary["variants"]), "each is folded"


def test_what_is_not_as_asked_is_on_the_page(summary: dict[str, Any], tree: Tree) -> None:
    variant = next(v for v in summary["variants"] if v["name"] == "base-int8-ort")
    variant["evidence"] |= {"precision_found": {"fp32": 5, "int8": 1}}
    variant["reasons"] = ["asked for int8, found in 1 of 6 products (5 fp32, 1 int8)"]
    html = page(summary)
    assert "<td>int8: 5 fp32, 1 int8</td>" in html and variant["reasons"][0] in html


@pytest.mark.parametrize(
    ("asked", "found", "words"),
    [
        ("int8", {"int8": 5}, "int8"),
        ("int8", {"int8": 5, "fp32": 1}, "int8: 5 int8, 1 fp32"),
        ("int8", {"fp32": 5}, "int8: 5 fp32"),
        ("fp16", {}, "fp16 (not told)"),
        ("fp16", {"unknown": 3}, "fp16 (not told)"),
        ("as the model", {"fp32": 3}, "fp32"),
    ],
)
def test_precision_asked_and_found_in_a_cell(asked: str, found: dict[str, int], words: str) -> None:
    assert report_proof.precision(asked, found) == words


SEARCH = {
    "sweep": "one",
    "metric": "accuracy",
    "budget": 0.005,
    "validation_samples": 100,
    "models": 7,
    "seconds": 3.0,
    "table": [{"node": "<conv>", "op": "Conv", "snr_db": 12.34, "cosine": 0.98, "kept": True}],
    "path": [{"kept": 1, "metric": 0.912, "loss": 0.003, "within_budget": True}],
    "verdict": "1 of 4 nodes stays in floating point",
}


def test_the_page_shows_the_search_for_mixed_precision(
    summary: dict[str, Any], tree: Tree, workload_path: Path
) -> None:
    path = layout.report("quantize", "base-int8")
    assert not report_proof.searches(tree)
    write_json(path, {**read_json(path), "search": SEARCH})
    report(tree, workload_path, target.fingerprint(), layout.DATA, layout.LATEST)
    html = (layout.LATEST / "index.html").read_text()
    for part in ("<b>base-int8</b>", SEARCH["verdict"], "&lt;conv&gt;", "12.3 dB", "91.20 %", "0.50 points"):
        assert part in html


def test_the_page_and_a_file_tell_accuracy_by_class(summary: dict[str, Any]) -> None:
    html, told = (layout.LATEST / "index.html").read_text(), read_json(layout.LATEST / "accuracy.json")
    part = html[html.index("Accuracy, class by class") : html.index("What each engine runs")]
    assert part.count("<details>") == len(told["variants"]) == len(summary["variants"])
    assert told["variants"][0]["name"] == "base-eager"
    for variant in told["variants"]:
        entry = next(v for v in summary["variants"] if v["name"] == variant["name"])
        changes = [pair["change"] for pair in variant["versus"] if pair["role"].startswith("baseline")]
        assert changes == ([entry["accuracy_change"]] if entry["accuracy"] and variant["name"] != "base-eager" else [])


def test_the_promoted_variant_says_so(summary: dict[str, Any]) -> None:
    verdicts = {v["name"]: v["verdict"] for v in summary["variants"]}
    assert verdicts["base-ort"] == "promoted"
    assert list(verdicts.values()).count("promoted") == 1
    reasons = next(v["reasons"] for v in summary["variants"] if v["name"] == "base-ort")
    assert "first of its target" in reasons
    assert WINS in reasons


def test_a_winner_that_is_not_promoted_is_told_why(summary: dict[str, Any], tree: Tree, workload_path: Path) -> None:
    write_json(layout.PROMOTION, {**PROMOTION, "promoted": None, "version": 2, "reasons": ["not faster than it"]})
    report(tree, workload_path, target.fingerprint(), layout.DATA, layout.LATEST)
    winner = next(v for v in read_json(layout.SUMMARY)["variants"] if v["name"] == "base-ort")
    assert winner["verdict"] == "passed"
    assert winner["reasons"][-2:] == ["the champion stays version 2", "not faster than it"]


def test_the_digest_of_the_params_ignores_how_they_are_written(
    summary: dict[str, Any], tree: Tree, workload_path: Path
) -> None:
    raw = json.loads(layout.PARAMS.read_text())
    raw["train"]["base"]["lr"] = "0.01"
    layout.PARAMS.write_text(json.dumps(dict(reversed(raw.items())), indent=3))
    for lr, same in (("1e-2", True), (0.02, False)):
        raw["train"]["base"]["lr"] = lr
        layout.PARAMS.write_text(json.dumps(raw))
        report(load(layout.PARAMS), workload_path, target.fingerprint(), layout.DATA, layout.LATEST)
        assert (read_json(layout.SUMMARY)["params_sha256"] == summary["params_sha256"]) is same


def test_the_page_shows_every_variant_and_needs_no_network(summary: dict[str, Any]) -> None:
    html = (layout.LATEST / "index.html").read_text()
    for variant in summary["variants"]:
        assert f"<b>{variant['name']}</b>" in html
    assert "Champion: base-ort" in html
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?(?:https?:)?//", html)


def test_without_a_champion_the_page_says_not_to_deploy(summary: dict[str, Any]) -> None:
    none = {**PROMOTION, "version": None, "variant": None, "promoted": None}
    assert "don't deploy" in page({**summary, "champion": none}).replace("&#39;", "'")


def test_a_promotion_that_did_not_run_is_said_so(summary: dict[str, Any]) -> None:
    text = page({**summary, "champion": None})
    assert "Promotion did not run" in text and "don't deploy" not in text.replace("&#39;", "'")


def test_reasons_are_escaped_on_the_page(summary: dict[str, Any]) -> None:
    summary["variants"][0]["reasons"] = ["<script>alert(1)</script>"]
    assert "<script>alert(1)" not in page(summary)


def test_the_table_for_dvc_holds_what_was_measured(summary: dict[str, Any]) -> None:
    with (layout.LATEST / "variants.csv").open() as stream:
        rows = {r["variant"]: r for r in csv.DictReader(stream)}
    measured = {v["name"]: v for v in summary["variants"] if v["speedup"]}
    assert rows.keys() == measured.keys()
    assert float(rows["base-ort"]["accuracy"]) == measured["base-ort"]["accuracy"]["value"]
    assert float(rows["base-ort"]["speedup"]) == measured["base-ort"]["speedup"]["value"]
    assert float(rows["base-ort"]["memory_bytes"]) == measured["base-ort"]["memory_bytes"]
    energy = measured["base-ort"]["energy_mj"]
    assert rows["base-ort"]["energy_mj"] == (str(energy["value"]) if energy else "")


def test_the_learning_curves_for_dvc_are_those_of_the_reports(summary: dict[str, Any]) -> None:
    with (layout.LATEST / "curves.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {r["artifact"] for r in rows} == {"base", "slim", "slim-kd"}
    for step, name in (("train", "base"), ("distill", "slim-kd")):
        curve = read_json(layout.report(step, name))["curve"]
        found = [(int(r["epoch"]), float(r["loss"]), float(r["validation"])) for r in rows if r["artifact"] == name]
        assert found == [(e["epoch"], e["loss"], e["validation"]) for e in curve]


def test_the_promoted_comes_first_and_the_fastest_before_the_slower() -> None:
    def entry(name: str, verdict: str, speed: float | None) -> dict[str, Any]:
        return {"name": name, "verdict": verdict, "speedup": {"value": speed} if speed else None}

    mixed = [
        entry("f", "failed", None),
        entry("slow", "rejected", 0.5),
        entry("fast", "rejected", 2),
        entry("p", "passed", 1.5),
        entry("best", "promoted", 1.2),
    ]
    assert [v["name"] for v in ordered(mixed)] == ["best", "p", "fast", "slow", "f"]


def test_a_row_without_numbers_has_dashes(summary: dict[str, Any]) -> None:
    cells = row(next(v for v in summary["variants"] if v["name"] == "base-rtx"))
    assert (cells["accuracy"], cells["speedup"], cells["latency"]) == ("–", "–", "–")
    assert cells["size"].endswith("KiB")
    assert cells["reason"].startswith("built, not run here")


def test_a_champion_that_does_not_pass_today_is_not_called_promoted(
    summary: dict[str, Any], tree: Tree, workload_path: Path
) -> None:
    write_json(layout.PROMOTION, {**PROMOTION, "promoted": "slim-kd-ort", "version": 7})
    report(tree, workload_path, target.fingerprint(), layout.DATA, layout.LATEST)
    holder = next(v for v in read_json(layout.SUMMARY)["variants"] if v["name"] == "slim-kd-ort")
    assert holder["verdict"] == "unstable"
    assert holder["reasons"][-1] == "it still holds champion-here, version 7"

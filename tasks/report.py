"""The summary of a run: `summary.json`, a page with the Pareto plot, and tables for DVC's plots."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks import (
    accuracy,
    accuracy_table,
    costs,
    curves,
    layout,
    plaster,
    plaster_page,
    plaster_plot,
    report_proof,
    results,
    roofline_table,
)
from tasks.compare import WINS
from tasks.files import atomic_folder, digest_of, read_json, sha256, write_json
from tasks.gates import shown
from tasks.params import Tree
from tasks.record import git_commit
from tasks.report_plot import COLORS, pareto
from tasks.results import Variant
from tasks.stats import Interval
from tasks.target import Target, plain
from tasks.workloads.protocol import load_workload

SCHEMA = 1


@dataclass(frozen=True)
class ReportReport:
    """What was written, and the digest of the summary."""

    variants: int
    summary_sha256: str


def report(tree: Tree, workload: Path, here: Target, data: Path, target: Path) -> ReportReport:
    """Write `summary.json`, `accuracy.json`, `index.html`, `variants.csv` and `curves.csv` into the folder `target`."""
    summary = summarize(tree, workload, here, data)
    with atomic_folder(target) as folder:
        engines = report_proof.engines(tree, ordered(summary["variants"]))
        rooflines = roofline_table.of_tree(tree, [engine["name"] for engine in engines])
        bounds = {one["name"]: one.get("numbers") for one in rooflines}
        summary["variants"] = [{**v, "roofline": bounds.get(v["name"])} for v in summary["variants"]]
        write_json(folder / "summary.json", summary)
        by_class = accuracy.of_tree(tree, [v["name"] for v in ordered(summary["variants"])])
        write_json(folder / "accuracy.json", accuracy.document(tree, by_class))
        accuracies = accuracy_table.section(by_class)
        (folder / "index.html").write_text(page(summary, engines, report_proof.searches(tree), rooflines, accuracies))
        _table(folder / "variants.csv", summary)
        curves.write(folder / "curves.csv", tree)
    return ReportReport(len(summary["variants"]), sha256(target / "summary.json"))


def summarize(tree: Tree, workload: Path, here: Target, data: Path) -> dict[str, Any]:
    """The content of `summary.json`; docs/summary.md describes each key."""
    comparison = results.required(layout.COMPARISON, "dvc repro compare")
    runs = read_json(layout.RECORD)["runs"] if layout.RECORD.is_file() else {}
    promotion = read_json(layout.PROMOTION) if layout.PROMOTION.is_file() else None
    variants = [_with_promotion(results.restore(v), promotion) for v in comparison["variants"]]
    return {
        "schema": SCHEMA,
        "workload": load_workload(workload).NAME,
        "target": plain(here),
        "git_commit": git_commit(),
        "params_sha256": digest_of(tree.params.model_dump(mode="json", by_alias=True)),
        "data_sha256": {file.stem: sha256(file) for file in sorted(data.glob("*.npz"))},
        "baseline": tree.params.baseline,
        "metric": tree.params.evaluate.metric,
        "gates": tree.params.gates.model_dump(exclude_none=True),
        "champion": promotion,
        "head_to_head": comparison["head_to_head"],
        "head_to_head_again": comparison.get("again", []),
        "openings": {
            batch: {**told, "assumed": tree.params.benchmark.reopen_sd}
            for batch, told in comparison.get("openings", {}).items()
        },
        "variants": [_entry(tree, v, runs.get(v.name)) for v in variants],
    }


def _with_promotion(variant: Variant, promotion: dict[str, Any] | None) -> Variant:
    if promotion is None:
        return variant
    if variant.name == promotion["promoted"]:
        if variant.verdict in ("passed", "promoted"):
            return replace(variant, verdict="promoted", reasons=(*promotion["reasons"], *variant.reasons))
        holds = f"it still holds {promotion['alias']}, version {promotion['version']}"
        return replace(variant, reasons=(*variant.reasons, holds))
    if variant.reasons[:1] == (WINS,):
        return replace(
            variant,
            reasons=(*variant.reasons, f"the champion stays version {promotion['version']}", *promotion["reasons"]),
        )
    return variant


def _entry(tree: Tree, variant: Variant, run: str | None) -> dict[str, Any]:
    raw = results.plain(variant)
    accuracy = {**raw["accuracy"], "n": variant.samples} if raw["accuracy"] else None
    gain = {**raw["speedup"], "versus": variant.versus} if raw["speedup"] else None
    gains = {batch: {**value, "versus": variant.versus} for batch, value in raw["speedup_at"].items()}
    kept = (
        "name",
        "lineage",
        "also",
        "backend",
        "accuracy_change",
        "latency_ms",
        "clock",
        "throughput_per_s",
        "throughput_at",
        "latency_bounds_ms",
        "throughput_bounds",
        "size_bytes",
        "evidence",
        "verdict",
        "engine_sha256",
        "test_sha256",
    )
    return {
        **{k: raw[k] for k in kept},
        **costs.plain(raw["cost"]),
        "accuracy": accuracy,
        "speedup": gain,
        "speedup_at": gains,
        "reasons": list(variant.reasons),
        "mlflow_run_id": run,
        **_benchmarked(variant.name),
        "plaster": asdict(plaster.scorecard(tree, variant)) if variant.name in tree.nodes else None,
    }


def _benchmarked(name: str) -> dict[str, Any]:
    """What a call takes on a GPU with its copies, and what the machine was like, as the benchmark recorded them."""
    path = layout.report("benchmark", name)
    found = read_json(path) if path.is_file() else {}
    return {key: found.get(key) for key in ("transfer", "conditions")}


def page(
    summary: dict[str, Any],
    engines: Sequence[dict[str, Any]] = (),
    searches: Sequence[dict[str, Any]] = (),
    rooflines: Sequence[dict[str, Any]] = (),
    accuracies: Sequence[dict[str, Any]] = (),
) -> str:
    """The report as one HTML page that needs no network.

    `engines` and `searches` are as report_proof finds them, `rooflines` and `accuracies` as their tables' `section`.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True)
    variants = ordered(summary["variants"])
    return environment.get_template("report.html.j2").render(
        summary=summary,
        rows=[row(v) for v in variants],
        batches=batches(summary),
        plot=pareto(summary),
        plaster=plaster_plot.section({**summary, "variants": variants}),
        metered=metered(summary),
        unmetered=unmetered(summary),
        reopened=reopened(summary),
        colors=COLORS,
        engines=engines,
        searches=searches,
        rooflines=rooflines,
        accuracies=accuracies,
    )


def ordered(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Variants by verdict, the fastest first within each."""
    rank = list(COLORS)
    return sorted(variants, key=lambda v: (rank.index(v["verdict"]), -(v["speedup"] or {"value": 0})["value"]))


def row(variant: dict[str, Any]) -> dict[str, str]:
    """A variant's cells as text, the same in the terminal and on the page."""
    interval = {
        k: Interval(raw["value"], raw["low"], raw["high"]) if (raw := variant[k]) else None
        for k in ("accuracy", "accuracy_change", "speedup")
    }
    cells = {k: shown(k, i) if i else "–" for k, i in interval.items()}
    return {
        "variant": " = ".join((variant["name"], *variant["also"])),
        "lineage": " → ".join(variant["lineage"]),
        "backend": variant["backend"],
        **cells,
        **report_proof.cells(variant),
        **{f"speedup_{batch}": _times(value) for batch, value in variant["speedup_at"].items()},
        "latency": plaster_page.latency(variant, "p50"),
        "memory": plaster_page.bytes_text(variant.get("memory_bytes")),
        "energy": _energy(variant),
        "size": f"{variant['size_bytes']['engine'] / 1024:,.0f} KiB" if variant["size_bytes"] else "–",
        "verdict": variant["verdict"],
        "reason": "; ".join(variant["reasons"]),
    }


def _energy(variant: dict[str, Any]) -> str:
    """Energy with its interval, and a word if a disturbed window had to be used; a dash without."""
    if not (energy := variant.get("energy_mj")):
        return "–"
    return shown("energy_mj", Interval(**energy)) + (" (disturbed)" if variant.get("energy_disturbed") else "")


def metered(summary: dict[str, Any]) -> bool:
    """Whether the energy of at least one variant is known."""
    return any(variant.get("energy_mj") for variant in summary["variants"])


def unmetered(summary: dict[str, Any]) -> str:
    """Why no variant that was measured has an energy, each reason once; empty if one has, or none was measured."""
    reasons = dict.fromkeys(v.get("energy_reason") for v in summary["variants"] if v["latency_ms"])
    return "" if metered(summary) else "; ".join(reason for reason in reasons if reason)


def reopened(summary: dict[str, Any]) -> str:
    """How far speed-ups scatter over openings, at each batch, and what is assumed; empty if it isn't known."""
    told = [
        f"{o['sd']['value']:.1%} [{o['sd']['low']:.1%}, {o['sd']['high']:.1%}] at batch {batch}"
        if o["sd"]["high"]
        else f"no more than their rounds do ({o['noise']:.1%}) at batch {batch}"
        for batch, o in summary.get("openings", {}).items()
    ]
    if not told:
        return ""
    assumed = next(iter(summary["openings"].values()))["assumed"]
    return (
        f"speed-ups scatter over openings of the engines by {' and '.join(told)} (standard deviation of one "
        f"opening's); their intervals allow for that, by Student's t, and for {assumed:.1%} (reopen_sd) at least"
    )


def _times(raw: dict[str, float]) -> str:
    return shown("speedup", Interval(raw["value"], raw["low"], raw["high"]))


def batches(summary: dict[str, Any]) -> list[str]:
    """Further batch sizes that speed-ups were measured at, as text, in rising order."""
    return sorted({batch for variant in summary["variants"] for batch in variant["speedup_at"]}, key=int)


MEASURED = ("throughput_per_s", "memory_bytes", "first_inference_s")


def _table(path: Path, summary: dict[str, Any]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        further = batches(summary)
        at = [f"speedup_{batch}" for batch in further]
        first = ("variant", "accuracy", "speedup", *at, "latency_ms", "engine_bytes")
        writer.writerow((*first, *MEASURED, "energy_mj", "verdict"))
        for v in summary["variants"]:
            if v["accuracy"] and v["speedup"]:
                writer.writerow(
                    (
                        v["name"],
                        v["accuracy"]["value"],
                        v["speedup"]["value"],
                        *(v["speedup_at"].get(batch, {"value": ""})["value"] for batch in further),
                        v["latency_ms"]["p50"],
                        v["size_bytes"]["engine"],
                        *(v[key] for key in MEASURED),
                        (v["energy_mj"] or {"value": ""})["value"],
                        v["verdict"],
                    )
                )

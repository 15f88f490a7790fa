"""Record a comparison in MLflow: a parent run, and one nested run per variant."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import curves, layout, manifest, results, signing, tracking
from tasks.files import digest_of, read_json, write_json
from tasks.params import Tree
from tasks.record_numbers import Entry, entries, evidence_tags, numbers
from tasks.target import Target
from tasks.workloads.protocol import load_workload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARENT = "mlflow.parentRunId"
BATCH = 1000  # The most that MLflow takes at once.
PROOFS = (manifest.FILE, manifest.LAYERS, signing.FILE)


@dataclass(frozen=True)
class RecordReport:
    """MLflow ids: the experiment, the parent run, and each variant's run."""

    experiment: str
    experiment_id: str
    parent_run_id: str
    runs: dict[str, str]
    logged: int
    reused: int


def record(tree: Tree, workload: Path, here: Target) -> RecordReport:
    """Log every variant of `reports/compare.json`.

    A variant of which all is the same as in a finished run of this target isn't logged
    again: that run is named instead. Runs that died are closed first.
    """
    comparison = results.required(layout.COMPARISON, "dvc repro compare")
    store = tracking.client()
    tracking.close_dead_runs(store)
    name = load_workload(workload).NAME
    experiment = tracking.experiment(store, name)
    found = entries(tree, [results.restore(v) for v in comparison["variants"]])
    for one in found:
        if one.variant.speedup:
            results.require_target(one.name, here)
    earlier = {one.name: _known(store, experiment, one, here) for one in found}
    known = {k: str(run.info.run_id) for k, run in earlier.items() if run}
    winner = comparison["winner"] or "none"
    whole = digest_of([winner, sorted([one.name, one.content] for one in found)])
    if len(known) == len(found) and (last := _parent(store, experiment, whole, here)):
        return RecordReport(name, experiment, last, known, 0, len(known))
    runs: dict[str, str] = {}
    tags = {**_flow_tags(), "target": here.id, "workload": name, "winner": winner, "comparison": whole}
    with _run(store, experiment, f"optimize {datetime.now(UTC):%Y-%m-%d %H:%M:%S}", tags) as parent:
        store.log_param(parent, "baseline", tree.params.baseline)
        store.set_tag(parent, "reused_runs", ", ".join(f"{k}: {v}" for k, v in sorted(known.items()))[:4000] or "none")
        store.log_artifact(parent, str(layout.COMPARISON))
        for one in found:
            runs[one.name] = known.get(one.name) or _log(store, experiment, parent, one, tree, here)
            print(f"recorded {len(runs)}/{len(found)}: {one.name}", flush=True)
    return RecordReport(name, experiment, parent, runs, len(runs) - len(known), len(known))


def in_store(path: Path = layout.RECORD) -> bool:
    """Whether the runs that a record names are in the store, none deleted; closes dead runs on the way."""
    from mlflow.exceptions import MlflowException

    if not path.is_file():
        return False
    store = tracking.client()
    tracking.close_dead_runs(store)
    told = read_json(path)
    try:
        runs = [store.get_run(run) for run in {told["parent_run_id"], *told["runs"].values()}]
    except MlflowException as error:
        if tracking.absent(error):
            return False
        raise
    return all(run.info.lifecycle_stage == "active" for run in runs)


def _known(store: MlflowClient, experiment: str, one: Entry, here: Target) -> Run | None:
    """The latest run that holds all of an entry: `content` is the last that is logged."""
    closed = "attributes.status != 'RUNNING' and attributes.status != 'KILLED'"
    query = f"tags.content = '{one.content}' and tags.target = '{here.id}' and {closed}"
    return _latest(store, experiment, query)


def _parent(store: MlflowClient, experiment: str, whole: str, here: Target) -> str | None:
    """The latest finished parent of a comparison with the same winner and the same variants."""
    query = f"tags.comparison = '{whole}' and tags.target = '{here.id}' and attributes.status = 'FINISHED'"
    found = _latest(store, experiment, query)
    return str(found.info.run_id) if found else None


def _latest(store: MlflowClient, experiment: str, query: str) -> Run | None:
    found = store.search_runs([experiment], query, max_results=1, order_by=["attributes.start_time DESC"])
    return found[0] if found else None


def _log(store: MlflowClient, experiment: str, parent: str, one: Entry, tree: Tree, here: Target) -> str:
    from mlflow.entities import Metric, Param

    variant = one.variant
    tags = {PARENT: parent, "target": here.id, **_tags(one, tree)}
    with _run(store, experiment, one.name, tags, failed=variant.verdict == "failed") as run:
        params = [Param(k, str(v)[:6000]) for k, v in lineage_params(tree, variant.lineage).items()]
        now = int(time.time() * 1e3)
        metrics = [Metric(k, v, now, 0) for k, v in numbers(one).items()]
        for point in curves.points(tree, variant.lineage):
            name = f"{point.step}/{point.artifact}"
            metrics.append(Metric(f"{name}/loss", point.loss, now, point.epoch))
            metrics.append(Metric(f"{name}/validation", point.validation, now, point.epoch))
        store.log_batch(run, params=params)
        for start in range(0, len(metrics), BATCH):
            store.log_batch(run, metrics=metrics[start : start + BATCH])
        for file in (
            *(layout.artifact(one.name) / file for file in PROOFS),
            *(layout.report(s, one.name) for s in ("build", "evaluate", "benchmark")),
        ):
            if file.is_file():
                store.log_artifact(run, str(file), "manifest" if file.name in PROOFS else file.parent.name)
        with tempfile.TemporaryDirectory() as scratch:
            write_json(Path(scratch) / f"{one.name}.json", one.compared)
            store.log_artifact(run, f"{scratch}/{one.name}.json", "accuracy")
        store.set_tag(run, "content", one.content)
    return run


def _tags(one: Entry, tree: Tree) -> dict[str, str]:
    variant, cost = one.variant, one.variant.cost
    disturbed = f"measured in a disturbed window: {cost.energy_disturbed}" if cost.energy_disturbed else "measured"
    return {
        "variant": variant.name,
        "lineage": " > ".join(variant.lineage),
        "steps": " > ".join(tree.nodes[n].step for n in variant.lineage),
        "backend": variant.backend,
        "verdict": variant.verdict,
        "reasons": " ".join(variant.reasons)[:4000],
        "engine_sha256": str(variant.engine_sha256),
        "test_sha256": str(variant.test_sha256),
        "energy": disturbed if cost.energy_mj else f"not known: {cost.energy_reason}",
        **evidence_tags(variant),
    }


def lineage_params(tree: Tree, lineage: tuple[str, ...]) -> dict[str, Any]:
    """Settings of every artifact from the root to a variant, as "step.artifact.key"."""
    flat = {}
    for name in lineage:
        node = tree.nodes[name]
        for key, value in node.settings.model_dump(by_alias=True).items():
            flat[f"{node.step}.{name}.{key}"] = value
    return flat


@contextmanager
def _run(store: MlflowClient, experiment: str, name: str, tags: dict[str, str], failed: bool = False) -> Iterator[str]:
    """An MLflow run that is closed whatever happens: FINISHED, FAILED, or KILLED."""
    run = store.create_run(experiment, run_name=name, tags={**tags, tracking.OWNER: tracking.owner()}).info.run_id
    try:
        yield run
    except Exception:
        store.set_terminated(run, "FAILED")
        raise
    except BaseException:
        store.set_terminated(run, "KILLED")
        raise
    store.set_terminated(run, "FAILED" if failed else "FINISHED")


def _flow_tags() -> dict[str, str]:
    flow = os.environ.get("ENGINESMITH_FLOW_RUN")
    return {"git_commit": git_commit() or "none", **({"prefect_flow_run": flow} if flow else {})}


def git_commit() -> str | None:
    """The checked-out commit, with "+" if tracked files were changed; None outside git, and without it."""
    if not shutil.which("git"):
        return None
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return None
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude,glob)**/dvc.lock"],
        capture_output=True,
        text=True,
    )
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")

"""Promotion to the registry as one transaction, and rollback.

One registered model per workload, one version per promoted engine, the aliases
`champion-<target>` and `previous-<target>`. The champion's alias is moved last.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from tasks import evaluate, gates, layout, manifest, measure, results, tracking
from tasks.compare import judged_variants
from tasks.data import read
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault, Unavailable
from tasks.files import read_json, sha256
from tasks.params import Tree
from tasks.results import Variant
from tasks.stats import Interval, paired_change
from tasks.target import Target
from tasks.workloads.protocol import load_workload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ENGINE_PACKAGES = {"eager": ("torch",), "onnxruntime": ("onnxruntime", "onnx"), "tensorrt_rtx": ("tensorrt-rtx-cu13",)}


@dataclass(frozen=True)
class PromoteReport:
    """The champion after this promotion, and why it is the champion.

    `variant` is the name under which it was promoted; `reasons` holds a sentence for each
    finding. `promoted` is the variant of this tree that holds the alias, or None.
    """

    model: str
    alias: str
    version: str | None
    variant: str | None
    promoted: str | None
    engine_sha256: str | None
    versus_champion: Interval | None
    reasons: tuple[str, ...]


def promote(tree: Tree, workload: Path, data: Path, here: Target) -> PromoteReport:
    """Promote the comparison's winner if it passes every gate and beats the present champion.

    The gates are recomputed from the recorded files. A champion of this target is measured
    again, side by side, on today's data; one that can't run here or fails today's gates
    doesn't defend its place.
    """
    name = load_workload(workload).NAME
    alias = f"champion-{here.id}"
    comparison = results.required(layout.COMPARISON, "dvc repro compare")
    runs = results.required(layout.RECORD, "dvc repro record")["runs"]
    layout.STATE.mkdir(exist_ok=True)
    with FileLock(layout.STATE / "promote.lock"):
        store = tracking.client()
        champion = by_alias(store, name, alias)
        candidate = next((v for v in judged_variants(tree) if v.name == comparison["winner"]), None)
        if candidate is None or candidate.verdict != "passed":
            return _kept(name, alias, champion, None, ("no variant passes every gate",))
        if champion and champion.tags.get("engine_sha256") == candidate.engine_sha256:
            return _kept(
                name,
                alias,
                champion,
                None,
                (f"{candidate.name} is the champion already, version {champion.version}",),
                candidate.name,
            )
        gain, reasons = _challenge(store, tree, workload, data, candidate, champion)
        if champion and gain is not None and not gain.low > 1:
            return _kept(name, alias, champion, gain, reasons)
        version = _register(store, name, candidate, runs[candidate.name], here)
        if champion:
            store.set_registered_model_alias(name, f"previous-{here.id}", champion.version)
        store.set_registered_model_alias(name, alias, version)
        if champion and champion.run_id:
            store.set_tag(champion.run_id, "verdict", "superseded")
        store.set_tag(runs[candidate.name], "verdict", "promoted")
    return PromoteReport(name, alias, version, candidate.name, candidate.name, candidate.engine_sha256, gain, reasons)


def rollback(model: str, target_id: str) -> tuple[str, str]:
    """Swap champion and previous of a target; returns (new champion, new previous) versions.

    Raises Fault if there is no previous version.
    """
    layout.STATE.mkdir(exist_ok=True)
    with FileLock(layout.STATE / "promote.lock"):
        store = tracking.client()
        champion, previous = (by_alias(store, model, f"{kind}-{target_id}") for kind in ("champion", "previous"))
        if champion is None or previous is None:
            lacking = "champion" if champion is None else "previous version"
            raise Fault(
                f"nothing to roll back for {model} on {target_id}",
                got=f"no {lacking}",
                expected="a champion and a previous version",
                do="promote twice first",
            )
        store.set_registered_model_alias(model, f"previous-{target_id}", champion.version)
        store.set_registered_model_alias(model, f"champion-{target_id}", previous.version)
        return str(previous.version), str(champion.version)


def by_alias(store: MlflowClient, model: str, alias: str) -> ModelVersion | None:
    """The model version of an alias, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return store.get_model_version_by_alias(model, alias)
    except MlflowException:
        return None


def _challenge(
    store: MlflowClient, tree: Tree, workload: Path, data: Path, candidate: Variant, champion: ModelVersion | None
) -> tuple[Interval | None, tuple[str, ...]]:
    """The candidate's speed over the champion's, None if the champion can't defend its place."""
    if champion is None:
        return None, (f"{candidate.name} is the first champion of this target",)
    label = f"champion version {champion.version} ({champion.tags.get('variant')})"
    with ExitStack() as stack:
        try:
            defender = stack.enter_context(open_engine(_download(champion)))
        except (Fault, Unavailable, OSError) as error:
            why = error.line if isinstance(error, Fault) else str(error)
            return None, (f"{label} can't be opened here any more: {why}",)
        fault = _fails_today(defender, tree, workload, data)
        if fault:
            return None, (f"{label} fails today's gates: {fault}",)
        challenger = stack.enter_context(open_engine(layout.artifact(candidate.name)))
        samples = read(data / "validation.npz")
        inputs = {spec.name: samples[spec.name] for spec in challenger.inputs}
        timings = measure.interleave({"challenger": challenger, "champion": defender}, inputs, tree.params.benchmark)
    gain = measure.speedup(timings, "challenger", "champion", tree.params.benchmark.confidence)
    return gain, (f"{candidate.name} side by side with {label}: {gates.shown('speedup', gain)} of its speed",)


def _fails_today(defender: Session, tree: Tree, workload: Path, data: Path) -> str | None:
    """Why the champion's accuracy on today's test split fails the gates, or None."""
    task, samples, params = load_workload(workload), read(data / "test.npz"), tree.params
    outputs = evaluate.run(defender, task, samples, params.evaluate.batch)
    scores = task.METRICS[params.evaluate.metric](outputs, samples["label"]).astype(np.float64)
    change = paired_change(scores, read(layout.scores(params.baseline))["scores"], params.evaluate.confidence)
    low = params.gates.accuracy_change.min
    return None if low is None or change.low > low else f"accuracy_change {gates.shown('accuracy_change', change)}"


def _register(store: MlflowClient, name: str, candidate: Variant, run_id: str, here: Target) -> str:
    """Log the engine as a pyfunc model and create a version of it; the alias isn't touched."""
    import mlflow
    from mlflow.exceptions import MlflowException

    folder = layout.artifact(candidate.name)
    described = manifest.read(folder)
    with mlflow.start_run(run_id=run_id):
        info = mlflow.pyfunc.log_model(
            name="engine",
            python_model=str(Path(__file__).with_name("pyfunc.py")),
            artifacts={"engine": str(folder)},
            code_paths=[str(Path(__file__).parent)],
            signature=_signature(described),
            pip_requirements=[
                f"{p}=={here.libraries[p]}"
                for p in ("numpy", *ENGINE_PACKAGES[described.backend])
                if p in here.libraries
            ],
        )
    with suppress(MlflowException):
        store.create_registered_model(name)
    tags = {
        "variant": candidate.name,
        "lineage": " > ".join(candidate.lineage),
        "target": here.id,
        "engine_sha256": described.engine_sha256,
        "manifest_sha256": sha256(folder / manifest.FILE),
        "test_sha256": str(candidate.test_sha256),
    }
    return str(
        store.create_model_version(name, info.model_uri, run_id=run_id, tags=tags, model_id=info.model_id).version
    )


def _signature(described: manifest.Manifest) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(specs: tuple[manifest.TensorSpec, ...]) -> Schema:
        return Schema(
            [TensorSpec(np.dtype(s.dtype), tuple(-1 if d is None else d for d in s.shape), s.name) for s in specs]
        )

    return ModelSignature(schema(described.inputs), schema(described.outputs))


def _download(champion: ModelVersion) -> Path:
    import mlflow

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    local = Path(mlflow.artifacts.download_artifacts(f"models:/{champion.name}/{champion.version}"))
    return next(p.parent for p in sorted((local / "artifacts").rglob(manifest.FILE)))


def _kept(
    name: str,
    alias: str,
    champion: ModelVersion | None,
    gain: Interval | None,
    reasons: tuple[str, ...],
    promoted: str | None = None,
) -> PromoteReport:
    if champion is None:
        return PromoteReport(name, alias, None, None, None, None, gain, reasons)
    tags = champion.tags
    return PromoteReport(
        name, alias, str(champion.version), tags.get("variant"), promoted, tags.get("engine_sha256"), gain, reasons
    )


def champion_holds(path: Path = layout.PROMOTION) -> bool:
    """Whether the alias that a promotion recorded is still in the store."""
    if not path.is_file():
        return False
    told = read_json(path)
    found = by_alias(tracking.client(), told["model"], told["alias"])
    return (str(found.version) if found else None) == told["version"]

"""Promotion to the registry as one transaction, and rollback.

One registered model per workload, one version per promoted engine, the aliases
`champion-<target>` and `previous-<target>`. The champion's alias is moved last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from filelock import FileLock

from tasks import layout, manifest, registry, results, target, tracking
from tasks.challenge import Challenge, challenge
from tasks.compare import judged_variants
from tasks.engines.protocol import open_engine
from tasks.errors import Fault
from tasks.files import read_json
from tasks.monitor import Conditions
from tasks.params import Tree
from tasks.results import Variant
from tasks.stats import Interval
from tasks.target import Target
from tasks.timing import Opening
from tasks.workloads.protocol import load_workload

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ROLLED_BACK = "rolled_back"


@dataclass(frozen=True)
class PromoteReport:
    """The champion after this promotion, and why it is the champion.

    `variant` is the name under which it was promoted; `reasons` holds a sentence for each
    finding. `promoted` is the variant of this tree that holds the alias, or None. `side_by_side` is what the challenge
    rests on: the winner's timings as `timing`, the champion's as `baseline`, in each opening; `conditions` the machine
    meanwhile.
    """

    model: str
    alias: str
    version: str | None
    variant: str | None
    promoted: str | None
    engine_sha256: str | None
    versus_champion: Interval | None
    reasons: tuple[str, ...]
    side_by_side: list[Opening] = field(default_factory=list)
    conditions: Conditions | None = None


def promote(tree: Tree, workload: Path, data: Path, here: Target) -> PromoteReport:
    """Promote the comparison's winner if it passes every gate and beats the present champion.

    The gates are recomputed from the recorded files. A champion of this target is measured
    again, side by side, on today's data; one that can't run here or fails today's gates
    doesn't defend its place. An engine that was rolled back isn't promoted again.
    """
    name = load_workload(workload).NAME
    alias = f"champion-{here.id}"
    winner = results.required(layout.COMPARISON, "dvc repro compare")["winner"]
    runs = results.required(layout.RECORD, "dvc repro record")["runs"]
    with _lock():
        store = tracking.client()
        champion = registry.by_alias(store, name, alias)
        candidate = next((v for v in judged_variants(tree) if v.name == winner), None)
        if candidate:
            results.require_target(candidate.name, here)
        if candidate is None or candidate.verdict != "passed":
            return _kept(tree, name, alias, champion, Challenge(None, (_unfit(winner, candidate),)))
        engine = registry.identity(manifest.read(layout.artifact(candidate.name)))
        if champion and champion.tags.get("identity") == engine and registry.whole(champion):
            _mark(store, runs[candidate.name], "promoted")
            reason = f"{candidate.name} is the champion already, version {champion.version}"
            return _kept(tree, name, alias, champion, Challenge(None, (reason,)))
        earlier = registry.version_of(store, name, here.id, engine)
        if earlier and ROLLED_BACK in earlier.tags:
            reason = f"{candidate.name} is version {earlier.version}, rolled back {earlier.tags[ROLLED_BACK]}"
            reason = f"{reason}; `python -m tasks rollback` brings it back"
            return _kept(tree, name, alias, champion, Challenge(None, (reason,)))
        earlier = earlier if earlier and registry.whole(earlier) else None
        told = challenge(tree, workload, data, candidate, champion)
        if told.lost:
            return _kept(tree, name, alias, champion, told)
        run = runs[candidate.name]
        version = str(earlier.version) if earlier else registry.register(store, name, candidate, run, here)
        _require_unmoved(store, name, alias, champion)
        if champion and champion.tags.get("identity") != engine:  # Else it is the one that lost its files.
            store.set_registered_model_alias(name, f"previous-{here.id}", champion.version)
        store.set_registered_model_alias(name, alias, version)
        if champion:
            _mark(store, champion.run_id, "superseded")
        _mark(store, run, "promoted")
    return PromoteReport(
        name,
        alias,
        version,
        candidate.name,
        candidate.name,
        candidate.engine_sha256,
        told.gain,
        told.reasons,
        told.openings,
        told.conditions,
    )


def rollback(model: str, target_id: str) -> tuple[str, str]:
    """Swap champion and previous of a target; returns (new champion, new previous) versions.

    What was rolled back isn't promoted again until another rollback brings it back. A rollback that was killed halfway
    is finished. Raises Fault if there is no previous version, or it has lost its files, or, on the machine it was
    promoted for, doesn't open any more; nothing is changed then.
    """
    with _lock():
        store = tracking.client()
        champion, previous = (
            registry.by_alias(store, model, f"{kind}-{target_id}") for kind in ("champion", "previous")
        )
        if champion and previous and champion.version == previous.version:
            cut = registry.latest(store, model, target_id, ROLLED_BACK)
            made = _time(datetime.fromtimestamp(champion.creation_timestamp / 1e3, UTC))
            if cut and cut.version != champion.version and cut.tags[ROLLED_BACK] >= made:
                store.set_registered_model_alias(model, f"previous-{target_id}", cut.version)
                return str(champion.version), str(cut.version)
        if champion is None or previous is None or champion.version == previous.version:
            lacking = "champion" if champion is None else "previous version"
            raise Fault(
                f"nothing to roll back for {model} on {target_id}",
                got=f"no {lacking}",
                expected="a champion and a previous version",
                do="promote twice first",
            )
        _require_usable(previous, target_id)
        store.set_model_version_tag(model, champion.version, ROLLED_BACK, _time(datetime.now(UTC)))
        store.delete_model_version_tag(model, previous.version, ROLLED_BACK)
        store.set_registered_model_alias(model, f"champion-{target_id}", previous.version)
        store.set_registered_model_alias(model, f"previous-{target_id}", champion.version)
        _mark(store, champion.run_id, "rolled back")
        _mark(store, previous.run_id, "promoted")
        return str(previous.version), str(champion.version)


def champion_holds(path: Path = layout.PROMOTION) -> bool:
    """Whether the alias that a promotion recorded is still in the store."""
    if not path.is_file():
        return False
    told = read_json(path)
    found = registry.by_alias(tracking.client(), told["model"], told["alias"])
    return (str(found.version) if found else None) == told["version"]


@contextmanager
def _lock() -> Iterator[None]:
    layout.STATE.mkdir(exist_ok=True)
    with FileLock(layout.STATE / "promote.lock"):
        yield


def _require_unmoved(store: MlflowClient, name: str, alias: str, champion: ModelVersion | None) -> None:
    """Raise Fault if another promotion moved the alias meanwhile: the lock holds in one checkout only."""
    now = registry.by_alias(store, name, alias)
    before, after = (v.version if v else None for v in (champion, now))
    if before != after:
        raise Fault(f"{alias} moved meanwhile", got=f"version {after}", expected=f"version {before}", do="run again")


def _time(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S}"


def _require_usable(version: ModelVersion, target_id: str) -> None:
    """Raise Fault or Unavailable if a version's files are gone, or this is its machine and it doesn't open here."""
    with TemporaryDirectory() as scratch:
        folder = registry.download(version, Path(scratch))
        if target.fingerprint().id == target_id:
            with open_engine(folder):
                pass


def _unfit(winner: str | None, candidate: Variant | None) -> str:
    if winner is None:
        return "no variant passes every gate"
    if candidate is None:
        return f"{winner}, the winner in {layout.COMPARISON}, isn't an engine of this tree"
    why = "; ".join(candidate.reasons)
    return f"{winner}, the winner in {layout.COMPARISON}, is {candidate.verdict} by the recorded files: {why}"


def _mark(store: MlflowClient, run_id: str | None, verdict: str) -> None:
    """Tag a run with its verdict; one that was deleted meanwhile has none."""
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        if run_id:
            store.set_tag(run_id, "verdict", verdict)


def _kept(tree: Tree, name: str, alias: str, champion: ModelVersion | None, told: Challenge) -> PromoteReport:
    if champion is None:
        return PromoteReport(name, alias, None, None, None, None, told.gain, told.reasons)
    tags = champion.tags
    promoted = registry.engine_of(tree, champion)
    return PromoteReport(
        name,
        alias,
        str(champion.version),
        tags.get("variant"),
        promoted,
        tags.get("engine_sha256"),
        told.gain,
        told.reasons,
        told.openings,
        told.conditions,
    )

"""What there is to do, found out before anything starts; needs no Prefect."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.dag import Dag
from flows.driver import Driver, sweep
from tasks import layout, params, target, tracking
from tasks.files import read_json, sha256, write_json
from tasks.workloads.protocol import load_workload

STORE_STAGES = ("record", "promote", "report")


@dataclass(frozen=True)
class Plan:
    """The stages, those that are stale with the change in words, and those the MLflow store lacks."""

    dag: Dag
    stale: dict[str, str]
    forced: frozenset[str]

    @property
    def nothing_to_do(self) -> bool:
        return not self.stale and not self.forced

    def driver(self, flow_run: str) -> Driver:
        """A driver for one run of this plan."""
        return Driver(self.dag, console(), set(self.stale), self.forced, flow_run)


def plan() -> Plan:
    """Check params.yaml, refresh the machine's fingerprint, ask DVC what is stale.

    Also closes runs that died in the MLflow store. Raises ParamsFault before anything runs, and Fault if the store
    can't take what would be recorded.
    """
    tree = params.load(layout.PARAMS, models=False)
    target.refresh()
    sweep()
    dag = Dag()
    stale = dag.stale()
    if stale:
        params.load(layout.PARAMS)
        tracking.require_unmoved(load_workload(Path(tree.params.workload)).NAME)
    return Plan(dag, stale, missing_from_store())


def missing_from_store() -> frozenset[str]:
    """The recording stages, if MLflow's store doesn't hold what their files say it does.

    A store that is the project's own file, and untouched since it was last looked at, isn't
    opened again: that alone would take longer than all else that a run without work does.
    """
    if not layout.RECORD.is_file() or (layout.SEEN.is_file() and read_json(layout.SEEN) == _stamp()):
        return frozenset()
    from tasks.promote import champion_holds
    from tasks.record import in_store

    if not in_store():
        return frozenset(STORE_STAGES)
    if layout.PROMOTION.is_file() and not champion_holds():
        return frozenset(STORE_STAGES[1:])
    if stamp := _stamp():
        write_json(layout.SEEN, stamp)
    return frozenset()


def _stamp() -> dict[str, Any] | None:
    """What tells that the embedded store and the records are as they were; None for a server."""
    store = tracking.EMBEDDED
    if tracking.uri() != f"sqlite:///{store.resolve()}" or not store.is_file():
        return None
    status = store.stat()
    records = {str(f): sha256(f) for f in (layout.RECORD, layout.PROMOTION) if f.is_file()}
    return {"store": [status.st_size, status.st_mtime_ns], **records}


def console() -> Console:
    """The terminal, or lines of 160 columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else 160)

"""Runs one stage at a time as Prefect asks for it: skips, restores, runs, records, or says why not."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from flows.child import Children, Stopped
from flows.dag import Dag, Stage
from flows.machine import Machine
from flows.progress import Progress, log_name
from tasks import layout, params
from tasks.errors import Fault, in_words
from tasks.files import write_json
from tasks.target import cores

How = Literal["done", "restored", "up to date", "failed", "skipped"]


@dataclass(frozen=True)
class Ended:
    """How a stage ended, with the reason if it failed or was skipped."""

    stage: str
    how: How
    reason: str | None = None

    @property
    def ok(self) -> bool:
        return self.how not in ("failed", "skipped")


@dataclass
class Driver:
    """The state of one run over a Dag; `stage` may be called from several threads.

    `stale` is what was found at the start; `forced` stages run even if their files are the same.
    """

    dag: Dag
    console: Console
    stale: set[str]
    forced: frozenset[str] = frozenset()
    flow_run: str | None = None
    ended: dict[str, Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.children = Children({"ENGINESMITH_FLOW_RUN": self.flow_run or ""})
        self.progress = Progress(self.console, len(self.dag.stages), self.children)
        self._machine, self._urgency = Machine(cores()), self.dag.chains()
        self._tree = params.load(layout.PARAMS, models=False)
        self._lock = threading.Lock()

    def stage(self, name: str) -> Ended:
        """Bring one stage up to date, after those it needs; never raises for a failing step."""
        try:
            try:
                found = self._stage(self.dag.stages[name])
            except Stopped:
                return Ended(name, "skipped", "the run was stopped")
            except Exception as error:
                reason = in_words(error)
                self._spoil(name, reason)
                found = Ended(name, "failed", reason)
            return self._finish(found)
        finally:
            self._machine.came(name)

    def _stage(self, stage: Stage) -> Ended | tuple[Ended, float]:
        name = stage.name
        if self.children.stopping:
            raise Stopped(name)
        before = [self.ended[n] for n in stage.needs]
        broken = [e for e in before if not e.ok]
        if broken and not stage.fan_in:
            return Ended(name, "skipped", f"{broken[0].stage} {broken[0].how}")
        if not self._has_to_run(stage, before):
            return Ended(name, "up to date")
        if not stage.fan_in and name not in self.forced and self.dag.restore(name):
            return Ended(name, "restored")
        return self._run(stage)

    def failed(self) -> list[Ended]:
        """Stages that failed of themselves, in order."""
        return [self.ended[n] for n in self.dag.stages if n in self.ended and self.ended[n].how == "failed"]

    def _has_to_run(self, stage: Stage, before: list[Ended]) -> bool:
        if stage.name in self.forced or (stage.fan_in and any(not e.ok for e in before)):
            return True
        touched = stage.name in self.stale or any(e.how != "up to date" for e in before)
        return touched and self.dag.changed(stage.name)

    def _run(self, stage: Stage) -> tuple[Ended, float]:
        if stage.fan_in:
            self._require_same_settings()
        with self._machine.hold(stage.alone, threads(stage.name, self._tree), self._urgency[stage.name], stage.name):
            began = self.dag.begin(stage.name)
            outcome = self.children.run(stage.name, stage.command, layout.LOGS / log_name(stage.name), stage.timeout_s)
            self._machine.expect({later: self._urgency[later] for later in self._next(stage.name)})
        reason = outcome.reason
        if reason is None:
            try:
                self.dag.commit(stage.name, began)
                return Ended(stage.name, "done"), outcome.seconds
            except Exception as error:  # A full disk, for one.
                reason = in_words(error)
                with suppress(Exception):
                    self.dag.discard(stage.name)
        self._spoil(stage.name, reason)
        return Ended(stage.name, "failed", reason), outcome.seconds

    def _require_same_settings(self) -> None:
        """Raise Fault if params.yaml has other settings than this run began with: they'd judge what others made."""
        if params.load(layout.PARAMS, models=False).params != self._tree.params:
            raise Fault(
                f"{layout.PARAMS} changed during this run",
                got="other settings",
                expected="those that it began with",
                do="run again: what finished is kept",
            )

    def _next(self, name: str) -> list[str]:
        """Stages for slots that can start once `name` has ended: a free slot is theirs if they are more urgent."""
        later = [s for s in self.dag.stages.values() if name in s.needs and not s.alone]
        with self._lock:
            return [s.name for s in later if all(n == name or n in self.ended for n in s.needs)]

    def _spoil(self, name: str, reason: str) -> None:
        """Remove what a failed stage and those after it left from earlier runs, and note why it failed."""
        for later in (name, *self.dag.after(name)):
            if not self.dag.stages[later].fan_in:
                with suppress(Exception):
                    self.dag.discard(later)
        with suppress(OSError):  # On a full disk what is missing has to do.
            write_json(layout.failure(name), {"stage": name, "reason": reason})

    def _finish(self, result: Ended | tuple[Ended, float]) -> Ended:
        ended, seconds = result if isinstance(result, tuple) else (result, None)
        if ended.ok:
            layout.failure(ended.stage).unlink(missing_ok=True)
        with self._lock:
            self.ended[ended.stage] = ended
        self.progress.ended(ended.stage, ended.how, seconds, ended.reason or "")
        return ended


def threads(stage: str, tree: params.Tree) -> int | None:
    """How many threads a stage's artifact asks for: 1 if it doesn't say, None for as many as turn out the fastest."""
    node = tree.nodes.get(stage.partition("@")[2])
    asked = getattr(node.settings, "threads", 1) if node else 1
    return None if asked == "auto" else int(asked)


LEFT_IN = (layout.DATA, layout.ARTIFACTS, layout.RESULTS, layout.LATEST.parent, layout.STATE)


def sweep(folders: tuple[Path, ...] = LEFT_IN) -> int:
    """Remove scratch files of processes that were killed; returns how many."""
    import shutil

    import psutil

    removed = 0
    for folder in folders:
        for path in folder.rglob(".*.part-*") if folder.is_dir() else ():
            if not psutil.pid_exists(int(path.name.rpartition("-")[2])):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed += 1
    return removed

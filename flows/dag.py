"""The stages of dvc.yaml as a graph, what of it is stale, and the record of what finished."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage.cache import RunCacheNotFoundError

from tasks.errors import Fault


@dataclass(frozen=True)
class Stage:
    """One stage: its command, the stages it needs, and what its `meta` asks for.

    `alone` stages measure and run with nothing beside them; `fan_in` stages run even when a
    stage before them failed.
    """

    name: str
    command: str
    needs: tuple[str, ...]
    timeout_s: float
    alone: bool
    fan_in: bool


class Dag:
    """dvc.yaml of the repository at `root`, through DVC's Python API. Safe for several threads.

    Raises Fault if DVC can't read it, or its lock file.
    """

    def __init__(self, root: Path = Path()) -> None:
        logging.getLogger("dvc").setLevel(logging.WARNING)
        self._repo = Repo(str(root), _wait_for_lock=True)
        self._lock = threading.RLock()
        try:
            graph = self._repo.index.graph
        except DvcException as error:
            raise Fault(
                "DVC can't read this folder's stages",
                got=" ".join(str(error).split())[:300],
                expected="dvc.yaml and dvc.lock as they were written",
                do="if dvc.lock was cut off, or has Git's conflict marks, remove it: what it named is restored",
            ) from None
        self._raw = {s.addressing: s for s in graph}
        self.stages = {name: self._stage(name, graph) for name in self._order(graph)}

    def _order(self, graph: Any) -> list[str]:
        import networkx as nx

        return [s.addressing for s in nx.topological_sort(graph.reverse(copy=False))]

    def _stage(self, name: str, graph: Any) -> Stage:
        raw = self._raw[name]
        meta = raw.meta or {}
        needs = tuple(sorted(s.addressing for s in graph.successors(raw)))
        if not isinstance(raw.cmd, str):
            raise Fault(
                f"stage {name} of dvc.yaml", got=raw.cmd, expected="one command", do="put several into a script"
            )
        return Stage(
            name, raw.cmd, needs, float(meta.get("timeout_s", 3600)), bool(meta.get("alone")), bool(meta.get("fan_in"))
        )

    def stale(self) -> dict[str, str]:
        """Stages whose dependencies, settings or outputs changed, with the change in words."""
        with self._lock:
            status = self._repo.status()
        return {name: _words(changes) for name, changes in status.items()}

    def changed(self, name: str) -> bool:
        """Whether a stage has to run, read anew."""
        with self._lock, self._repo.lock:
            return bool(self._raw[name].changed())

    def restore(self, name: str) -> bool:
        """Bring a stage's outputs back from DVC's run cache, if the same run is there."""
        with self._lock, self._repo.lock:
            stage = self._raw[name]
            try:
                self._repo.stage_cache.restore(stage)
            except RunCacheNotFoundError:
                return False
            self._record(stage)
            return True

    def begin(self, name: str) -> dict[str, str]:
        """Remove a stage's old outputs; returns the digests of its dependencies."""
        with self._lock, self._repo.lock:
            stage = self._raw[name]
            stage.remove_outs(ignore_remove=False)
            for out in stage.outs:
                Path(out.fs_path).parent.mkdir(parents=True, exist_ok=True)
            return self._dependencies(stage)

    def commit(self, name: str, began: dict[str, str]) -> None:
        """Record a finished stage. Fault if an output is missing or a dependency changed while it ran."""
        with self._lock, self._repo.lock:
            stage = self._raw[name]
            missing = [o.def_path for o in stage.outs if not o.exists]
            if missing:
                raise Fault(
                    f"{name} did not write its outputs",
                    got=f"no {', '.join(missing)}",
                    expected="every output of dvc.yaml",
                    do="see its log",
                )
            now = self._dependencies(stage)
            moved = sorted(p for p in now if now[p] != began[p])
            if moved:
                raise Fault(
                    f"{name}: dependencies changed while it ran",
                    got=", ".join(moved),
                    expected="the same from start to end",
                    do="run again",
                )
            self._record(stage)

    def discard(self, name: str) -> None:
        """Remove a stage's outputs from the workspace; what DVC's cache holds stays."""
        with self._lock, self._repo.lock:
            self._raw[name].remove_outs(ignore_remove=True)

    def after(self, name: str) -> list[str]:
        """All stages that need `name`, directly or not, in order."""
        found: set[str] = {name}
        for stage in self.stages.values():
            if found & set(stage.needs):
                found.add(stage.name)
        return [s for s in self.stages if s in found and s != name]

    def chains(self) -> dict[str, float]:
        """The longest chain of time limits from each stage to the fan-in, in seconds: what is urgent."""
        longest: dict[str, float] = {}
        for stage in reversed(self.stages.values()):
            later = [longest[s.name] for s in self.stages.values() if stage.name in s.needs and not s.fan_in]
            longest[stage.name] = stage.timeout_s + max(later, default=0.0)
        return longest

    def close(self) -> None:
        """Close DVC's databases."""
        self._repo.close()

    def _dependencies(self, stage: Any) -> dict[str, str]:
        stage.save_deps()
        return {dep.def_path: str(dep.hash_info) for dep in stage.deps}

    def _record(self, stage: Any) -> None:
        stage.save()
        stage.commit()
        stage.dump(update_pipeline=False)


def _words(changes: list[Any]) -> str:
    parts = []
    for change in changes:
        if isinstance(change, str):
            parts.append(change)
            continue
        for what, entries in change.items():
            parts += [
                f"{path} {state}" if isinstance(state, str) else f"{path}: {', '.join(state)}"
                for path, state in entries.items()
            ] or [what]
    return "; ".join(parts)

"""The MLflow store: where it is, and what dead processes left in it. Shared by record and promote."""

from __future__ import annotations

import os
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tasks.errors import Fault

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("DO_NOT_TRACK", "true")

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

EMBEDDED = Path("mlflow.db")
ARTIFACTS = Path("mlartifacts")
OWNER = "enginesmith.process"
ANSWER_S = 10.0
CLOCK_S = 5.0


def uri() -> str:
    """MLFLOW_TRACKING_URI, or the project's own SQLite file."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{EMBEDDED.resolve()}"


def client() -> MlflowClient:
    """A client of the store, which is created where it is the project's own.

    Raises Fault if the store is a server that doesn't answer.
    """
    import logging

    _require_answer(uri())
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import mlflow

    mlflow.set_tracking_uri(uri())
    return mlflow.MlflowClient()


def absent(error: MlflowException) -> bool:
    """Whether the store says that there is no such thing, rather than that it can't tell."""
    return error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def experiment(store: MlflowClient, name: str) -> str:
    """Id of an experiment, created where missing; a deleted one is restored.

    Raises Fault if the project's own store was made in another folder: its artifacts would go there.
    """
    from mlflow.exceptions import MlflowException

    found = store.get_experiment_by_name(name)
    if found is None:
        location = ARTIFACTS.resolve().as_uri() if uri().startswith("sqlite:") else None
        try:
            return str(store.create_experiment(name, artifact_location=location))
        except MlflowException:
            found = store.get_experiment_by_name(name)
            if found is None:
                raise
    _require_here(found.artifact_location)
    if found.lifecycle_stage == "deleted":
        store.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def require_unmoved(name: str) -> None:
    """Raise Fault if the project's own store keeps an experiment's artifacts in another folder.

    Reads the file without MLflow, whose import takes longer than all else that is done before a run.
    """
    if not EMBEDDED.is_file():
        return
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{EMBEDDED}?mode=ro", uri=True)) as store:
        query = "SELECT artifact_location FROM experiments WHERE name = ?"
        for (location,) in store.execute(query, (name,)).fetchall():
            _require_here(location)


def _require_here(location: str) -> None:
    here = (Path.cwd() / ARTIFACTS).as_uri()
    if uri() == f"sqlite:///{EMBEDDED.resolve()}" and location not in (here, ARTIFACTS.resolve().as_uri()):
        raise Fault(
            "this folder was moved or copied: its MLflow store keeps artifacts elsewhere",
            got=location,
            expected=here,
            do=f"move it back, or remove {EMBEDDED} to begin a store here; the next run records and promotes anew",
        )


def close_dead_runs(store: MlflowClient) -> int:
    """Close runs of this host whose process is gone as KILLED; returns how many."""
    closed = 0
    for found in store.search_experiments():
        for run in store.search_runs([found.experiment_id], "attributes.status = 'RUNNING'"):
            if _dead(run.data.tags.get(OWNER, "")):
                store.set_terminated(run.info.run_id, "KILLED")
                closed += 1
    return closed


def owner() -> str:
    """This process, as a tag on runs it has open: host, process id, and when it started."""
    return f"{os.uname().nodename}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def _dead(tag: str) -> bool:
    """Whether a run's owner was a process of this host that is gone, even if its id is in use again."""
    host, _, process = tag.partition(":")
    pid, _, started = process.partition(":")
    if host != os.uname().nodename or not pid.isdecimal():
        return False
    try:
        found = psutil.Process(int(pid))
        same = not started or abs(found.create_time() - float(started)) <= CLOCK_S
        return found.status() == psutil.STATUS_ZOMBIE or not same
    except psutil.NoSuchProcess:
        return True


def _require_answer(place: str) -> None:
    """MLflow's own client retries for minutes; ask once instead."""
    if not place.startswith(("http:", "https:")):
        return
    try:
        urllib.request.urlopen(f"{place.rstrip('/')}/health", timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise Fault(
            "no MLflow server answers",
            got=f"{place}: {getattr(error, 'reason', error)}",
            expected="the server that MLFLOW_TRACKING_URI names",
            do="start it, or unset MLFLOW_TRACKING_URI to use the project's own store",
        ) from None

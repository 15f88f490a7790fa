"""The MLflow store: where it is, and what dead processes left in it. Shared by record and promote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")

if TYPE_CHECKING:
    from mlflow import MlflowClient

EMBEDDED = Path("mlflow.db")
ARTIFACTS = Path("mlartifacts")
OWNER = "enginesmith.process"


def uri() -> str:
    """MLFLOW_TRACKING_URI, or the project's own SQLite file."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{EMBEDDED.resolve()}"


def client() -> MlflowClient:
    """A client of the store, which is created where it is the project's own."""
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    import mlflow

    mlflow.set_tracking_uri(uri())
    return mlflow.MlflowClient()


def experiment(store: MlflowClient, name: str) -> str:
    """Id of an experiment, created where missing; a deleted one is restored."""
    from mlflow.exceptions import MlflowException

    found = store.get_experiment_by_name(name)
    if found is None:
        location = ARTIFACTS.resolve().as_uri() if uri().startswith("sqlite:") else None
        try:
            return str(store.create_experiment(name, artifact_location=location))
        except MlflowException:
            found = store.get_experiment_by_name(name)
            assert found is not None
    if found.lifecycle_stage == "deleted":
        store.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def close_dead_runs(store: MlflowClient) -> int:
    """Close runs of this host whose process is gone as KILLED; returns how many."""
    import psutil

    closed = 0
    for found in store.search_experiments():
        for run in store.search_runs([found.experiment_id], "attributes.status = 'RUNNING'"):
            host, _, pid = run.data.tags.get(OWNER, "").rpartition(":")
            if host == os.uname().nodename and not psutil.pid_exists(int(pid)):
                store.set_terminated(run.info.run_id, "KILLED")
                closed += 1
    return closed


def owner() -> str:
    """This process, as a tag on runs it has open."""
    return f"{os.uname().nodename}:{os.getpid()}"

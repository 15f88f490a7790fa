"""Where the store is, and what becomes of runs whose process died."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks import layout, tracking
from tasks.errors import Fault

PARENT = "mlflow.parentRunId"


def statuses(place: Any) -> list[str]:
    return sorted(run.info.status for run in place.runs())


def test_the_store_is_the_projects_own(place: Any) -> None:
    assert tracking.uri() == f"sqlite:///{place.root / 'mlflow.db'}"
    where = place.store.get_experiment(tracking.experiment(place.store, "tiny")).artifact_location
    assert where == (place.root / "mlartifacts").as_uri()
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{place.root / 'other.db'}"
    assert tracking.uri().endswith("other.db")


def test_a_server_that_does_not_answer_is_told_at_once(place: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    os.environ["MLFLOW_TRACKING_URI"] = url
    start = time.monotonic()
    with pytest.raises(Fault, match="no MLflow server answers") as caught:
        place.record()
    assert url in str(caught.value)
    assert time.monotonic() - start < 5


def test_a_deleted_experiment_is_restored(place: Any) -> None:
    first = place.record()
    place.store.delete_experiment(first.experiment_id)
    assert tracking.experiment(place.store, "tiny") == first.experiment_id
    assert place.store.get_experiment(first.experiment_id).lifecycle_stage == "active"


def test_a_killed_record_is_closed_at_the_next_start_and_made_up_for(place: Any, command: Any) -> None:
    tracking.experiment(place.store, "tiny")
    os.environ.pop("MLFLOW_TRACKING_URI")
    child = subprocess.Popen(
        [sys.executable, "-m", "tasks", "record"], env={**os.environ, "PYTHONPATH": str(place.root)}
    )
    try:
        _wait_for_runs(place.root / "mlflow.db", 2, child)
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert "RUNNING" in statuses(place)
    assert not layout.RECORD.exists()
    report = place.record()
    left = statuses(place)
    assert "RUNNING" not in left and "KILLED" in left
    assert place.store.get_run(report.parent_run_id).info.status == "FINISHED"
    assert all(place.store.get_run(run).info.status == "FINISHED" for run in report.runs.values())
    assert tracking.close_dead_runs(place.store) == 0


def _wait_for_runs(database: Path, count: int, child: subprocess.Popen[bytes]) -> None:
    """Until the child has a parent run and one more open."""
    end = time.monotonic() + 60
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        while time.monotonic() < end:
            assert child.poll() is None, "it ended before it could be killed"
            if store.execute("SELECT COUNT(*) FROM runs").fetchone()[0] >= count:
                return
            time.sleep(0.002)
    pytest.fail("no run was opened")


def test_open_runs_of_the_living_and_of_other_hosts_stay_open(place: Any) -> None:
    experiment = tracking.experiment(place.store, "tiny")
    host, pid, started = tracking.owner().split(":")
    owners = {
        "mine": f"{host}:{pid}:{started}",
        "elsewhere": f"other-{host}:{pid}:1",
        "someone's": "",
        "my id, long ago": f"{host}:{pid}:1",
    }
    runs = {
        name: place.store.create_run(experiment, tags={tracking.OWNER: owner} if owner else {}).info.run_id
        for name, owner in owners.items()
    }
    assert tracking.close_dead_runs(place.store) == 1
    left = {name: place.store.get_run(run).info.status for name, run in runs.items()}
    assert left.pop("my id, long ago") == "KILLED"
    assert set(left.values()) == {"RUNNING"}


def test_a_dead_process_that_nobody_waited_for_is_dead(place: Any) -> None:
    experiment = tracking.experiment(place.store, "tiny")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = psutil.Process(child.pid).create_time()
        tag = f"{os.uname().nodename}:{child.pid}:{started:.0f}"
        run = place.store.create_run(experiment, tags={tracking.OWNER: tag}).info.run_id
        assert tracking.close_dead_runs(place.store) == 0
        os.kill(child.pid, signal.SIGKILL)
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)
        assert tracking.close_dead_runs(place.store) == 1
        assert place.store.get_run(run).info.status == "KILLED"
    finally:
        child.kill()
        child.communicate()


def test_a_store_of_another_folder_is_refused(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.record()
    other = tmp_path / "moved"
    place.root.rename(other)
    monkeypatch.chdir(other)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    with pytest.raises(Fault, match="was moved or copied") as caught:
        tracking.experiment(tracking.client(), "tiny")
    assert place.root.as_uri() in str(caught.value)
    with pytest.raises(Fault, match="was moved or copied"):
        tracking.require_unmoved("tiny")
    assert not place.root.exists()


def test_an_experiment_of_a_users_own_may_be_anywhere(place: Any, tmp_path: Path) -> None:
    place.record()
    place.store.create_experiment("mine", artifact_location=(tmp_path / "mine").as_uri())
    tracking.require_unmoved("tiny")
    with pytest.raises(Fault, match="was moved or copied"):
        tracking.require_unmoved("mine")


def test_artifacts_may_lie_on_another_disk(place: Any, tmp_path: Path) -> None:
    place.record()
    shutil.move("mlartifacts", tmp_path / "disk")
    Path("mlartifacts").symlink_to(tmp_path / "disk")
    tracking.require_unmoved("tiny")
    assert tracking.experiment(place.store, "tiny")

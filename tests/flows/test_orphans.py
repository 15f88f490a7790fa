from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.orphans import end_orphans


def test_only_temporary_servers_of_this_project_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))

    def sleeper(**more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], env={**os.environ, **more})

    mine = sleeper(PREFECT__SERVER_EPHEMERAL="1")
    others = [sleeper(), sleeper(PREFECT__SERVER_EPHEMERAL="1", PREFECT_HOME=str(tmp_path / "other"))]
    try:
        assert end_orphans() == 1
        assert mine.poll() is not None
        assert [p.poll() for p in others] == [None, None]
    finally:
        for process in (mine, *others):
            process.kill()


def test_the_server_of_a_run_that_lives_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect starts its server as a child of the run's own interpreter."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    environment = {**os.environ, "PREFECT__SERVER_EPHEMERAL": "1"}
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    try:
        assert end_orphans() == 0
        assert server.poll() is None
    finally:
        server.kill()


def test_the_server_of_a_run_that_was_killed_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    sleeps = "import time; time.sleep(600)"
    starts = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {sleeps!r}], stdout=subprocess.DEVNULL).pid)
"""
    environment = {**os.environ, "PREFECT__SERVER_EPHEMERAL": "1"}
    told = subprocess.run(
        [sys.executable, "-c", starts], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    server = psutil.Process(int(told.stdout))
    try:
        assert end_orphans() == 1
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(psutil.Error):
            server.kill()

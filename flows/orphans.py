"""Temporary Prefect servers that outlived a killed run."""

from __future__ import annotations

import os

import psutil


def end_orphans() -> int:
    """End temporary Prefect servers of this project; returns how many.

    Call it with the run lock held and before Prefect starts. A server whose run lives is left: the lock is let go
    between a run's plan and its start.
    """
    home, ended = os.environ["PREFECT_HOME"], 0
    for process in psutil.process_iter(["uids"]):
        try:
            if process.info["uids"].real != os.getuid():
                continue
            environment = process.environ()
            ours = environment.get("PREFECT__SERVER_EPHEMERAL") == "1" and environment.get("PREFECT_HOME") == home
            if ours and not _has_run(process):
                process.terminate()
                process.wait(10)
                ended += 1
        except (psutil.Error, OSError):
            continue
    return ended


def _has_run(server: psutil.Process) -> bool:
    """Whether the process that started a server lives: its parent is a Python of the same file, and not the first."""
    try:
        parent = server.parent()
        return parent is not None and parent.pid != 1 and parent.exe() == server.exe()
    except psutil.Error:
        return False

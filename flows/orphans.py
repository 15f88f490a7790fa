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
            parent = process.parent()
            if ours and not (parent and parent.exe() == process.exe()):
                process.terminate()
                process.wait(10)
                ended += 1
        except (psutil.Error, OSError):
            continue
    return ended

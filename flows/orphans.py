"""Temporary Prefect servers that outlived a killed run."""

from __future__ import annotations

import os

import psutil


def end_orphans() -> int:
    """End temporary Prefect servers of this project; returns how many.

    Call it with the run lock held and before Prefect starts: any server found then belongs to
    a run that was killed.
    """
    home, ended = os.environ["PREFECT_HOME"], 0
    for process in psutil.process_iter(["uids"]):
        try:
            if process.info["uids"].real != os.getuid():
                continue
            environment = process.environ()
            if environment.get("PREFECT__SERVER_EPHEMERAL") == "1" and environment.get("PREFECT_HOME") == home:
                process.terminate()
                process.wait(10)
                ended += 1
        except (psutil.Error, OSError):
            continue
    return ended

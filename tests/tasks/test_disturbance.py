"""What other work took, on processes that do take it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks import disturbance
from tasks.disturbance import SCHEDULER, Host


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.skipif(not SCHEDULER.is_file(), reason="the scheduler tells no waiting times here")
def test_a_process_that_shares_our_core_is_noticed() -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    rival = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    )
    try:
        os.sched_setaffinity(0, {core})
        time.sleep(0.3)
        host = Host(0.1)
        compute(0.2)
        assert host() == disturbance.TOOK
    finally:
        os.sched_setaffinity(0, cores)
        rival.kill()
        rival.wait()


@pytest.mark.skipif(not SCHEDULER.is_file(), reason="the scheduler tells no waiting times here")
def test_by_the_devices_clock_other_threads_may_wait_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(disturbance, "_waited_s", lambda threads: float(seen.append(threads) or 0))
    Host(0.1)()
    Host(0.1, own=True)()
    assert seen == ["*", "*", *[str(threading.get_native_id())] * 2]
    assert Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").is_file()


def test_nothing_is_told_where_everything_is_allowed() -> None:
    host = Host(1e6)
    compute(0.02)
    assert host() is None


def test_waiting_without_computing_is_no_disturbance() -> None:
    host = Host(0.5)
    time.sleep(0.05)
    assert host() is None


def test_switches_count_where_the_scheduler_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance, "SCHEDULER", SCHEDULER.with_name("nothing-of-this-name"))
    before = disturbance._waited_s("*")
    compute(0.02)
    assert disturbance._waited_s("*") >= before >= 0

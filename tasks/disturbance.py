"""What may disturb a window of a measurement: other processes on its cores, and engines that go on computing."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from pathlib import Path

TOOK = "other processes took its cores"
STOLE = "the hypervisor took its cores"
SPUN = "an engine went on computing after its call"
SCHEDULER = Path("/proc/self/schedstat")
SLICE_S = 0.003
SETTLE_STEP_S = 0.002
SETTLE_LIMIT_S = 0.25
SPINNING = 0.1


class Host:
    """Tells, when called, what other work took of this process's time since the call before; None if it was little.

    `max_lost` is the share of that time. The time that threads wanted a core and had none is read from the
    scheduler (Linux, /proc/PID/task/*/schedstat); elsewhere each involuntary context switch (getrusage(2)) counts as
    3 ms, a usual time slice. Steal time is all cores' (Linux, proc_stat(5)), in steps of 10 ms. With `own`, only the
    calling thread's time counts: it launches what a GPU computes, and other threads don't hold that up.
    """

    def __init__(self, max_lost: float, own: bool = False) -> None:
        self.max_lost = max_lost
        self._threads = str(threading.get_native_id()) if own else "*"
        self._then = self._read()

    def __call__(self) -> str | None:
        then, self._then = self._then, self._read()
        elapsed, waited, stolen = (after - before for after, before in zip(self._then, then, strict=True))
        if waited > self.max_lost * elapsed:
            return TOOK
        return STOLE if stolen > self.max_lost * elapsed else None

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), _waited_s(self._threads), _stolen_s()


def settle() -> str | None:
    """Wait until this process computes no more, as threads that spin after a call do for a while.

    Returns what to say of one that still does after 0.25 s, else None. Costs 2 ms where nothing spins.
    """
    end = time.perf_counter() + SETTLE_LIMIT_S
    while True:
        start, used = time.perf_counter(), time.process_time()
        time.sleep(SETTLE_STEP_S)
        now = time.perf_counter()
        if time.process_time() - used < SPINNING * (now - start):
            return None
        if now > end:
            return SPUN


def load_average() -> float:
    """Processes that want a core, averaged over the last minute."""
    return os.getloadavg()[0]


def governor() -> str | None:
    """The CPU's frequency governor, None where the system doesn't say."""
    file = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return file.read_text().strip() if file.is_file() else None


def _waited_s(threads: str) -> float:
    """Seconds that these of this process's threads have waited for a core so far; those of one that ended are gone."""
    if not SCHEDULER.is_file():
        who = resource.RUSAGE_SELF if threads == "*" else getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
        return resource.getrusage(who).ru_nivcsw * SLICE_S
    waited = 0
    for file in Path("/proc/self/task").glob(f"{threads}/schedstat"):
        with contextlib.suppress(OSError):  # The thread ended meanwhile.
            waited += int(file.read_text().split()[1])  # The nanoseconds on a run queue, second of three numbers.
    return waited / 1e9


def _stolen_s() -> float:
    """Seconds that the hypervisor has kept from this machine's cores so far."""
    try:
        with open("/proc/stat") as stream:
            return int(stream.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0

"""What Linux says of its CPUs: governor, frequency, load, time stolen, throttling. Nothing is ever set.

What the system doesn't tell is None, with the reason in `missing`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Cpu:
    """One reading.

    `mhz` is the mean frequency of the cores that this process may run on. `ticks` and `stolen_ticks` count all cores'
    time, and what the hypervisor kept of it, since boot (proc_stat(5)); `switches` are this process's involuntary
    context switches; `throttled` counts how often a core or its package was slowed by heat since boot.
    """

    governor: str | None
    mhz: float | None
    load_average: float
    ticks: int | None
    stolen_ticks: int | None
    switches: int
    throttled: int | None
    missing: dict[str, str] = field(default_factory=dict)


def read(cpus: Path = CPUS, stat: Path = STAT) -> Cpu:
    """A reading of this machine; `cpus` and `stat` are the folder and the file that Linux tells it in."""
    missing: dict[str, str] = {}
    folders = [cpus / f"cpu{i}" for i in _own()]
    governor = _first(folder / "cpufreq/scaling_governor" for folder in folders)
    speeds = [int(text) for folder in folders if (text := _text(folder / "cpufreq/scaling_cur_freq"))]
    if governor is None:
        missing["governor"] = "the system has no cpufreq, as is usual in virtual machines"
    if not speeds:
        missing["mhz"] = "the system has no cpufreq, as is usual in virtual machines"
    counts = [
        int(text)
        for folder in folders
        for kind in ("core", "package")
        if (text := _text(folder / f"thermal_throttle/{kind}_throttle_count"))
    ]
    if not counts:
        missing["throttled"] = "the system has no thermal_throttle counters"
    line = _text(stat)
    ticks, stolen = times(line) if line else (None, None)
    if ticks is None:
        missing["ticks"] = missing["stolen_ticks"] = f"no {stat}"
    return Cpu(
        governor=governor,
        mhz=sum(speeds) / len(speeds) / 1e3 if speeds else None,
        load_average=os.getloadavg()[0],
        ticks=ticks,
        stolen_ticks=stolen,
        switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
        throttled=sum(counts) if counts else None,
        missing=missing,
    )


def times(stat: str) -> tuple[int | None, int | None]:
    """All cores' time and the stolen part of it, in ticks, of the text of /proc/stat; None where it doesn't say.

    Guests' time, the last two numbers, is counted in the first two already.
    """
    words = stat.split("\n", 1)[0].split()
    if not words or words[0] != "cpu" or not all(word.isdigit() for word in words[1:]):
        return None, None
    numbers = [int(word) for word in words[1:9]]
    return sum(numbers), numbers[7] if len(numbers) > 7 else None


def _own() -> Iterable[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _first(files: Iterable[Path]) -> str | None:
    return next((text for file in files if (text := _text(file))), None)

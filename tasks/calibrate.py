"""Proof that the measurement measures: the same engine twice, planted differences, and others' timers beside it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks import beside, manifest
from tasks.bench import Environment, environment
from tasks.disturbance import Host, load_average
from tasks.monitor import Monitor
from tasks.openings import Openings
from tasks.planted import Early, spins, tiny_engine
from tasks.record import git_commit
from tasks.settings import BenchmarkParams
from tasks.timing import timed_call
from tasks.trials import Tally, Tell, Trials, make_bed

DIFFERENCES = (0.02, 0.05, 0.10)
EARLY_MS = 5.0
# The rounds are those of a benchmark by default; windows are shorter, so that many trials fit in.
SAME = BenchmarkParams(window_ms=5, warmup_ms=10)
PLANTED = BenchmarkParams(window_ms=20, warmup_ms=20)
SAME_SHARE, POWER_SHARE, BESIDE_SHARE = 0.5, 0.37, 0.08
TOLD = ("torch", "onnxruntime", "tensorrt", "tensorrt_rtx")


@dataclass(frozen=True)
class EarlyReport:
    """A runner that returns early: the milliseconds it takes, those timed, and those until it returned."""

    true_ms: float
    timed_ms: float
    returned_ms: float


@dataclass(frozen=True)
class Calibration:
    """What was found; a part that wasn't reached is missing.

    `reopened` says that each trial opened the engine anew, so that what differs between two openings of it, such as
    where its memory lies, counts as chance. `openings` is how much that is. `clock` is the one that the same engine
    was timed by; `planted_clock` that of what is planted: the same, or the host's where PyTorch reaches no GPU.
    `same` and `alone` are of the same trials: as a benchmark judges, and by their rounds alone. `libraries` are the
    versions of those that were imported.
    """

    engine: str
    backend: str
    engine_sha256: str
    commit: str | None
    libraries: dict[str, str]
    clock: str
    planted_clock: str
    reopened: bool
    openings: Openings | None
    early: EarlyReport | None
    beside: list[beside.Beside]
    same: Tally | None
    alone: Tally | None
    power: list[Tally]
    interrupted: bool
    seconds: float
    environment: Environment


def calibrate(
    trials: int,
    planted: int,
    engine: Path | None,
    budget_s: float,
    scratch: Path,
    tell: Tell,
    *,
    openings: int = 12,
    clock: str = "host",
    keep: Callable[[Calibration], None] = lambda found: None,
) -> Calibration:
    """Make all parts within about `budget_s`: `trials` of the same engine twice, `planted` of each difference.

    Without `engine`, tiny ones for ONNX Runtime on the CPU are built in `scratch`. One that takes long to open is
    opened anew `openings` times, and not for each trial; for what is planted once. An interruption (Ctrl-C) ends it,
    and what was found until then is returned; `keep` gets that after each part. `clock` is `host` or `device`; Fault is
    raised if the engine has none of that kind.
    """
    start, load = time.monotonic(), load_average()
    bed = make_bed(engine or tiny_engine(scratch, 256, 4), made=engine is None, clock=clock)
    planted_clock = clock if clock == "host" or spins() else "host"
    same_params = SAME.model_copy(update={"clock": clock})
    planted_params = PLANTED.model_copy(update={"clock": planted_clock})
    commit = git_commit()
    described, waited, compared = manifest.read(bed.folder, trusted=False), None, list[beside.Beside]()
    with Monitor((described.device,), SAME) as watch:
        each = 1 if bed.reopen else math.ceil(trials / openings)
        same = Trials(0.0, trials, same_params, SAME_SHARE * budget_s, watch.disturbed, each)
        each_s = POWER_SHARE * budget_s / len(DIFFERENCES)
        power = [
            Trials(d, planted, planted_params, each_s, watch.disturbed, 1 if bed.reopen else None) for d in DIFFERENCES
        ]

        def found(interrupted: bool = True) -> Calibration:
            return Calibration(
                engine=engine.name if engine else "4 matrix products of 256 x 256 with ReLU, made on the spot",
                backend=described.backend,
                engine_sha256=described.engine_sha256,
                commit=commit,
                libraries=_versions(),
                clock=clock,
                planted_clock=planted_clock,
                reopened=bed.reopen,
                openings=same.openings(),
                early=waited,
                beside=compared,
                same=same.tally(),
                alone=same.tally_alone(),
                power=[tally for part in power if (tally := part.tally())],
                interrupted=interrupted,
                seconds=time.monotonic() - start,
                environment=environment((load, load_average()), watch.conditions()),
            )

        try:
            waited = early(EARLY_MS)
            # Long calls: what Python adds to each, outside of another timer's clock, is a small part of them.
            larger = bed if engine else make_bed(tiny_engine(scratch, 1024, 24), made=True)
            tell("other timers beside ours")
            compared = beside.side_by_side(larger.folder, larger.open, larger.pool, BESIDE_SHARE * budget_s, scratch)
            keep(found())
            for part in (same, *power):
                part.run(bed, tell)
                keep(found())
        except KeyboardInterrupt:
            return found()
        return found(interrupted=False)


def _versions() -> dict[str, str]:
    """The versions of the libraries that were imported, by name."""
    return {name: str(getattr(sys.modules[name], "__version__", "unknown")) for name in TOLD if name in sys.modules}


def early(true_ms: float, calls: int = 200) -> EarlyReport:
    """Time a runner that returns at once and is done after `true_ms`: medians of our way, and without waiting.

    Calls that other processes disturbed are left out, ten at a time, unless all were.
    """
    session, watch = Early(true_ms / 1e3), Host(SAME.max_lost)
    groups = []
    for _ in range(0, calls, 10):
        watch()
        times = [timed_call(session, {}) for _ in range(10)]
        groups.append((watch() is not None, times))
    clean = [times for disturbed, times in groups if not disturbed] or [times for _, times in groups]
    timed = np.concatenate(clean)
    returned = []
    for _ in range(calls):
        start = time.perf_counter()
        session.run({})
        returned.append((time.perf_counter() - start) * 1e3)
    return EarlyReport(true_ms, float(np.median(timed)), float(np.median(returned)))

"""Proof that the measurement measures: the same engine twice, planted differences, and others' timers beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks import beside, manifest
from tasks.bench import Environment, allowed_for, environment
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
# Openings and rounds are those of `bench` by default; windows are shorter, so that many trials fit in.
SAME = BenchmarkParams(openings=5, window_ms=5, warmup_ms=10)
PLANTED = BenchmarkParams(openings=5, window_ms=20, warmup_ms=20)
SAME_SHARE, POWER_SHARE, BESIDE_SHARE = 0.56, 0.32, 0.08
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

    `settings` are those that the same engine was timed with: each trial is of so many `openings`, which allow for
    `reopen_sd`. `reopened` says that each has openings of its own, so that what differs between two, such as where
    memory lies, counts as chance. `openings` is how much that is. `planted_clock` is that of what is planted: the one
    of `settings`, or the host's where PyTorch reaches no GPU. `same` and `alone` are of the same trials: as `bench`
    judges, and opening by opening by their rounds alone. `libraries` are the versions of those that were imported.
    """

    engine: str
    backend: str
    engine_sha256: str
    commit: str | None
    libraries: dict[str, str]
    settings: BenchmarkParams
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
    openings: int = SAME.openings,
    anew: int = 36,
    reopen_sd: float | None = None,
    clock: str = "host",
    keep: Callable[[Calibration], None] = lambda found: None,
) -> Calibration:
    """Make all parts within about `budget_s`: `trials` of the same engine twice, `planted` of each difference.

    Without `engine`, tiny ones for ONNX Runtime on the CPU are built in `scratch`. Each trial is of so many
    `openings`. An engine that takes long to open isn't opened anew for each trial, but in `anew` pairs, and in a
    quarter of that for each difference, or in `openings` if that is more. `reopen_sd` is what trials allow for, by
    default as `bench` does. An interruption (Ctrl-C) ends it, and what was found until then is returned; `keep` gets
    that after each part. `clock` is `host` or `device`; Fault is raised if the engine has none of that kind.
    """
    start, load = time.monotonic(), load_average()
    bed = make_bed(engine or tiny_engine(scratch, 256, 4), made=engine is None, clock=clock)
    planted_clock = clock if clock == "host" or spins() else "host"
    described, waited, compared = manifest.read(bed.folder, trusted=False), None, list[beside.Beside]()
    opened = {"openings": openings, "reopen_sd": allowed_for([described], SAME, reopen_sd)}
    same_params = SAME.model_copy(update={"clock": clock, **opened})
    planted_params = PLANTED.model_copy(update={"clock": planted_clock, **opened})
    commit = git_commit()
    with Monitor((described.device,), SAME) as watch:
        groups, few = (None, None) if bed.reopen else (max(1, anew // openings), max(1, anew // openings // 4))
        same = Trials(0.0, trials, same_params, SAME_SHARE * budget_s, watch.disturbed, groups)
        each_s = POWER_SHARE * budget_s / len(DIFFERENCES)
        power = [Trials(d, planted, planted_params, each_s, watch.disturbed, few) for d in DIFFERENCES]

        def found(interrupted: bool = True) -> Calibration:
            return Calibration(
                engine=engine.name if engine else "4 matrix products of 256 x 256 with ReLU, made on the spot",
                backend=described.backend,
                engine_sha256=described.engine_sha256,
                commit=commit,
                libraries=_versions(),
                settings=same_params,
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

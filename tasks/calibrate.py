"""Proof that the measurement measures: the same engine twice, planted differences, and others' timers beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasks import beside, manifest, measure, sequential
from tasks.bench import Environment, environment, random_inputs
from tasks.disturbance import Host, load_average
from tasks.engines.protocol import Session, backend, open_engine
from tasks.monitor import Monitor
from tasks.planted import Early, Slowed, tiny_engine
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, mean_score
from tasks.target import last_level_cache_bytes
from tasks.timing import make_pool, timed_call
from tasks.workloads.protocol import Arrays

DIFFERENCES = (0.02, 0.05, 0.10)
EARLY_MS = 5.0
QUICK_OPEN_S = 0.1
# The rounds are those of a benchmark by default; windows are shorter, so that many trials fit in.
SAME = BenchmarkParams(window_ms=5, warmup_ms=10)
PLANTED = BenchmarkParams(window_ms=20, warmup_ms=20)
SAME_SHARE, POWER_SHARE, BESIDE_SHARE = 0.5, 0.37, 0.08
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tally:
    """How many of `trials` measurements gave the verdict that was looked for, of the `asked`.

    `planted` is the share that one of the two engines was slowed by. The verdict is that this one is slower; where
    nothing was planted, any. `share` has Wilson's interval at 95 %. `ratio` is the median of the ratios found,
    `rounds` the mean number of rounds; `busy` counts measurements that had to use disturbed windows.
    """

    planted: float
    asked: int
    trials: int
    verdicts: int
    share: Interval
    ratio: float
    rounds: float
    busy: int
    discarded: int


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
    where its memory lies, counts as chance.
    """

    engine: str
    backend: str
    reopened: bool
    early: EarlyReport | None
    beside: list[beside.Beside]
    same: Tally | None
    power: list[Tally]
    interrupted: bool
    seconds: float
    environment: Environment


@dataclass(frozen=True)
class Bed:
    """An engine to calibrate on: how it is opened, batches of random inputs, and whether each trial opens it anew."""

    folder: Path
    open: Callable[[], Session]
    pool: list[Arrays]
    reopen: bool


@dataclass
class Trials:
    """Measurements of an engine against itself, one of the two slowed by `planted`; they can be broken off."""

    planted: float
    asked: int
    params: BenchmarkParams
    seconds: float
    disturbed: measure.Disturbed | None = None
    right: list[bool] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    busy: int = 0
    discarded: int = 0

    def run(self, bed: Bed, tell: Tell) -> None:
        """Make the trials, as far as the time allows; at least one."""
        start = time.monotonic()
        with ExitStack() as kept:
            pair = None if bed.reopen else [kept.enter_context(bed.open()) for _ in range(2)]
            for done in range(1, self.asked + 1):
                with ExitStack() as stack:
                    self._trial(bed, pair or [stack.enter_context(bed.open()) for _ in range(2)])
                taken = time.monotonic() - start
                if taken > self.seconds:
                    break
                if done % max(1, self.asked // 20) == 0:
                    left = min(taken / done * (self.asked - done), self.seconds - taken)
                    tell(f"{_named(self.planted)}: {done} of {self.asked}, about {left:.0f} s left of this part")

    def tally(self) -> Tally | None:
        """The trials made so far, None if there were none."""
        if not self.right:
            return None
        return Tally(
            planted=self.planted,
            asked=self.asked,
            trials=len(self.right),
            verdicts=sum(self.right),
            share=mean_score(np.array(self.right, float), 0.95),
            ratio=float(np.median(self.ratios)),
            rounds=float(np.mean(self.rounds)),
            busy=self.busy,
            discarded=self.discarded,
        )

    def _trial(self, bed: Bed, pair: list[Session]) -> None:
        params = self.params.model_copy(update={"seed": len(self.right)})
        sessions = {"plain": Slowed(pair[0], 0.0), "slowed": Slowed(pair[1], self.planted)}
        measured = measure.Measurement(sessions, bed.pool, params, disturbed=self.disturbed)
        measured.run(tell=False)
        timings = measured.timings()
        gain = measure.speedup(timings, "plain", "slowed", params.confidence)
        n = len(timings["plain"].medians)
        clear = sequential.clear(gain, n, measure.confidence_of(timings["plain"], params.confidence))
        self.right.append(clear and (gain.low > 1 or not self.planted))
        self.ratios.append(gain.value)
        self.rounds.append(n)
        self.busy += bool(timings["plain"].busy)
        self.discarded += sum(sum(t.discarded.values()) for t in timings.values())


def calibrate(
    trials: int, planted: int, engine: Path | None, budget_s: float, scratch: Path, tell: Tell
) -> Calibration:
    """Make all parts within about `budget_s`: `trials` of the same engine twice, `planted` of each difference.

    Without `engine`, tiny ones for ONNX Runtime on the CPU are built in `scratch`. An interruption (Ctrl-C) ends it,
    and what was found until then is returned.
    """
    start, load = time.monotonic(), load_average()
    bed = make_bed(engine or tiny_engine(scratch, 256, 4), made=engine is None)
    described, waited, compared, interrupted = manifest.read(bed.folder, trusted=False), None, [], False
    with Monitor((described.device,), SAME) as watch:
        same = Trials(0.0, trials, SAME, SAME_SHARE * budget_s, watch.disturbed)
        each_s = POWER_SHARE * budget_s / len(DIFFERENCES)
        power = [Trials(d, planted, PLANTED, each_s, watch.disturbed) for d in DIFFERENCES]
        try:
            waited = early(EARLY_MS)
            larger = bed if engine else make_bed(tiny_engine(scratch, 1024, 12), made=True)
            tell("other timers beside ours")
            compared = beside.side_by_side(larger.folder, larger.open, larger.pool, BESIDE_SHARE * budget_s, scratch)
            for part in (same, *power):
                part.run(bed, tell)
        except KeyboardInterrupt:
            interrupted = True
    return Calibration(
        engine=engine.name if engine else "4 matrix products of 256 x 256 with ReLU, made on the spot",
        backend=described.backend,
        reopened=bed.reopen,
        early=waited,
        beside=compared,
        same=same.tally(),
        power=[tally for part in power if (tally := part.tally())],
        interrupted=interrupted,
        seconds=time.monotonic() - start,
        environment=environment((load, load_average()), watch.conditions()),
    )


def make_bed(folder: Path, made: bool) -> Bed:
    """An engine's bed: opened once, to see how long that takes, with random inputs that outgrow the cache.

    One `made` on the spot carries no signature to check.
    """

    def open_session() -> Session:
        return backend(described.backend).open(folder, described) if made else open_engine(folder)

    described = manifest.read(folder, trusted=not made)
    start = time.monotonic()
    with open_session():
        seconds = time.monotonic() - start
    pool = make_pool(random_inputs(described, None), 1, 2 * last_level_cache_bytes())
    return Bed(folder, open_session, pool, seconds < QUICK_OPEN_S)


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


def _named(planted: float) -> str:
    return f"slowed by {planted:.0%}" if planted else "the same engine twice"

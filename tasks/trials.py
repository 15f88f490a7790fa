"""Measurements of an engine against itself, as it is or one of the two slowed: what a calibration is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasks import manifest, measure, sequential
from tasks.bench import random_inputs
from tasks.engines.protocol import Session, backend, open_engine
from tasks.openings import Openings, spread
from tasks.planted import Slowed
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, log_error, mean_score, ratio
from tasks.target import last_level_cache_bytes
from tasks.timing import make_pool
from tasks.workloads.protocol import Arrays

QUICK_OPEN_S = 0.1
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
class Bed:
    """An engine to calibrate on: how it is opened, batches of random inputs, and whether each trial opens it anew."""

    folder: Path
    open: Callable[[], Session]
    pool: list[Arrays]
    reopen: bool


@dataclass
class Trials:
    """Measurements of an engine against itself, one of the two slowed by `planted`; they can be broken off.

    Of the two sessions `kept` stay open for all trials; the others are opened anew for each.
    """

    planted: float
    asked: int
    params: BenchmarkParams
    seconds: float
    disturbed: measure.Disturbed | None = None
    kept: int = 0
    right: list[bool] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    busy: int = 0
    discarded: int = 0

    def run(self, bed: Bed, tell: Tell) -> float:
        """Make the trials, as far as the time allows, at least one; the seconds that it took."""
        start = time.monotonic()
        with ExitStack() as kept:
            held = [kept.enter_context(bed.open()) for _ in range(self.kept)]
            for done in range(1, self.asked + 1):
                with ExitStack() as stack:
                    self._trial(bed, held + [stack.enter_context(bed.open()) for _ in range(2 - self.kept)])
                taken = time.monotonic() - start
                if taken > self.seconds:
                    break
                if done % max(1, self.asked // 20) == 0:
                    left = min(taken / done * (self.asked - done), self.seconds - taken)
                    tell(f"{self.named}: {done} of {self.asked}, about {left:.0f} s left of this part")
        return time.monotonic() - start

    @property
    def named(self) -> str:
        if self.planted:
            return f"slowed by {self.planted:.0%}"
        return "openings" if self.kept == 1 else "the same engine twice"

    def openings(self) -> Openings | None:
        """What the trials made so far tell of the openings; None for too few, or if none was opened anew."""
        return spread(self.ratios, self.errors, self.kept == 1) if self.kept < 2 else None

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
        sessions: dict[str, Session] = {"plain": pair[0], "slowed": pair[1]}
        if self.planted:
            sessions = {"plain": Slowed(pair[0], 0.0), "slowed": Slowed(pair[1], self.planted)}
        measured = measure.Measurement(sessions, bed.pool, params, disturbed=self.disturbed)
        measured.run(tell=False)
        timings = measured.timings()
        gain = measure.speedup(timings, "plain", "slowed", params.confidence)
        n = len(timings["plain"].medians)
        clear = sequential.clear(gain, n, measure.confidence_of(timings["plain"], params.confidence))
        self.right.append(clear and (gain.low > 1 or not self.planted))
        plain = ratio(np.array(timings["plain"].medians), np.array(timings["slowed"].medians), params.confidence)
        self.ratios.append(gain.value)
        self.errors.append(log_error(plain, params.confidence))
        self.rounds.append(n)
        self.busy += bool(timings["plain"].busy)
        self.discarded += sum(sum(t.discarded.values()) for t in timings.values())


def make_bed(folder: Path, made: bool, clock: str = "host") -> Bed:
    """An engine's bed: opened once, to see how long that takes, with random inputs that outgrow the cache.

    One `made` on the spot carries no signature to check. Raises Fault if it has no clock of that kind.
    """

    def open_session() -> Session:
        return backend(described.backend).open(folder, described) if made else open_engine(folder)

    described = manifest.read(folder, trusted=not made)
    start = time.monotonic()
    with open_session() as session:
        seconds = time.monotonic() - start
        measure.require_clock({described.backend: session}, clock)
    pool = make_pool(random_inputs(described, None), 1, 2 * last_level_cache_bytes())
    return Bed(folder, open_session, pool, seconds < QUICK_OPEN_S)

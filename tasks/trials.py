"""Measurements of an engine against itself, as it is or one of the two slowed: what a calibration is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasks import manifest, measure, sequential
from tasks.bench import random_inputs
from tasks.engines.protocol import Session, backend, open_engine
from tasks.openings import Openings, spread
from tasks.planted import slowed
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, log_error, mean_score, ratio
from tasks.target import last_level_cache_bytes
from tasks.timing import make_pool, relative_width
from tasks.workloads.protocol import Arrays

QUICK_OPEN_S = 0.1
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tally:
    """How many of `trials` measurements gave the verdict that was looked for, of the `asked`.

    `planted` is the share that one of the two engines was slowed by. The verdict is that this one is slower; where
    nothing was planted, any. Trials were made of `pairs` of openings, of which `told` had such a verdict. `share` has
    Wilson's interval at 95 %, a pair counting as one. `ratio` is the median of the ratios found,
    `rounds` the mean number of rounds; `busy` counts measurements that had to use disturbed windows.
    """

    planted: float
    asked: int
    trials: int
    verdicts: int
    pairs: int
    told: int
    share: Interval
    ratio: float
    rounds: float
    busy: int
    discarded: int


@dataclass(frozen=True)
class Judged:
    """What a measurement says: whether that is a verdict, the ratio, and the number of rounds at which it ends."""

    clear: bool
    ratio: Interval
    rounds: int


def judged(
    slow: Sequence[float],
    fast: Sequence[float],
    looks: Sequence[int],
    horizon: int,
    params: BenchmarkParams,
    reopen_sd: float,
) -> Judged:
    """What a benchmark with this `reopen_sd` says of paired medians [rounds]: at the first look that ends it.

    `looks` are those of a measurement that allowed for as much or more, and so ended at this one's end or later.
    """
    for place, n in enumerate(looks, 1):
        until, so_far = looks[:place], (slow[:n], fast[:n])
        gain = sequential.speedup(*so_far, until, horizon, params.confidence, reopen_sd=reopen_sd)
        clear = sequential.clear(gain, n, sequential.confidence_at(until, horizon, params.confidence))
        width = relative_width(ratio(np.array(fast[:n]), np.array(slow[:n]), params.confidence))
        if clear and width <= params.max_width:
            break
    return Judged(clear, gain, n)


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

    Both are opened anew after `each` trials; never, where it is None. `alone` is what each trial's rounds say with
    nothing added for openings (`reopen_sd` of 0).
    """

    planted: float
    asked: int
    params: BenchmarkParams
    seconds: float
    disturbed: measure.Disturbed | None = None
    each: int | None = 1
    right: list[bool] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    alone: list[Judged] = field(default_factory=list)
    busy: int = 0
    discarded: int = 0

    def run(self, bed: Bed, tell: Tell) -> float:
        """Make the trials, as far as the time allows, at least one; the seconds that it took."""
        start, done = time.monotonic(), 0
        while done < self.asked:
            with bed.open() as one, bed.open() as other:
                for _ in range(min(self.each or self.asked, self.asked - done)):
                    self._trial(bed, [one, other])
                    done, taken = done + 1, time.monotonic() - start
                    if taken > self.seconds:
                        return taken
                    if done % max(1, self.asked // 20) == 0:
                        left = min(taken / done * (self.asked - done), self.seconds - taken)
                        tell(f"{self.named}: {done} of {self.asked}, about {left:.0f} s left of this part")
        return time.monotonic() - start

    @property
    def named(self) -> str:
        return f"slowed by {self.planted:.0%}" if self.planted else "the same engine twice"

    def openings(self) -> Openings | None:
        """What the trials made so far tell of the openings, a pair's together; None for too few pairs."""
        errors = np.array(self.errors)
        logs = np.log(self.ratios[: len(errors)])
        pairs = self._pairs(len(errors))
        means = [(np.exp(logs[of].mean()), np.sqrt((errors[of] ** 2).mean() / len(errors[of]))) for of in pairs]
        return spread([float(ratio) for ratio, _ in means], [float(error) for _, error in means])

    def _pairs(self, trials: int) -> list[slice]:
        """Of each pair of openings, which of the trials are of it."""
        each = self.each or max(1, trials)
        return [slice(first, first + each) for first in range(0, trials, each)]

    def tally(self) -> Tally | None:
        """The trials made so far, None if there were none."""
        return self._tally(self.right, self.ratios, self.rounds)

    def tally_alone(self) -> Tally | None:
        """The same trials, judged by their rounds alone."""
        alone = self.alone
        return self._tally([self._right(j) for j in alone], [j.ratio.value for j in alone], [j.rounds for j in alone])

    def _tally(self, right: list[bool], ratios: list[float], rounds: list[int]) -> Tally | None:
        if not right:
            return None
        found = np.array(right, float)
        by_pair = [found[of].mean() for of in self._pairs(len(found))]
        return Tally(
            planted=self.planted,
            asked=self.asked,
            trials=len(right),
            verdicts=sum(right),
            pairs=len(by_pair),
            told=sum(share > 0 for share in by_pair),
            share=mean_score(np.array(by_pair) if self.each else found, 0.95),
            ratio=float(np.median(ratios)),
            rounds=float(np.mean(rounds)),
            busy=self.busy,
            discarded=self.discarded,
        )

    def _trial(self, bed: Bed, pair: list[Session]) -> None:
        params = self.params.model_copy(update={"seed": len(self.right)})
        sessions: dict[str, Session] = {"plain": pair[0], "slowed": pair[1]}
        if self.planted:
            shares = {"plain": 0.0, "slowed": self.planted}
            sessions = {n: slowed(s, shares[n], params.clock) for n, s in sessions.items()}
        measured = measure.Measurement(sessions, bed.pool, params, disturbed=self.disturbed)
        measured.run(tell=False)
        timings = measured.timings()
        fast, slow = timings["plain"], timings["slowed"]
        padded, alone = (
            judged(slow.medians, fast.medians, fast.looks, fast.horizon, params, sd) for sd in (params.reopen_sd, 0.0)
        )
        plain = ratio(np.array(fast.medians), np.array(slow.medians), params.confidence)
        self.right.append(self._right(padded))
        self.alone.append(alone)
        self.ratios.append(padded.ratio.value)
        self.errors.append(log_error(plain, params.confidence))
        self.rounds.append(padded.rounds)
        self.busy += bool(timings["plain"].busy)
        self.discarded += sum(sum(t.discarded.values()) for t in timings.values())

    def _right(self, found: Judged) -> bool:
        return found.clear and (found.ratio.low > 1 or not self.planted)


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

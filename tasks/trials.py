"""Measurements of an engine against itself, as it is or one of the two slowed: what a calibration is made of."""

from __future__ import annotations

import math
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
from tasks.reopening import Timings, share
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, log_error, mean_score, ratio
from tasks.target import last_level_cache_bytes
from tasks.timing import Opening, make_pool, relative_width, too_few
from tasks.together import Together
from tasks.workloads.protocol import Arrays

QUICK_OPEN_S = 0.1
PLAIN, SLOWED = "plain", "slowed"
Tell = Callable[[str], None]
Trial = tuple[Timings, ...]


@dataclass(frozen=True)
class Tally:
    """How many of `trials` measurements gave the verdict that was looked for, of the `asked`.

    `planted` is the share that one of the two engines was slowed by. The verdict is that this one is slower; where
    nothing was planted, any. Trials share their openings with others, or don't: they were made of `groups`, of which
    `told` had such a verdict. `share` has Wilson's interval at 95 %, a group counting as one. `ratio` is the median of
    the ratios found, `rounds` the mean number of rounds; `busy` counts measurements that had to use disturbed windows.
    """

    planted: float
    asked: int
    trials: int
    verdicts: int
    groups: int
    told: int
    share: Interval
    ratio: float
    rounds: float
    busy: int
    discarded: int


@dataclass(frozen=True)
class Judged:
    """What a measurement says: whether that is a verdict, the ratio, and the number of rounds it took."""

    clear: bool
    ratio: Interval
    rounds: int


def judged(openings: Sequence[Timings], params: BenchmarkParams) -> Judged:
    """What `bench` says of these: one opening by its looks, several by what they scatter by, too."""
    found = Together(openings, params.confidence, params.reopen_sd)
    gain, fast = found.gain(PLAIN, SLOWED), [timings[PLAIN] for timings in openings]
    enough = too_few(fast, params.confidence) is None
    return Judged(enough and (gain.low > 1 or gain.high < 1), gain, sum(len(timing.medians) for timing in fast))


def by_rounds(timings: Timings, params: BenchmarkParams) -> Judged:
    """What one opening says with nothing added for others: at the first look that would have ended it."""
    slow, fast = timings[SLOWED].medians, timings[PLAIN].medians
    looks, horizon = timings[PLAIN].looks, timings[PLAIN].horizon
    for place, n in enumerate(looks, 1):
        until, so_far = looks[:place], (slow[:n], fast[:n])
        gain = sequential.speedup(*so_far, until, horizon, params.confidence)
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

    Each is of `params.openings` pairs of sessions. Every one has pairs of its own; or, where `groups` is given, shares
    them with the others of its group, so that all trials take no more than that many times as many pairs. `made` holds
    the timings by group, pair and measurement; a trial is what the pairs of a group gave at the same place.
    """

    planted: float
    asked: int
    params: BenchmarkParams
    seconds: float
    disturbed: measure.Disturbed | None = None
    groups: int | None = None
    made: list[list[list[Timings]]] = field(default_factory=list)

    def run(self, bed: Bed, tell: Tell) -> float:
        """Make the trials, as far as the time allows, at least one; the seconds that it took."""
        start, each = time.monotonic(), self.params.openings
        groups = min(self.groups or self.asked, self.asked)
        for group in range(groups):
            taken = time.monotonic() - start
            if group and taken * (group + 1) / group > self.seconds:
                break
            self.made.append([])
            wanted = math.ceil((self.asked - self.trials) / (groups - group))
            for opening in range(each):
                # A pair's share of the time: what one takes longer, those after it have less.
                until = start + self.seconds * (group * each + opening + 1) / (groups * each)
                self.made[-1].append([])
                self._pair(bed, opening, wanted, until)
                wanted = len(self.made[-1][-1])
            taken = time.monotonic() - start
            if (group + 1) % max(1, groups // 20) == 0:
                left = min(taken / (group + 1) * (groups - group - 1), self.seconds - taken)
                tell(f"{self.named}: {self.trials} of {self.asked}, about {left:.0f} s left of this part")
        return time.monotonic() - start

    def _pair(self, bed: Bed, opening: int, wanted: int, until: float) -> None:
        """One pair of openings, measured as often as is wanted, or for the time there is, at least once."""
        with bed.open() as one, bed.open() as other:
            pair = (one, other) if (len(self.made) + opening) % 2 else (other, one)
            for _ in range(wanted):
                self.made[-1][-1].append(self._measured(bed, pair))
                if time.monotonic() > until:
                    break

    @property
    def named(self) -> str:
        return f"slowed by {self.planted:.0%}" if self.planted else "the same engine twice"

    @property
    def trials(self) -> int:
        """How many were made whole."""
        return sum(len(group) for group in self._whole())

    def _whole(self) -> list[list[Trial]]:
        """By group, the trials that all of their openings were made for: the timings of each opening."""
        full = [group for group in self.made if len(group) == self.params.openings]
        return [whole for group in full if (whole := list(zip(*group, strict=False)))]

    def openings(self) -> Openings | None:
        """What the trials made so far tell of the openings, a pair's together; None for too few pairs."""
        confidence, pairs = self.params.confidence, []
        for told in (pair for group in self.made for pair in group if pair):
            plain = [Opening.of(timings, PLAIN, SLOWED).plain().speedup(confidence) for timings in told]
            errors = [log_error(found, confidence) for found in plain]
            middle = np.exp(np.mean(np.log([found.value for found in plain])))
            pairs.append((float(middle), float(np.sqrt(np.mean(np.square(errors)) / len(errors)))))
        return spread([ratio for ratio, _ in pairs], [error for _, error in pairs])

    def tally(self) -> Tally | None:
        """The trials made so far, judged as `bench` does; None if there were none."""
        return self._tally(self._whole(), lambda trial: judged(trial, self.params), self.asked)

    def tally_alone(self) -> Tally | None:
        """The openings of these trials, each judged by its rounds alone."""
        n = self.params.openings
        pairs = [[trial[place : place + 1] for trial in group] for group in self._whole() for place in range(n)]
        return self._tally(pairs, lambda trial: by_rounds(trial[0], self.params), self.asked * n)

    def _tally(self, groups: list[list[Trial]], judge: Callable[[Trial], Judged], asked: int) -> Tally | None:
        if not groups:
            return None
        told = [[judge(trial) for trial in group] for group in groups]
        right = [[self._right(found) for found in group] for group in told]
        shares = np.array([np.mean(group) for group in right], float)
        timings = [[t for opening in trial for t in opening.values()] for group in groups for trial in group]
        return Tally(
            planted=self.planted,
            asked=asked,
            trials=len(timings),
            verdicts=sum(map(sum, right)),
            groups=len(groups),
            told=int((shares > 0).sum()),
            share=mean_score(shares, 0.95),
            ratio=float(np.median([found.ratio.value for group in told for found in group])),
            rounds=float(np.mean([found.rounds for group in told for found in group])),
            busy=sum(any(t.busy for t in trial) for trial in timings),
            discarded=sum(sum(t.discarded.values()) for trial in timings for t in trial),
        )

    def _measured(self, bed: Bed, pair: tuple[Session, Session]) -> Timings:
        seed = sum(len(told) for group in self.made for told in group)
        params = share(self.params).model_copy(update={"seed": seed})
        sessions: dict[str, Session] = {PLAIN: pair[0], SLOWED: pair[1]}
        if self.planted:
            shares = {PLAIN: 0.0, SLOWED: self.planted}
            sessions = {n: slowed(s, shares[n], params.clock) for n, s in sessions.items()}
        measured = measure.Measurement(sessions, bed.pool, params, disturbed=self.disturbed)
        measured.run(tell=False)
        return measured.timings()

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

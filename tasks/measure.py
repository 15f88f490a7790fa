"""Interleaved timing of several engines: rounds, in random order, on rotating inputs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks import clustered, sequential
from tasks.disturbance import Host, settle
from tasks.disturbance import load_average as load_average
from tasks.engines.protocol import Session
from tasks.errors import Fault
from tasks.settings import BenchmarkParams
from tasks.stats import percentile, ratio
from tasks.target import last_level_cache_bytes
from tasks.timing import Timing as Timing
from tasks.timing import inputs_of as inputs_of
from tasks.timing import make_pool, timed_call
from tasks.timing import relative_width as relative_width
from tasks.timing import restored as restored
from tasks.timing import speedup as speedup
from tasks.workloads.protocol import Arrays

STABLE = 0.1
SETTLE_CALLS = 3
# A call this many windows long needs none to settle: what the engine before left in the caches is a small part of it.
LONG = 3
RETRIES = 2
# To read a GPU takes 12 ms: what was read at a window's end is good for the start of one that follows at once.
FRESH_S = 0.01
Disturbed = Callable[[], str | None]


@dataclass(frozen=True)
class Window:
    """The calls of one window, in milliseconds, and what disturbed it."""

    samples: list[float]
    disturbed: str | None


def interleave(
    sessions: Mapping[str, Session],
    inputs: Arrays,
    params: BenchmarkParams,
    *,
    family: int = 1,
    fastest: bool = False,
    disturbed: Disturbed | None = None,
) -> dict[str, Timing]:
    """Time every session once in each round, in an order drawn anew for each round, until it may stop.

    See `Measurement` for the arguments. Raises Fault if the device's clock is asked for and a session has none.
    """
    measured = Measurement(sessions, inputs, params, family=family, fastest=fastest, disturbed=disturbed)
    measured.run()
    return measured.timings()


class Measurement:
    """Engines being timed against each other: `run`, or `warm_up` and `round` until `done`; then `timings`.

    `inputs` [n, …] are cut into batches of `params.batch` and repeated until they outgrow
    the last-level cache, so that no engine reads its input from there; a list is taken as such batches.
    `family` is the number of speed-ups that this one is judged together with. With `fastest`, others are told apart
    from the fastest instead of the first. `disturbed` is called at a window's start and end, and says then what
    disturbed it, beside other processes; at the start of one that follows another at once it isn't.
    Raises Fault for sessions that can't be timed as asked.
    """

    def __init__(
        self,
        sessions: Mapping[str, Session],
        inputs: Arrays | list[Arrays],
        params: BenchmarkParams,
        *,
        family: int = 1,
        fastest: bool = False,
        disturbed: Disturbed | None = None,
    ) -> None:
        require_clock(sessions, params.clock)
        self.sessions, self.params, self.family, self.fastest = sessions, params, family, fastest
        many = 2 * last_level_cache_bytes()
        self.pool = inputs if isinstance(inputs, list) else make_pool(inputs, params.batch, many)
        host = Host(params.max_lost, own=params.clock == "device")
        self.watches: list[Disturbed] = [host, *([disturbed] if disturbed else [])]
        self.rounds: list[dict[str, Window]] = []
        self.discarded: dict[str, Counter[str]] = {name: Counter() for name in sessions}
        self.warm: dict[str, bool] = {}
        self.looks: list[int] = []
        self._took: dict[str, float] = {}
        self._judged = float("-inf")
        self._rng, self._turn = np.random.default_rng(params.seed), dict.fromkeys(sessions, 0)
        self._began = time.perf_counter()

    def warm_up(self) -> None:
        """Run every engine until two windows in a row agree within 10 %, for ten times the warm-up at most.

        A first window before that pays for what happens once, such as the capture of a CUDA graph.
        """
        self.warm = {name: self._warm_up(name) for name in self.sessions}
        self._began = time.perf_counter()

    def run(self, tell: bool = True) -> None:
        """Warm up, and make rounds until it may stop; `tell` prints how far it is, every fifth."""
        self.warm_up()
        while not self.done():
            self.round()
            if tell and len(self.rounds) % 5 == 0:
                thrown = sum(counted.total() for counted in self.discarded.values())
                told = f", {thrown} windows thrown away" if thrown else ""
                of = f"{self.params.rounds} to {self.params.max_rounds}"
                print(f"round {len(self.rounds)} of {of}{told}", flush=True)

    def round(self) -> None:
        """One window of every engine, in an order drawn anew; a disturbed one is thrown away and made again, twice."""
        found = {str(name): self._undisturbed(str(name)) for name in self._rng.permutation(list(self.sessions))}
        self.rounds.append(found)

    def done(self) -> bool:
        """Whether to stop: the answer is clear and narrow, or the rounds are used up, or the time and there are enough.

        Fewer rounds than the family's confidence needs would tell nothing, however long they took.
        """
        params, n, late = self.params, len(self._clean()), self._late()
        if n >= self._horizon or len(self.rounds) >= 2 * self._horizon:
            return True
        if late and ((n >= params.rounds and self._enough(n)) or len(self.rounds) >= 2 * params.rounds):
            return True
        if n >= params.rounds and (n - params.rounds) % sequential.LOOK_EVERY == 0 and n not in self.looks:
            self.looks.append(n)
            return self._settled(n)
        return False

    def timings(self) -> dict[str, Timing]:
        """What was found so far; Fault before two rounds are done."""
        kept = self._kept()
        if len(kept) < 2:
            raise Fault("nothing was timed", got=f"{len(kept)} rounds", expected="at least 2", do="give it more time")
        return {name: self._timing(name, kept) for name in self.sessions}

    def _enough(self, n: int) -> bool:
        """Whether `n` rounds can give an interval of the needed confidence (all openings together, if several)."""
        return self.params.openings > 1 or not sequential.too_few(n, self._confidence(self._looks_until(n)))

    @property
    def _horizon(self) -> int:
        return max(self.params.rounds, self.params.max_rounds)

    def _looks_until(self, n: int) -> tuple[int, ...]:
        """The looks taken before round `n`, and one at it."""
        return (*(look for look in self.looks if look < n), n)

    def _confidence(self, looks: Sequence[int]) -> float:
        return sequential.confidence_at(looks, self._horizon, self.params.confidence, self.family)

    def _late(self) -> bool:
        return time.perf_counter() - self._began > self.params.budget_s * max(1, len(self.sessions) - 1)

    def _clean(self) -> list[dict[str, Window]]:
        return [r for r in self.rounds if not any(window.disturbed for window in r.values())]

    def _kept(self) -> list[dict[str, Window]]:
        """The undisturbed rounds; all, if they are too few."""
        clean = self._clean()
        return clean if len(clean) >= self.params.rounds else self.rounds

    def _window(self, name: str) -> Window:
        spun = settle()
        fresh = time.perf_counter() - self._judged < FRESH_S
        for watch in self.watches[:1] if fresh else self.watches:
            watch()
        window = self.params.window_ms / 1e3
        for _ in range(SETTLE_CALLS if self._took.get(name, 0.0) < LONG * window else 0):
            start = time.perf_counter()
            self._call(name)
            if time.perf_counter() - start > window:
                break
        samples: list[float] = []
        start = time.perf_counter()
        while time.perf_counter() < start + window or not samples:
            samples.append(self._call(name))
        self._took[name] = (time.perf_counter() - start) / len(samples)
        told = [reason for watch in self.watches if (reason := watch())]
        self._judged = time.perf_counter()
        return Window(samples, spun or next(iter(told), None))

    def _undisturbed(self, name: str) -> Window:
        window = self._window(name)
        for _ in range(RETRIES):
            if not window.disturbed or self._late():
                break
            self.discarded[name][window.disturbed] += 1
            window = self._window(name)
        if window.disturbed:
            self.discarded[name][window.disturbed] += 1
        return window

    def _call(self, name: str) -> float:
        batch = self.pool[self._turn[name] % len(self.pool)]
        self._turn[name] += 1
        return timed_call(self.sessions[name], batch, self.params.clock)

    def _warm_up(self, name: str) -> bool:
        self._window(name)
        start, last = time.perf_counter(), float("inf")
        while True:
            median = float(np.median(self._window(name).samples))
            elapsed, agree = (time.perf_counter() - start) * 1e3, abs(median - last) <= STABLE * median
            if elapsed >= self.params.warmup_ms and agree:
                return True
            if elapsed >= 10 * self.params.warmup_ms and last < float("inf"):
                return False
            last = median

    def _settled(self, n: int) -> bool:
        """Whether every ratio is known within `max_width`, and lies on one side of 1 as surely as the looks ask for.

        One of several openings doesn't tell the side alone: for it the width is enough.
        """
        params, clean = self.params, self._clean()
        medians = {name: np.array([np.median(r[name].samples) for r in clean]) for name in self.sessions}
        names = sorted(medians, key=lambda name: float(np.median(medians[name]))) if self.fastest else list(medians)
        sure = self._confidence(self.looks)
        for name in names[1:]:
            if relative_width(ratio(medians[names[0]], medians[name], params.confidence)) > params.max_width:
                return False
            if params.openings > 1:
                continue
            gain = sequential.speedup(
                slow=medians[names[0]].tolist(),
                fast=medians[name].tolist(),
                looks=self.looks,
                horizon=self._horizon,
                confidence=params.confidence,
                family=self.family,
                reopen_sd=params.reopen_sd,
            )
            if not sequential.clear(gain, n, sure):
                return False
        return True

    def _timing(self, name: str, kept: list[dict[str, Window]]) -> Timing:
        params, n = self.params, len(kept)
        windows = [np.array(r[name].samples) for r in kept]
        samples = np.concatenate(windows)
        mean, single = float(samples.mean()), params.clock == "host"
        clean = len(self._clean())
        reasons = sorted({reason for counted in self.discarded.values() for reason in counted})
        told = f"only {clean} of {len(self.rounds)} rounds were undisturbed: {', '.join(reasons)}"
        return Timing(
            batch=params.batch,
            clock=params.clock,
            p50=percentile(samples, 50),
            p90=percentile(samples, 90) if single else None,
            p99=percentile(samples, 99) if single else None,
            mean=mean,
            n=len(samples),
            throughput_per_s=params.batch / mean * 1e3,
            warm=self.warm.get(name, False),
            medians=tuple(float(np.median(r[name].samples)) for r in kept),
            looks=self._looks_until(n),
            horizon=self._horizon,
            reopen_sd=params.reopen_sd,
            discarded=dict(self.discarded[name]),
            busy=told if clean < n else None,
            bounds=clustered.of_calls(windows, (50, 90, 99) if single else (50,), params.batch, params.confidence),
        )


def require_clock(sessions: Mapping[str, Session], clock: str) -> None:
    """Raise Fault if there is nothing to time, a session can't be synchronized, or one has not the clock asked for."""
    if not sessions:
        raise Fault("nothing to time", got="no engine", expected="at least one", do="name one")
    needed = "device_ms" if clock == "device" else "synchronize"
    without = [name for name, session in sessions.items() if not callable(getattr(session, needed, None))]
    if without and clock == "device":
        raise Fault(
            "benchmark.clock: device needs engines that run on a GPU",
            got=f"{', '.join(without)} on the CPU",
            expected="device: cuda for every engine of the comparison",
            do="set benchmark.clock to host, or build them for CUDA",
        )
    if without:
        raise Fault(
            "an engine that can't be synchronized can't be timed",
            got=f"no synchronize of {', '.join(without)}",
            expected="a session whose synchronize returns when all that was started is done",
            do="give its backend's session that method",
        )

"""Other timers beside ours, in one run: ONNX Runtime's profiler, torch.utils.benchmark, CUDA events, bare calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from tasks import manifest
from tasks.disturbance import Host, settle
from tasks.engines.protocol import BareSession, DeviceSession, Session
from tasks.planted import Profiled
from tasks.stats import Interval, ratio
from tasks.timing import DEVICE_CALLS, timed_call
from tasks.workloads.protocol import Arrays

WITHIN = 0.03
MIN_ROUNDS, MAX_ROUNDS = 12, 60
CALLS = 20
MAX_LOST = 0.1

# Ours and theirs of a round's batches; what comes second says whether ours are to be timed first.
Timer = Callable[[list[Arrays], bool], tuple[float, float]]
PROFILER, BARE = "ONNX Runtime's profiler", "bare calls"
YES, NO, OPEN = "yes", "NO", "not told apart"


@dataclass(frozen=True)
class Beside:
    """Our milliseconds over another timer's, by round: the ratio with its interval, and its spread.

    `low` and `high` are the 10th and 90th percentile of the rounds' ratios. `within` says whether the ratio is
    within 3 % of 1: `yes` if its whole interval is, `NO` if all of that is outside, else `not told apart`. `thrown`
    counts the rounds that other processes disturbed.
    """

    timer: str
    what: str
    ours_ms: float
    theirs_ms: float
    ratio: Interval
    low: float
    high: float
    rounds: int
    thrown: int
    within: str


def side_by_side(
    folder: Path, open_session: Callable[[], Session], pool: list[Arrays], budget_s: float, scratch: Path
) -> list[Beside]:
    """Time one engine by us and by every other timer that this machine and engine allow, in interleaved rounds."""
    described = manifest.read(folder, trusted=False)
    timers: dict[str, tuple[str, Timer]] = {}
    with open_session() as session:
        profiled = None
        if described.backend == "onnxruntime" and described.device == "cpu":
            profiled = Profiled(folder, described, scratch / "profile")
            timers[PROFILER] = ("its model_run of the same calls, median", _by_profile(profiled))
        timers["torch.utils.benchmark"] = ("Timer.timeit of the same session, mean", _by_torch(session))
        if hasattr(session, "device_ms"):
            what = f"torch.cuda.Event around {DEVICE_CALLS} launches of the same session, median"
            timers["CUDA events by hand"] = (what, _by_events(cast(DeviceSession, session)))
        if hasattr(session, "bare"):
            timers[BARE] = (
                "the backend's own call of the same opened engine, median: the rest is what our session costs",
                _bare(cast(BareSession, session)),
            )
        pairs, thrown = _rounds(timers, pool, budget_s)
        if profiled:
            runs = profiled.milliseconds()
            pairs[PROFILER] = [(ours, _median(runs[int(at) : int(at) + CALLS])) for ours, at in pairs[PROFILER]]
    return [_beside(name, what, pairs[name], thrown[name]) for name, (what, _) in timers.items()]


def _rounds(
    timers: dict[str, tuple[str, Timer]], pool: list[Arrays], budget_s: float
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Our and their milliseconds of each round, timers in random order, and ours before or after theirs by chance.

    Disturbed rounds are thrown away, up to half of the fewest.
    """
    rng, watch = np.random.default_rng(0), Host(MAX_LOST)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in timers}
    thrown, start, turn = dict.fromkeys(timers, 0), time.monotonic(), 0
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.monotonic() - start > budget_s:
            break
        for name in map(str, rng.permutation(list(timers))):
            batches = [pool[(turn + i) % len(pool)] for i in range(CALLS)]
            turn += CALLS
            settle()
            watch()
            pair = timers[name][1](batches, bool(rng.integers(2)))
            if watch() and thrown[name] < MIN_ROUNDS // 2:
                thrown[name] += 1
            else:
                pairs[name].append(pair)
    return pairs, thrown


def _beside(name: str, what: str, pairs: list[tuple[float, float]], thrown: int) -> Beside:
    ours, theirs = np.array(pairs).T
    middle = ratio(ours, theirs, 0.95)
    low, high = (float(v) for v in np.percentile(ours / theirs, (10, 90)))
    return Beside(name, what, _median(ours), _median(theirs), middle, low, high, len(pairs), thrown, _within(middle))


def _within(found: Interval) -> str:
    """Whether a ratio's whole interval is within 3 % of 1, or outside."""
    if found.low >= 1 - WITHIN and found.high <= 1 + WITHIN:
        return YES
    return NO if found.high < 1 - WITHIN or found.low > 1 + WITHIN else OPEN


def _in_order(ours: Callable[[], float], theirs: Callable[[], float], ours_first: bool) -> tuple[float, float]:
    if ours_first:
        return ours(), theirs()
    taken = theirs()
    return ours(), taken


def _by_profile(session: Profiled) -> Timer:
    """Our median of a round's calls; theirs comes later, so the place of the first of them in the profile instead."""
    ran = itertools.count(step=CALLS)

    def timer(batches: list[Arrays], ours_first: bool) -> tuple[float, float]:
        return _median([timed_call(cast(Session, session), batch) for batch in batches]), float(next(ran))

    return timer


def _by_torch(session: Session) -> Timer:
    from torch.utils.benchmark import Timer as TorchTimer

    def timer(batches: list[Arrays], ours_first: bool) -> tuple[float, float]:
        names = {"session": session, "batches": itertools.cycle(batches)}
        theirs = TorchTimer("session.run(next(batches)); session.synchronize()", globals=names)
        return _in_order(
            lambda: float(np.mean([timed_call(session, batch) for batch in batches])),
            lambda: float(theirs.timeit(len(batches)).mean) * 1e3,
            ours_first,
        )

    return timer


def _by_events(session: DeviceSession) -> Timer:
    between = _events(session)

    def by_hand(batch: Arrays) -> float:
        session.load(batch)
        return between(session.launch)

    def timer(batches: list[Arrays], ours_first: bool) -> tuple[float, float]:
        return _in_order(
            lambda: _median([timed_call(session, batch, "device") for batch in batches]),
            lambda: _median([by_hand(batch) for batch in batches]),
            ours_first,
        )

    return timer


def _bare(session: BareSession) -> Timer:
    """By the host's clock; on a GPU by its own, where a graph is captured for the first batch of each round."""
    on_gpu = hasattr(session, "device_ms")
    between, clock = (_events(session), "device") if on_gpu else (_by_host, "host")

    def timer(batches: list[Arrays], ours_first: bool) -> tuple[float, float]:
        used = [batches[0]] if on_gpu else batches

        def theirs() -> float:
            taken = []
            for batch in used:
                with session.bare(batch) as call:
                    taken += [between(call) for _ in range(len(batches) // len(used))]
            return _median(taken)

        def ours() -> float:
            return _median([timed_call(session, used[i % len(used)], clock) for i in range(len(batches))])

        return _in_order(ours, theirs, ours_first)

    return timer


def _by_host(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _events(session: Any) -> Callable[[Callable[[], object]], float]:
    """What gives the GPU's milliseconds of one of so many launches, between two of PyTorch's events."""
    import torch

    stream = torch.cuda.ExternalStream(session.stream.handle)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def between(launch: Callable[[], object]) -> float:
        start.record(stream)
        for _ in range(DEVICE_CALLS):
            launch()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / DEVICE_CALLS

    return between


def _median(values: Sequence[float] | np.ndarray) -> float:
    return float(np.median(values))

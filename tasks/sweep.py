"""Latency and throughput of an engine over batch sizes and over sessions that run at the same time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasks import clustered, energy, manifest, measure, target
from tasks.data import read
from tasks.disturbance import Host, settle
from tasks.engines.protocol import Session
from tasks.errors import Fault
from tasks.manifest import Manifest
from tasks.monitor import Conditions, Monitor
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, percentile
from tasks.streams import flags, opened, together
from tasks.target import last_level_cache_bytes
from tasks.timing import make_pool
from tasks.workloads.protocol import Arrays

ROUNDS = 5
STREAMS = (1, 2, 4, 8)
JUDGED = 90
# Windows differ: so many times the calls that would do if they were alike.
AMPLE = 1.5


@dataclass(frozen=True)
class Point:
    """One batch size, in `streams` sessions at the same time, each with its next call right after the last.

    Latencies are of a call, in milliseconds, None with too few calls, and `bounds` their intervals by name, windows
    counting as clusters (see `clustered`); throughput is in samples a second, the geometric mean over the rounds with
    Student's interval of the logarithms. `within` says whether p90 keeps the limit with a whole interval, one that is
    wider than that in `bounds` where several numbers of streams are judged; None if that isn't known, or without a
    limit. `discarded` counts windows thrown away, by reason; `disturbed` says that one
    had to be used.
    """

    batch: int
    streams: int
    p50: float | None
    p90: float | None
    p99: float | None
    n: int
    throughput_per_s: Interval
    within: bool | None
    bounds: dict[str, Interval] = field(default_factory=dict)
    discarded: dict[str, int] = field(default_factory=dict)
    disturbed: str | None = None


@dataclass(frozen=True)
class Sweep:
    """All points of one engine; `best` is the one with the most throughput among those within `max_latency_ms`.

    Without a limit it is the one with the most throughput of all. Points that were disturbed don't count. `skipped`
    says why streams weren't measured.
    """

    engine: str
    engine_sha256: str
    device: str
    target_id: str
    points: list[Point]
    best: Point | None
    max_latency_ms: float | None
    skipped: dict[str, str]
    rounds: int
    interrupted: bool
    conditions: Conditions


@dataclass
class Cell:
    """A point while it is measured."""

    batch: int
    streams: int
    pool: list[Arrays]
    windows: list[np.ndarray] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    discarded: Counter[str] = field(default_factory=Counter)
    disturbed: str | None = None


def sweep(
    folder: Path,
    data: Path,
    params: BenchmarkParams,
    batches: Sequence[int],
    streams: Sequence[int],
    tell: Callable[[str], None],
    rounds: int = ROUNDS,
) -> Sweep:
    """Measure every batch size in every number of streams, in rounds, in an order drawn anew for each.

    Inputs are of the validation split; calls are timed by the host's clock, copies included. The limit is judged once
    for each number of streams, at the edge, so each time at a share of the error (Bonferroni). An interruption (Ctrl-C)
    ends it, and what was found until then is returned. Raises Fault for batches that the engine doesn't take, and
    Unavailable if it can't run here.
    """
    described = manifest.read(folder)
    _require(folder.name, described, batches, streams)
    inputs = measure.inputs_of(described.inputs, read(data / "validation.npz"), params.length)
    with ExitStack() as stack:
        sessions, skipped = opened(folder, streams, stack)
        watch = stack.enter_context(Monitor((sessions[0].device,), params))
        stack.enter_context(flags(described))
        pools = {batch: make_pool(inputs, batch, 2 * last_level_cache_bytes()) for batch in batches}
        cells = [Cell(b, s, pools[b]) for s in streams if s <= len(sessions) for b in batches]
        sure = 1 - (1 - params.confidence) / max(1, len({cell.streams for cell in cells}))
        interrupted = _rounds(cells, sessions, described.threads, params, watch, tell, rounds, calls_of(rounds, sure))
        conditions = watch.conditions()
    points = [_point(cell, params, sure) for cell in cells if len(cell.rates) > 1]
    return Sweep(
        engine=folder.name,
        engine_sha256=described.engine_sha256,
        device=described.device,
        target_id=target.fingerprint().id,
        points=points,
        best=best(points, params.max_latency_ms),
        max_latency_ms=params.max_latency_ms,
        skipped=skipped,
        rounds=rounds,
        interrupted=interrupted,
        conditions=conditions,
    )


def fit(points: Sequence[Point], limit: float | None) -> list[Point]:
    """The undisturbed points; under a limit, those of them that are known to keep it."""
    return [point for point in points if not point.disturbed and (limit is None or point.within)]


def best(points: Sequence[Point], limit: float | None) -> Point | None:
    """The point with the most throughput among those that are `fit`."""
    return max(fit(points, limit), key=lambda point: point.throughput_per_s.value, default=None)


def rate(values: np.ndarray, confidence: float) -> Interval:
    """The geometric mean of rates [n] of single windows, with Student's interval of their logarithms."""
    logs = energy.mean(np.log(values), confidence)
    return Interval(*(float(np.exp(v)) for v in (logs.value, logs.low, logs.high)))


def calls_of(rounds: int, confidence: float) -> int:
    """How many calls a window is to have at least, so that all rounds together bound the percentile that is judged."""
    return math.ceil(AMPLE * clustered.enough(JUDGED, rounds, confidence) / rounds)


def default_batches(max_batch: int) -> list[int]:
    """Powers of two up to the largest batch, and that."""
    return sorted({*(1 << i for i in range(max_batch.bit_length()) if 1 << i <= max_batch), max_batch})


def _rounds(
    cells: list[Cell],
    sessions: Sequence[Session],
    threads: int,
    params: BenchmarkParams,
    watch: Monitor,
    tell: Callable[[str], None],
    rounds: int,
    calls: int,
) -> bool:
    rng = np.random.default_rng(params.seed)
    try:
        # One after the other: backends compile and capture graphs at the first call of a shape.
        for session in sessions:
            for pool in {cell.batch: cell.pool for cell in cells}.values():
                session.run(pool[0])
                session.synchronize()
        for cell in cells:
            together(sessions[: cell.streams], cell.pool, params.warmup_ms / 1e3 / len(cells), 0)
        for number in range(rounds):
            for i in rng.permutation(len(cells)):
                _measure(cells[i], sessions[: cells[i].streams], threads, params, watch, calls)
            tell(f"round {number + 1} of {rounds}")
    except KeyboardInterrupt:
        return True
    return False


def _measure(
    cell: Cell, sessions: Sequence[Session], threads: int, params: BenchmarkParams, watch: Monitor, calls: int
) -> None:
    """One window; a disturbed one is made again, once."""
    watches: list[Callable[[], str | None]] = [watch.disturbed]
    if len(sessions) * threads <= target.cores():
        watches.append(Host(params.max_lost))  # More threads than cores wait for each other.
    for left in (1, 0):
        spun = settle()
        for look in watches:
            look()
        times, rate = together(sessions, cell.pool, params.window_ms / 1e3, calls)
        told = [spun, *(look() for look in watches)]
        reason = next((t for t in told if t), None)
        if reason is None or not left:
            break
        cell.discarded[reason] += 1
    cell.disturbed = reason or cell.disturbed
    cell.windows.append(np.array(times))
    cell.rates.append(rate * cell.batch)


def _point(cell: Cell, params: BenchmarkParams, sure: float) -> Point:
    judged = clustered.bounds(cell.windows, (JUDGED,), sure).get(f"p{JUDGED}")
    samples, bounds = np.concatenate(cell.windows), clustered.bounds(cell.windows, (50, JUDGED, 99), params.confidence)
    p50, p90, p99 = (percentile(samples, q) for q in (50, JUDGED, 99))
    return Point(
        batch=cell.batch,
        streams=cell.streams,
        p50=p50,
        p90=p90,
        p99=p99,
        n=len(samples),
        throughput_per_s=rate(np.array(cell.rates), params.confidence),
        within=_within(judged, params.max_latency_ms),
        bounds=bounds,
        discarded=dict(cell.discarded),
        disturbed=cell.disturbed,
    )


def _within(interval: Interval | None, limit: float | None) -> bool | None:
    if limit is None or interval is None:
        return None
    return True if interval.high <= limit else False if interval.low > limit else None


def _require(name: str, described: Manifest, batches: Sequence[int], streams: Sequence[int]) -> None:
    wrong = [b for b in batches if not 1 <= b <= described.max_batch]
    if wrong or not batches:
        raise Fault(
            f"{name} doesn't take that batch",
            got=", ".join(map(str, wrong)) or "none",
            expected=f"1 to {described.max_batch}",
            do="name others with --batches",
        )
    if not streams or min(streams) < 1:
        raise Fault(
            "no such number of streams",
            got=", ".join(map(str, streams)) or "none",
            expected="whole numbers of at least 1",
            do="name others with --streams",
        )

"""What a caller of an engine on a GPU waits for beside the GPU's own time: copies in and out, and the whole call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from scipy.stats import quantile_test

from tasks.disturbance import Host
from tasks.engines.protocol import DeviceSession, Session
from tasks.settings import BenchmarkParams
from tasks.stats import Interval
from tasks.target import last_level_cache_bytes
from tasks.timing import make_pool
from tasks.workloads.protocol import Arrays

CALLS, RETRIES = 60, 2


@dataclass(frozen=True)
class Transfer:
    """Milliseconds of a call by the host's clock: medians of `calls`, with their exact intervals at 95 %.

    `load_ms` is from NumPy arrays to the GPU, `run_ms` from the launch until the GPU is done, `fetch_ms` from there to
    NumPy arrays; `whole_ms` is one call of all three. The interval is by order statistics (Conover 1999, Practical
    Nonparametric Statistics, 3.2), and one of these calls, not of what another opening of the engine would take.
    `disturbed` says that the calls had to be used though something else was at work.
    """

    batch: int
    calls: int
    load_ms: Interval
    run_ms: Interval
    fetch_ms: Interval
    whole_ms: Interval
    disturbed: str | None = None


def of(
    session: Session, inputs: Arrays, params: BenchmarkParams, disturbed: Callable[[], str | None]
) -> Transfer | None:
    """Time the parts of calls on rotating `inputs` [n, …] at `params.batch`; None for an engine that isn't on a GPU.

    Calls that `disturbed` tells of, or that other processes held up, are made again, twice at most.
    """
    if not hasattr(session, "device_ms"):
        return None
    device = cast(DeviceSession, session)
    each = params.batch * sum(value[:1].nbytes for value in inputs.values())
    least = min(2 * last_level_cache_bytes(), 2 * CALLS * each)
    batches = itertools.cycle(make_pool(inputs, params.batch, least))
    start = time.perf_counter()
    while time.perf_counter() < start + params.warmup_ms / 1e3:
        device.run(next(batches))
    watches: list[Callable[[], str | None]] = [Host(params.max_lost), disturbed]
    for _ in range(1 + RETRIES):
        for watch in watches:
            watch()
        parts, whole = _calls(device, batches)
        if (told := next((said for watch in watches if (said := watch())), None)) is None:
            break
    load, run, fetch = (_median([part[i] for part in parts]) for i in range(3))
    return Transfer(params.batch, CALLS, load, run, fetch, _median(whole), told)


def _calls(device: DeviceSession, batches: Iterator[Arrays]) -> tuple[list[list[float]], list[float]]:
    """Milliseconds of the three parts of each call, and of another call as a whole after each."""
    parts, whole = [], []
    for _ in range(CALLS):
        batch, other = next(batches), next(batches)
        marks = [time.perf_counter()]
        device.load(batch)
        marks.append(time.perf_counter())
        device.launch()
        device.synchronize()
        marks.append(time.perf_counter())
        device.fetch()
        marks.append(time.perf_counter())
        parts.append([(after - before) * 1e3 for before, after in itertools.pairwise(marks)])
        start = time.perf_counter()
        device.run(other)
        device.synchronize()
        whole.append((time.perf_counter() - start) * 1e3)
    return parts, whole


def _median(samples: list[float]) -> Interval:
    found = quantile_test(samples, p=0.5)
    low, high = found.confidence_interval(0.95)
    ordered = sorted(samples)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return Interval(middle, float(low), float(high))

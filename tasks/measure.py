"""Interleaved timing of several engines: rounds, in random order, on rotating inputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tasks.engines.protocol import Session
from tasks.manifest import TensorSpec
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, percentile, ratio
from tasks.target import last_level_cache_bytes
from tasks.workloads.protocol import Arrays

STABLE = 0.05
SETTLE_CALLS = 3
MAX_POOL_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Latency of one engine's calls, in milliseconds per batch.

    `medians` holds one median a round, paired by round with the other engines' of the same
    measurement. A percentile is None where there are too few samples for it.
    """

    batch: int
    p50: float | None
    p90: float | None
    p99: float | None
    mean: float
    n: int
    throughput_per_s: float
    warm: bool
    medians: tuple[float, ...]


def inputs_of(specs: Sequence[TensorSpec], samples: Arrays, length: int | None) -> Arrays:
    """The samples' inputs [n, …], cut to `length` along a dynamic axis; contiguous."""
    return {
        spec.name: np.ascontiguousarray(
            samples[spec.name][tuple(slice(length) if isinstance(d, str) else slice(None) for d in spec.shape)]
        )
        for spec in specs
    }


def interleave(sessions: Mapping[str, Session], inputs: Arrays, params: BenchmarkParams) -> dict[str, Timing]:
    """Time every session once in each round, in an order drawn anew for each round.

    `inputs` [n, …] are cut into batches of `params.batch` and repeated until they outgrow
    the last-level cache, so that no engine reads its input from there. Each call is timed
    from the host, with the session's `synchronize`.
    """
    rng = np.random.default_rng(params.seed)
    pool = make_pool(inputs, params.batch, 2 * last_level_cache_bytes())
    turn = dict.fromkeys(sessions, 0)

    def call(name: str) -> float:
        session, batch = sessions[name], pool[turn[name] % len(pool)]
        turn[name] += 1
        start = time.perf_counter_ns()
        session.run(batch)
        session.synchronize()
        return (time.perf_counter_ns() - start) / 1e6

    def window(name: str) -> list[float]:
        for _ in range(SETTLE_CALLS):
            if call(name) > params.window_ms:
                break
        samples: list[float] = []
        end = time.perf_counter() + params.window_ms / 1e3
        while time.perf_counter() < end or not samples:
            samples.append(call(name))
        return samples

    warm = {name: _warm_up(partial(window, name), params) for name in sessions}
    rounds: dict[str, list[list[float]]] = {name: [] for name in sessions}
    for done in range(1, max(params.rounds, params.max_rounds) + 1):
        for name in rng.permutation(list(sessions)):
            rounds[str(name)].append(window(str(name)))
        if done % 5 == 0:
            print(f"round {done} of {params.rounds} to {params.max_rounds}", flush=True)
        if done >= params.rounds and _agreed(rounds, params):
            break
    return {name: _timing(rounds[name], params.batch, warm[name]) for name in sessions}


def speedup(timings: Mapping[str, Timing], name: str, versus: str, confidence: float) -> Interval:
    """How many times faster `name` is than `versus`, paired by round."""
    return ratio(np.array(timings[versus].medians), np.array(timings[name].medians), confidence)


def make_pool(inputs: Arrays, batch: int, min_bytes: int) -> list[Arrays]:
    """Batches of exactly `batch` samples, each with memory of its own, of `min_bytes` in all.

    Capped at 256 MiB. Samples repeat when there are too few of them.
    """
    n = len(next(iter(inputs.values())))
    sample_bytes = sum(v[:1].nbytes for v in inputs.values())
    count = max(4, min(min_bytes, MAX_POOL_BYTES) // max(1, sample_bytes * batch) + 1)
    repeated = {k: v[np.arange(count * batch) % n] for k, v in inputs.items()}
    return [{k: v[i : i + batch] for k, v in repeated.items()} for i in range(0, count * batch, batch)]


def load_average() -> float:
    """Processes that want a core, averaged over the last minute."""
    return os.getloadavg()[0]


def _warm_up(window: Callable[[], list[float]], params: BenchmarkParams) -> bool:
    """Run windows until two in a row agree within 5 %; False if ten times the warm-up didn't do."""
    start, last = time.perf_counter(), float("inf")
    while (elapsed := (time.perf_counter() - start) * 1e3) < 10 * params.warmup_ms:
        median = float(np.median(window()))
        if elapsed >= params.warmup_ms and abs(median - last) <= STABLE * median:
            return True
        last = median
    return False


def _agreed(rounds: Mapping[str, list[list[float]]], params: BenchmarkParams) -> bool:
    """Whether every ratio to the first engine is known within `params.max_width`.

    The rule looks at the width alone and never at the ratio, so that stopping doesn't favour
    an outcome.
    """
    medians = [np.array([np.median(r) for r in rounds[name]]) for name in rounds]
    return all(relative_width(ratio(medians[0], m, params.confidence)) <= params.max_width for m in medians[1:])


def relative_width(interval: Interval) -> float:
    """An interval's width over its value."""
    return (interval.high - interval.low) / interval.value


def _timing(rounds: list[list[float]], batch: int, warm: bool) -> Timing:
    samples = np.concatenate([np.array(r) for r in rounds])
    mean = float(samples.mean())
    return Timing(
        batch=batch,
        p50=percentile(samples, 50),
        p90=percentile(samples, 90),
        p99=percentile(samples, 99),
        mean=mean,
        n=len(samples),
        throughput_per_s=batch / mean * 1e3,
        warm=warm,
        medians=tuple(float(np.median(r)) for r in rounds),
    )

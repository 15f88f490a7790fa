"""The number of threads by measurement: on few cores, and beside other work, more are often slower."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from tasks.target import cores

ROUNDS = 5
LIMIT_S = 20.0
WORTH = 0.95


def choose(work: Callable[[], object], counts: tuple[int, ...] | None = None) -> int:
    """The fastest of `counts` (1 to the cores) for a piece of work; PyTorch is set to it, and a line says why.

    Each count runs the work once a round, interleaved, after one run to warm up; medians are
    compared. A larger count has to be 5 % faster, since it keeps cores from others.
    """
    counts = counts or tuple(range(1, cores() + 1))
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    start = time.monotonic()
    for turn in range(ROUNDS + 1):
        for count in counts:
            torch.set_num_threads(count)
            began = time.perf_counter()
            work()
            if turn or time.monotonic() - start > LIMIT_S:
                seconds[count].append(time.perf_counter() - began)
        if all(seconds.values()) and time.monotonic() - start > LIMIT_S:
            break
    medians = {count: statistics.median(taken) for count, taken in seconds.items()}
    best = pick(medians)
    torch.set_num_threads(best)
    told = ", ".join(f"{count}: {median * 1e3:.1f} ms" for count, median in medians.items())
    print(f"{best} thread{'s' if best > 1 else ''}, by the time of a few training steps ({told})", flush=True)
    return best


def pick(seconds: dict[int, float]) -> int:
    """The count that takes least, from few to many, each step up worth at least 5 %."""
    best, *more = sorted(seconds)
    for count in more:
        if seconds[count] < WORTH * seconds[best]:
            best = count
    return best

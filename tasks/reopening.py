"""A benchmark's measurements with both engines opened anew, each time in a process of its own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from tasks import manifest, measure
from tasks.data import read
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault
from tasks.monitor import Monitor
from tasks.settings import BenchmarkParams
from tasks.timing import Opening
from tasks.workloads.protocol import Arrays


def again(source: Path, baseline: Path, data: Path, batches: list[BenchmarkParams], family: int) -> list[list[Opening]]:
    """The second opening and those after it, each measured at every batch: [openings - 1, batches].

    A process keeps what it has chosen once, such as kernels and places in memory: a new one chooses anew. Raises
    Fault if one dies.
    """
    found, openings = [], batches[0].openings
    for number in range(2, openings + 1):
        print(f"opening {number} of {openings}", flush=True)
        seeded = [params.model_copy(update={"seed": params.seed + number}) for params in batches]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                found.append(pool.submit(_opened, source, baseline, data, seeded, family).result())
            except BrokenProcessPool as error:
                raise Fault(
                    f"{source.name} died as it was opened again",
                    got=str(error),
                    expected=f"{openings} openings (benchmark.openings)",
                    do="see the log for what it said last; memory may have run out",
                ) from None
    return found


def share(params: BenchmarkParams) -> BenchmarkParams:
    """What each opening gets of the rounds and the time; of several, none stops early."""
    if params.openings == 1:
        return params
    rounds = max(8, -(-params.rounds // params.openings))
    each = {"rounds": rounds, "max_rounds": rounds, "budget_s": params.budget_s / params.openings}
    return params.model_copy(update=each)


def at(
    engine: Session, baseline: Session, inputs: Arrays, params: BenchmarkParams, family: int, watch: Monitor
) -> Opening:
    """Two open sessions in the same rounds, at one batch."""
    if params.also:
        print(f"at batch {params.batch}", flush=True)
    sessions = {"engine": engine, "baseline": baseline}
    timings = measure.interleave(sessions, inputs, params, family=family, disturbed=watch.disturbed)
    return Opening(timings["engine"], timings["baseline"])


def _opened(source: Path, baseline: Path, data: Path, batches: list[BenchmarkParams], family: int) -> list[Opening]:
    inputs = measure.inputs_of(manifest.read(source).inputs, read(data / "validation.npz"), batches[0].length)
    with ExitStack() as stack:
        engine, against = (stack.enter_context(open_engine(folder)) for folder in (source, baseline))
        watch = stack.enter_context(Monitor((engine.device, against.device), batches[0]))
        return [at(engine, against, inputs, params, family, watch) for params in batches]

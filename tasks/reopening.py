"""A benchmark's measurements with both engines opened anew, each time in a process of its own."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasks import machine, manifest, measure
from tasks.data import read
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault, Unavailable, in_words
from tasks.monitor import Conditions, Monitor
from tasks.settings import BenchmarkParams, min_rounds
from tasks.timing import Opening
from tasks.workloads.protocol import Arrays

LEAVING_S = 30.0
Opened = tuple[list[Opening], Conditions]


def again(source: Path, baseline: Path, data: Path, batches: list[BenchmarkParams], family: int) -> list[Opened]:
    """The second opening and those after it: of each, the measurements at every batch, and the conditions.

    A process keeps what it has chosen once, such as kernels and places in memory: a new one chooses anew. Every other
    opens the baseline first, so that what the order does, falls on both. Raises Fault if one dies, and what it raised.
    """
    found, openings = [], batches[0].openings
    for number in range(2, openings + 1):
        print(f"opening {number} of {openings}", flush=True)
        seeded = [params.model_copy(update={"seed": params.seed + number}) for params in batches]
        found.append(_apart(source, baseline, data, seeded, family, number % 2 == 0))
    return found


def share(params: BenchmarkParams) -> BenchmarkParams:
    """What each opening gets of the rounds, the time and the width that the mean of all may have."""
    n = params.openings
    if n == 1:
        return params
    rounds = max(8, min_rounds(params.confidence), -(-params.rounds // n))
    most, width = max(rounds, -(-params.max_rounds // n)), min(params.max_width * n**0.5, 0.99)
    each = {"rounds": rounds, "max_rounds": most, "budget_s": params.budget_s / n, "max_width": width}
    return params.model_copy(update=each)


def time_both(
    engine: Session, baseline: Session, inputs: Arrays, params: BenchmarkParams, family: int, watch: Monitor
) -> Opening:
    """Two open sessions in the same rounds, at one batch."""
    if params.also:
        print(f"at batch {params.batch}", flush=True)
    sessions = {"engine": engine, "baseline": baseline}
    timings = measure.interleave(sessions, inputs, params, family=family, disturbed=watch.disturbed)
    return Opening(timings["engine"], timings["baseline"])


def _apart(
    source: Path, baseline: Path, data: Path, batches: list[BenchmarkParams], family: int, baseline_first: bool
) -> Opened:
    """`opened` in a new process, which ends with this one, and with what interrupts it."""
    context = get_context("spawn")
    answer, question = context.Pipe(duplex=False)
    given = (source, baseline, data, batches, family, baseline_first)
    child = context.Process(target=_answer, args=(question, os.getpid(), *given))
    child.start()
    question.close()
    try:
        found: Opened | Exception = answer.recv()
        child.join(LEAVING_S)
    except EOFError:
        child.join()
        raise Fault(
            f"{source.name} died as it was opened again",
            got=f"a process that ended with status {child.exitcode}",
            expected=f"{batches[0].openings} openings (benchmark.openings)",
            do="see the log for what it said last; memory may have run out",
        ) from None
    finally:
        child.kill()
        child.join()
    if isinstance(found, Exception):
        raise found
    return found


def _answer(question: Connection, parent: int, *given: Any) -> None:
    machine.die_with(parent)
    warnings.simplefilter("ignore")
    try:
        question.send(opened(*given))
    except Exception as error:
        question.send(error if isinstance(error, Fault | Unavailable) else RuntimeError(in_words(error)))


def opened(
    source: Path, baseline: Path, data: Path, batches: list[BenchmarkParams], family: int, baseline_first: bool
) -> Opened:
    """Both engines opened here, timed in the same rounds at every batch, and the conditions meanwhile."""
    inputs = measure.inputs_of(manifest.read(source).inputs, read(data / "validation.npz"), batches[0].length)
    with ExitStack() as stack:
        order = (baseline, source) if baseline_first else (source, baseline)
        sessions = [stack.enter_context(open_engine(folder)) for folder in order]
        engine, against = reversed(sessions) if baseline_first else sessions
        watch = stack.enter_context(Monitor((engine.device, against.device), batches[0]))
        return [time_both(engine, against, inputs, params, family, watch) for params in batches], watch.conditions()

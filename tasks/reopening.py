"""Measurements with all engines opened anew, each time in a process of its own."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tasks import machine, measure
from tasks.data import read
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault, Unavailable, in_words
from tasks.monitor import Conditions, Monitor, merged
from tasks.settings import BenchmarkParams, min_rounds
from tasks.timing import Timing
from tasks.workloads.protocol import Arrays

LEAVING_S = 30.0
Timings = dict[str, Timing]
Opened = tuple[list[Timings], Conditions]


@dataclass(frozen=True)
class Plan:
    """What is timed in common rounds: the engine folders by name, the inputs or their .npz file, how, batch by batch.

    Inputs are those that the first of them takes. With `turned`, the last is opened first. `family` and `fastest` are
    `measure.Measurement`'s.
    """

    folders: dict[str, Path]
    data: Path | Arrays
    batches: list[BenchmarkParams]
    family: int = 1
    fastest: bool = False
    turned: bool = False


def opened(plan: Plan) -> Opened:
    """The engines opened here: their timings at every batch, and the conditions."""
    samples = read(plan.data) if isinstance(plan.data, Path) else plan.data
    with ExitStack() as stack:
        order = reversed(plan.folders.items()) if plan.turned else plan.folders.items()
        sessions = {name: stack.enter_context(open_engine(folder)) for name, folder in order}
        sessions = {name: sessions[name] for name in plan.folders}
        inputs = measure.inputs_of(sessions[next(iter(plan.folders))].inputs, samples, plan.batches[0].length)
        watch = stack.enter_context(Monitor([session.device for session in sessions.values()], plan.batches[0]))
        return timed(plan, sessions, inputs, watch), watch.conditions()


def timed(plan: Plan, sessions: Mapping[str, Session], inputs: Arrays, watch: Monitor) -> list[Timings]:
    """Open sessions in common rounds, at every batch."""
    found = []
    for params in plan.batches:
        if params.also:
            print(f"at batch {params.batch}", flush=True)
        found.append(
            measure.interleave(
                sessions, inputs, params, family=plan.family, fastest=plan.fastest, disturbed=watch.disturbed
            )
        )
    return found


def again(plan: Plan) -> Iterator[Opened]:
    """The second opening and those after it, each in a new process, once it is asked for.

    A process keeps what it has chosen once, such as kernels and places in memory: a new one chooses anew. Every other
    opens the engines the other way round, so that what the order does, falls on all. Raises Fault if one dies, and what
    it raised.
    """
    openings = plan.batches[0].openings
    for number in range(2, openings + 1):
        print(f"opening {number} of {openings}", flush=True)
        seeded = [params.model_copy(update={"seed": params.seed + number}) for params in plan.batches]
        yield _apart(replace(plan, batches=seeded, turned=number % 2 == 0))


def all_openings(
    folders: dict[str, Path], data: Path, params: BenchmarkParams, family: int = 1, fastest: bool = False
) -> tuple[list[Timings], Conditions]:
    """The timings at `params.batch` of as many openings as a benchmark has, the first of them here; see `Plan`.

    Inputs are the validation split in the folder `data`.
    """
    plan = Plan(folders, data / "validation.npz", [share(params.model_copy(update={"also": ()}))], family, fastest)
    found = [opened(plan), *again(plan)]
    return [timings for (timings,), _ in found], merged([seen for _, seen in found])


def share(params: BenchmarkParams) -> BenchmarkParams:
    """What each opening gets of the rounds, the time and the width that the mean of all may have."""
    n = params.openings
    if n == 1:
        return params
    rounds = max(8, min_rounds(params.confidence), -(-params.rounds // n))
    most, width = max(rounds, -(-params.max_rounds // n)), min(params.max_width * n**0.5, 0.99)
    each = {"rounds": rounds, "max_rounds": most, "budget_s": params.budget_s / n, "max_width": width}
    return params.model_copy(update=each)


def _apart(plan: Plan) -> Opened:
    """`opened` in a new process, which ends with this one, and with what interrupts it."""
    context = get_context("spawn")
    answer, question = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(question, os.getpid(), plan))
    try:
        child.start()
        question.close()
        found: Opened | Exception = answer.recv()
        child.join(LEAVING_S)
    except (EOFError, BrokenPipeError):
        child.join(LEAVING_S)
        raise Fault(
            f"a process that opened {', '.join(folder.name for folder in plan.folders.values())} again died",
            got=f"status {child.exitcode}",
            expected=f"{plan.batches[0].openings} openings, each in a process of its own",
            do="see what it said last; memory may have run out; a GPU for one process at a time needs one opening",
        ) from None
    finally:
        if child.pid:
            child.kill()
            child.join()
    if isinstance(found, Exception):
        raise found
    return found


def _answer(question: Connection, parent: int, plan: Plan) -> None:
    machine.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent's Ctrl-C kills it.
    warnings.simplefilter("ignore")
    try:
        question.send(opened(plan))
    except Exception as error:
        question.send(error if isinstance(error, Fault | Unavailable) else RuntimeError(in_words(error)))

"""Several sessions of one engine, each in a thread of its own, run at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tasks.engines.protocol import Session, imported, open_engine
from tasks.errors import Fault, Unavailable
from tasks.manifest import Manifest
from tasks.workloads.protocol import Arrays

LONGEST = 20


def together(
    sessions: Sequence[Session], pool: Sequence[Arrays], seconds: float, least: int
) -> tuple[list[float], float]:
    """Run the sessions at the same time for `seconds`, and on until they made `least` calls, 20 times as long at most.

    Returns the calls' milliseconds, and calls a second: of each session over its own time, added up. What a session
    raises is raised here; an interruption waits for the calls that are under way.
    """
    share = -(-least // len(sessions))
    start, stop = threading.Barrier(len(sessions)), threading.Event()
    found: list[tuple[list[float], float]] = []
    failed: list[Exception] = []

    def stream(turn: int, session: Session) -> None:
        times: list[float] = []
        try:
            start.wait()
            began = last = time.perf_counter()
            while not stop.is_set():
                session.run(pool[turn % len(pool)])
                session.synchronize()
                now = time.perf_counter()
                times.append((now - last) * 1e3)
                last, turn = now, turn + len(sessions)
                if last >= began + (seconds if len(times) >= share else LONGEST * seconds):
                    break
            found.append((times, len(times) / (last - began) if times else 0.0))
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            failed.append(error)
            stop.set()
            start.abort()

    threads = [threading.Thread(target=stream, args=pair, daemon=True) for pair in enumerate(sessions)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    if failed:
        raise failed[0]
    return [t for times, _ in found for t in times], sum(rate for _, rate in found)


def opened(folder: Path, streams: Sequence[int], stack: ExitStack) -> tuple[list[Session], dict[str, str]]:
    """As many sessions as the most streams need; the first has to open, and why further ones didn't is told.

    A backend whose sessions fork gives further ones on the same engine, so that weights are there once.
    """
    sessions = [stack.enter_context(open_engine(folder))]
    fork = getattr(sessions[0], "fork", None)
    while len(sessions) < max(streams):
        try:
            sessions.append(stack.enter_context(fork() if fork else open_engine(folder)))
        except (Fault, Unavailable, MemoryError) as error:
            why = error.line if isinstance(error, Fault) else " ".join(str(error).split())
            told = f"no session {len(sessions) + 1}: {why or 'not enough memory'}"
            return sessions, {str(n): told for n in streams if n > len(sessions)}
    return sessions, {}


@contextlib.contextmanager
def flags(described: Manifest) -> Iterator[None]:
    """PyTorch's global flags, held for all sessions at once: they set and restore them call by call."""
    if described.backend not in ("eager", "inductor"):
        yield
        return
    forms = imported("torch_forms")
    with forms.flags(described.device, described.settings["precision"], described.threads):
        yield

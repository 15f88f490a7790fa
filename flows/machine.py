"""Who may use the machine: stages side by side up to a thread per core, or one that measures, alone."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tasks import machine


class Machine:
    """A slot for each of `cores`, given to the most urgent first, and the lock file that other processes respect."""

    def __init__(self, cores: int, lock_file: Path = machine.LOCK) -> None:
        self._cores, self._free, self._path = cores, cores, lock_file
        self._changed, self._numbers = threading.Condition(), count()
        self._waiting: list[tuple[float, int]] = []

    @contextmanager
    def hold(self, alone: bool, threads: int | None = 1, urgency: float = 0.0) -> Iterator[None]:
        """Wait for a slot for each of `threads` (None: all cores), or for the whole machine; keep them for the block.

        The most urgent waits for its slots first, and nobody overtakes it; of equals, who came first.
        """
        if alone:
            with machine.hold(True, self._path):
                yield
            return
        with self._slots(min(threads or self._cores, self._cores), urgency), machine.hold(False, self._path):
            yield

    @contextmanager
    def _slots(self, wanted: int, urgency: float) -> Iterator[None]:
        with self._changed:
            ticket = (-urgency, next(self._numbers))
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._waiting[0] == ticket and self._free >= wanted)
            heapq.heappop(self._waiting)
            self._free -= wanted
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()

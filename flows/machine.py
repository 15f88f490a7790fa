"""Who may use the machine: stages side by side up to a thread per core, or one that measures, alone."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tasks import machine

PATIENCE_S = 20.0


class Machine:
    """A slot for each of `cores`, given to the most urgent first, and the lock file that other processes respect."""

    def __init__(self, cores: int, lock_file: Path = machine.LOCK) -> None:
        self._cores, self._free, self._path = cores, cores, lock_file
        self._changed, self._numbers = threading.Condition(), count()
        self._waiting: list[tuple[float, int]] = []
        self._expected: dict[str, tuple[float, float]] = {}

    def expect(self, urgencies: Mapping[str, float]) -> None:
        """Keep free slots for stages that are about to come, by name, from those that are less urgent; for 20 s."""
        until = time.monotonic() + PATIENCE_S
        with self._changed:
            self._expected |= {name: (urgency, until) for name, urgency in urgencies.items()}

    def came(self, name: str) -> None:
        """Wait for a stage no longer: it came, or turned out to have nothing to do."""
        with self._changed:
            self._expected.pop(name, None)
            self._changed.notify_all()

    @contextmanager
    def hold(self, alone: bool, threads: int | None = 1, urgency: float = 0.0, name: str = "") -> Iterator[None]:
        """Wait for a slot for each of `threads` (None: all cores), or for the whole machine; keep them for the block.

        The most urgent waits for its slots first, and nobody overtakes it, not even while it is expected by its
        `name`; of equals, who came first.
        """
        if alone:
            self.came(name)
            with machine.hold(True, self._path):
                yield
            return
        with self._slots(min(threads or self._cores, self._cores), urgency, name), machine.hold(False, self._path):
            yield

    @contextmanager
    def _slots(self, wanted: int, urgency: float, name: str) -> Iterator[None]:
        with self._changed:
            ticket = (-urgency, next(self._numbers))
            heapq.heappush(self._waiting, ticket)
            self.came(name)
            while not (self._waiting[0] == ticket and self._free >= wanted and self._most_expected() <= urgency):
                self._changed.wait(1.0 if self._expected else None)
            heapq.heappop(self._waiting)
            self._free -= wanted
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()

    def _most_expected(self) -> float:
        """The urgency of the most urgent stage that is still expected; less than any if there is none."""
        now = time.monotonic()
        self._expected = {name: one for name, one in self._expected.items() if one[1] > now}
        return max((urgency for urgency, _ in self._expected.values()), default=float("-inf"))

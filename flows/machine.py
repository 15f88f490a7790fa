"""Who may use the machine: stages side by side up to a thread per core, or one that measures, alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks import machine


class Machine:
    """A slot for each of `cores`, and the lock file that other processes respect."""

    def __init__(self, cores: int, lock_file: Path = machine.LOCK) -> None:
        self._cores, self._slots, self._turn, self._path = (
            cores,
            threading.Semaphore(cores),
            threading.Lock(),
            lock_file,
        )

    @contextmanager
    def hold(self, alone: bool, threads: int | None = 1) -> Iterator[None]:
        """Wait for a slot for each of `threads` (None: all cores), or for the whole machine; keep them for the block.

        One stage at a time gathers its slots, so that none waits for what another waiting one holds.
        """
        if alone:
            with machine.hold(True, self._path):
                yield
            return
        with ExitStack() as held:
            with self._turn:
                for _ in range(min(threads or self._cores, self._cores)):
                    held.enter_context(self._slots)
            held.enter_context(machine.hold(False, self._path))
            yield

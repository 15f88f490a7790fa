"""Who may use the machine: up to one stage per core side by side, or one that measures, alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks import machine


class Machine:
    """Slots for `cores` stages at once, and the lock file that other processes respect."""

    def __init__(self, cores: int, lock_file: Path = machine.LOCK) -> None:
        self._slots, self._path = threading.Semaphore(cores), lock_file

    @contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        """Wait for a slot beside others, or for the whole machine, and keep it for the block."""
        if alone:
            with machine.hold(True, self._path):
                yield
        else:
            with self._slots, machine.hold(False, self._path):
                yield

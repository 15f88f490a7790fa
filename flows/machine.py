"""Who may use the machine: up to one stage per core side by side, or one that measures, alone.

Threads of this process share the cores through a semaphore. Across processes of this user a
lock file (flock(2)) is held shared by stages that compute and exclusively by those that measure.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Machine:
    """Slots for `cores` stages at once."""

    def __init__(self, cores: int, lock_file: Path | None = None) -> None:
        self._slots = threading.Semaphore(cores)
        self._path = lock_file or Path(tempfile.gettempdir()) / f"enginesmith-{os.getuid()}.lock"

    @contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        """Wait for a slot beside others, or for the whole machine, and keep it for the block."""
        if alone:
            with self._file(fcntl.LOCK_EX):
                yield
        else:
            with self._slots, self._file(fcntl.LOCK_SH):
                yield

    @contextmanager
    def _file(self, kind: int) -> Iterator[None]:
        with self._path.open("a") as stream:
            fcntl.flock(stream, kind)
            try:
                yield
            finally:
                fcntl.flock(stream, fcntl.LOCK_UN)

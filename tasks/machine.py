"""One lock file for this user's stages: held shared by those that compute, alone by those that measure.

ENGINESMITH_LOCK names another file, for users who share a machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

LOCK = Path(os.environ.get("ENGINESMITH_LOCK", f"/tmp/enginesmith-{os.getuid()}.lock"))


@contextmanager
def hold(alone: bool, path: Path = LOCK) -> Iterator[None]:
    """Hold the lock (flock(2)) for the block; it goes with the process, however that ends."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it dies (prctl(2), Linux); exit if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(143)


def step(alone: bool) -> AbstractContextManager[None]:
    """The lock for a step of the line: the flow holds it for those that it starts, else the step takes it itself."""
    return nullcontext() if os.environ.get("ENGINESMITH_PARENT") else hold(alone)

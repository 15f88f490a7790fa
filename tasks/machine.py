"""Locks: one for a folder's run, and one for this user's stages, shared by those that compute, alone for measuring.

ENGINESMITH_LOCK names another file, for users who share a machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from tasks import layout
from tasks.errors import Fault

WAIT_S = 0.2
LOCK = Path(os.environ.get("ENGINESMITH_LOCK", f"/tmp/enginesmith-{os.getuid()}.lock"))


@contextmanager
def only_run() -> Iterator[None]:
    """Hold the project's run lock; Fault if another run is at work in this folder."""
    from filelock import FileLock, Timeout

    layout.STATE.mkdir(exist_ok=True)
    lock = FileLock(layout.STATE / "run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Fault(
            "another run is at work in this folder",
            got="its lock is held",
            expected="one run at a time",
            do="wait for it, or end it with Ctrl-C",
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def hold(alone: bool, path: Path = LOCK, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock (flock(2)) for the block; it goes with the process, however that ends.

    `waiting` is called every 0.2 s until it is there, and ends that by what it raises.
    """
    opened, how = _opened(path), fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        while waiting:
            with suppress(BlockingIOError):
                fcntl.flock(opened, how | fcntl.LOCK_NB)
                break
            waiting()
            time.sleep(WAIT_S)
        else:
            fcntl.flock(opened, how)
        yield
    finally:
        os.close(opened)


def _opened(path: Path) -> int:
    """The lock file, made if it isn't there; another user's is opened for reading, which is enough."""
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it dies (prctl(2), Linux); exit if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(143)


def step(alone: bool) -> AbstractContextManager[None]:
    """The lock for a step of the line: the flow holds it for those that it starts, else the step takes it itself."""
    return nullcontext() if os.environ.get("ENGINESMITH_PARENT") else hold(alone)

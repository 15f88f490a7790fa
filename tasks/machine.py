"""One lock file for this user's stages: held shared by those that compute, alone by those that measure."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path("/tmp") / f"enginesmith-{os.getuid()}.lock"


@contextmanager
def hold(alone: bool, path: Path = LOCK) -> Iterator[None]:
    """Hold the lock (flock(2)) for the block; it goes with the process, however that ends."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield

"""Build one engine, and prove that it opens."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tasks import manifest
from tasks.engines.protocol import backend
from tasks.errors import Fault
from tasks.files import atomic_folder, size_bytes
from tasks.settings import BuildParams


@dataclass(frozen=True)
class BuildReport:
    """The engine's backend, bytes and digest, the seconds it took, and whether it opened here."""

    backend: str
    backend_version: str
    engine_bytes: int
    engine_sha256: str
    seconds: float
    opened: str


def build(source: Path, target: Path, params: BuildParams) -> BuildReport:
    """Write the engine and its manifest to `target`, then open it in a fresh process.

    A backend that can't run here leaves the engine with the reason in `opened`. Raises Fault
    if the build fails or a fresh process can't load what was built.
    """
    start = time.monotonic()
    with atomic_folder(target) as scratch:
        folder = scratch / target.name
        folder.mkdir()
        described = backend(params.backend).build(source, folder, params)
        manifest.write(folder, described)
        opened = prove_loading(folder)
        for file in folder.iterdir():
            file.rename(scratch / file.name)
        folder.rmdir()
    size = size_bytes(target / described.engine_file)
    return BuildReport(
        described.backend, described.backend_version, size, described.engine_sha256, time.monotonic() - start, opened
    )


def prove_loading(folder: Path) -> str:
    """Open an engine in a process of its own: "yes", or why its backend can't run here.

    Raises Fault if the process fails or is killed, as a broken loader may do.
    """
    run = subprocess.run([sys.executable, "-c", _LOAD, str(folder)], capture_output=True, text=True)
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        raise Fault(
            f"engine {folder.name} doesn't load",
            got=last,
            expected="an engine that a fresh process opens",
            do="try another backend version, or report it",
        )
    return run.stdout.strip().splitlines()[-1]


_LOAD = """
import sys
from pathlib import Path
from tasks.engines.protocol import open_engine
from tasks.errors import Unavailable
try:
    with open_engine(Path(sys.argv[1])):
        print("yes")
except Unavailable as reason:
    print(reason)
"""

"""One tiny project on which the flow has run, and copies of it to break."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Built:
    """A project after its first flow run, a copy of how that left it, and what it printed."""

    folder: Path
    kept: Path
    first: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def built(once: Callable[..., Path], new_project: Callable[[Path], Path], command: Callable[..., Any]) -> Built:
    def make(folder: Path) -> None:
        project = new_project(folder / "project")
        first = command(project, "python", "-m", "flows")
        shutil.copytree(project, folder / "kept", symlinks=True)
        (folder / "first.json").write_text(json.dumps([first.returncode, first.stdout, first.stderr]))

    folder = once("built", make)
    first = json.loads((folder / "first.json").read_text())
    return Built(folder / "project", folder / "kept", subprocess.CompletedProcess(("python", "-m", "flows"), *first))


@pytest.fixture
def copy(built: Built, tmp_path: Path, rehome: Callable[[Path, Path], None]) -> Path:
    """A copy of the built project, to be changed, with a store of its own."""
    folder = tmp_path / "project"
    shutil.copytree(built.kept, folder, symlinks=True)
    rehome(folder, built.folder)
    return folder

"""One tiny project on which the flow has run, and copies of it to break."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Built:
    """A project after its first flow run, and what that run printed."""

    folder: Path
    first: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Path], command) -> Built:
    folder = tmp_path_factory.mktemp("built") / "project"
    folder.mkdir()
    new_project(folder)
    return Built(folder, command(folder, "python", "-m", "flows"))


@pytest.fixture
def copy(built: Built, tmp_path: Path) -> Path:
    """A copy of the built project, to be changed; its MLflow store says that it is elsewhere."""
    folder = tmp_path / "project"
    shutil.copytree(built.folder, folder, symlinks=True)
    return folder

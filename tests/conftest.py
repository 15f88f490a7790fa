"""Fixtures: a whole project in a folder of its own, with tiny params."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

# Tests measure nothing that counts: they neither wait for a real measurement nor for each other's.
LOCK = os.environ["ENGINESMITH_LOCK"] = f"{tempfile.gettempdir()}/enginesmith-test-{os.getpid()}.lock"
ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "flows",
    "tasks",
    "infra",
    "tests/tiny",
    "dvc.yaml",
    "pyproject.toml",
    "constraints.txt",
    ".dvc/config",
    ".dvc/plots",
    ".dvcignore",
    ".gitignore",
)


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command in a project folder: its own code, its own stores, no telemetry."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "ENGINESMITH_", "DVC_"))}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "DO_NOT_TRACK": "true",
        "DVC_NO_ANALYTICS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "ENGINESMITH_LOCK": LOCK,
    }


@pytest.fixture(autouse=True)
def real_gpu(request: pytest.FixtureRequest) -> None:
    """Tests with the mark `gpu` are skipped where there is none."""
    if request.node.get_closest_marker("gpu"):
        from tasks import target

        if target.fingerprint().gpu_name is None:
            pytest.skip("no NVIDIA GPU here")


def run(folder: Path, *command: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command in a project folder; `python` is this interpreter."""
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout)


def make_project(folder: Path) -> Path:
    """A git and DVC repository in `folder` with this checkout's code and the tiny params."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    shutil.copyfile(ROOT / "tests/tiny/params.yaml", folder / "params.yaml")
    for command in (
        ["git", "init", "-q"],
        ["git", "config", "user.name", "Test"],
        ["git", "config", "user.email", "test@example.invalid"],
        ["git", "add", "-A"],
        ["git", "commit", "-qm", "start"],
        ["dvc", "remote", "modify", "local", "url", str(folder.parent / "storage")],
        ["python", "-m", "tasks", "target"],
    ):
        done = run(folder, *command)
        assert done.returncode == 0, done.stderr
    return folder


def edit_params(folder: Path, change: Callable[[dict], None]) -> None:
    """Change a project's params.yaml as a person would."""
    yaml, path = YAML(typ="safe", pure=True), folder / "params.yaml"
    params = yaml.load(path.read_text())
    change(params)
    with path.open("w") as stream:
        yaml.dump(params, stream)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh tiny project, to be copied."""
    folder = tmp_path_factory.mktemp("template") / "project"
    folder.mkdir()
    return make_project(folder)


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    """A fresh tiny project."""
    folder = tmp_path / "project"
    shutil.copytree(template, folder, symlinks=True)
    return folder


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`command(folder, *words)` runs a command in a project folder, with its environment."""
    return run


@pytest.fixture(scope="session")
def edit() -> Callable[[Path, Callable[[dict], None]], None]:
    """`edit(folder, change)` changes a project's params.yaml."""
    return edit_params


@pytest.fixture(scope="session")
def new_project() -> Callable[[Path], Path]:
    """`new_project(folder)` makes a fresh tiny project in an empty folder."""
    return make_project

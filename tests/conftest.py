"""Fixtures: a whole project in a folder of its own, with tiny params."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from ruamel.yaml import YAML

# Tests measure nothing that counts: they neither wait for a real measurement nor for each other's.
LOCK = os.environ["ENGINESMITH_LOCK"] = f"{tempfile.gettempdir()}/enginesmith-test-{os.getpid()}.lock"
# Tests run side by side, and with more threads each they would wait for each other. Inductor's compiling processes
# each import PyTorch, for a few small kernels; and what the processor says of its vector units need not be tried out.
for _name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_VEC_ISA_OK"):
    os.environ.setdefault(_name, "1")
ROOT = Path(__file__).resolve().parent.parent
# What takes longest goes first, so that at the end no worker is left alone with it.
SLOWEST = (
    "tests/flows/test_optimize.py",
    "tests/infra/test_schedule.py",
    "tests/tasks/engines/test_engines.py",
    "tests/flows/test_driver.py",
    "tests/tasks/engines/test_inductor.py",
    "tests/infra/test_gpu_line.py",
    "tests/tasks/engines/test_tensorrt_formats.py",
    "tests/tasks/registry/test_promote.py",
    "tests/tasks/test_quantize_formats.py",
)
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
    """The environment of a command in a project folder: its own code, compiled once, and stores, no telemetry."""
    left = ("PREFECT_", "MLFLOW_", "ENGINESMITH_", "DVC_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "DO_NOT_TRACK": "true",
        "DVC_NO_ANALYTICS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "ENGINESMITH_LOCK": LOCK,
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first; else in order."""
    places = {ROOT / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """What is imported by now stays, and needn't be looked through at every collection of garbage."""
    gc.freeze()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: a folder that `make(folder)` fills once for all workers of a run; who comes second waits.

    It is read only: what a test changes, it copies.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, whole = shared / name, shared / f"{name}.whole"
        with FileLock(shared / f"{name}.lock"):
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return made


@cache
def gpu_name() -> str | None:
    from tasks import target

    return target.fingerprint().gpu_name


@pytest.fixture(autouse=True)
def real_gpu(request: pytest.FixtureRequest) -> None:
    """Tests with the mark `gpu` are skipped where there is none."""
    if request.node.get_closest_marker("gpu") and gpu_name() is None:
        pytest.skip("no NVIDIA GPU here")


def run(folder: Path, *command: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command in a project folder; `python` is this interpreter."""
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout)


# A busy machine spoils some rounds: of twenty, several may be off, and the answer is still clear.
TOLERANT = {"rounds": 20, "max_rounds": 20, "window_ms": 20, "warmup_ms": 150}


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
    edit_params(folder, lambda raw: raw["benchmark"].update(TOLERANT))
    hurry(folder)
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


HURRIED = {
    "tasks/peaks.py": (r"^BUDGET_S, CALM = [\d.]+", "BUDGET_S, CALM = 0.3"),
    "tasks/timing.py": (r"^MAX_POOL_BYTES = .+", "MAX_POOL_BYTES = 1 << 20"),
}


def hurry(folder: Path) -> None:
    """Have a project probe the machine in a moment, and time on inputs from the cache: no number counts here."""
    for name, (line, short) in HURRIED.items():
        text, found = re.subn(line, short, (folder / name).read_text(), flags=re.MULTILINE)
        assert found == 1, f"{name} has no line {line}"
        (folder / name).write_text(text)


def edit_params(folder: Path, change: Callable[[dict], None]) -> None:
    """Change a project's params.yaml as a person would."""
    yaml, path = YAML(typ="safe", pure=True), folder / "params.yaml"
    params = yaml.load(path.read_text())
    change(params)
    with path.open("w") as stream:
        yaml.dump(params, stream)


@pytest.fixture(scope="session")
def template(once: Callable[..., Path]) -> Path:
    """A fresh tiny project, to be copied."""
    return once("template", lambda folder: make_project(folder / "project")) / "project"


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    """A fresh tiny project."""
    folder = tmp_path / "project"
    shutil.copytree(template, folder, symlinks=True)
    return folder


@pytest.fixture(scope="session")
def rehome() -> Callable[[Path, Path], None]:
    """`rehome(folder, old)` lets the MLflow store of a copied project say that it is in its new folder."""

    def change(folder: Path, old: Path) -> None:
        with sqlite3.connect(folder / "mlflow.db") as store:
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                store.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old.as_uri(), folder.as_uri()))
        store.close()
        seen, status = folder / ".enginesmith/store.json", (folder / "mlflow.db").stat()
        if seen.is_file():
            stamp = {**json.loads(seen.read_text()), "store": [status.st_size, status.st_mtime_ns]}
            seen.write_text(json.dumps(stamp))

    return change


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`command(folder, *words)` runs a command in a project folder, with its environment."""
    return run


@pytest.fixture(scope="session")
def edit() -> Callable[[Path, Callable[[dict], None]], None]:
    """`edit(folder, change)` changes a project's params.yaml."""
    return edit_params


@pytest.fixture(scope="session")
def new_project(template: Path) -> Callable[[Path], Path]:
    """`new_project(folder)` makes a fresh tiny project in an empty folder."""
    return lambda folder: Path(shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True))

"""Fixtures: one small line of artifacts, made once and shared by the tests of the steps."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from tasks import layout, target, timing
from tasks.__main__ import run as run_step
from tasks.params import Tree, load
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parent.parent / "tiny"


@pytest.fixture(scope="session", autouse=True)
def small_pools() -> Iterator[None]:
    """Inputs needn't outgrow the cache where no time counts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(timing, "MAX_POOL_BYTES", 1 << 20)
        yield


@pytest.fixture(scope="session")
def workload_path() -> Path:
    """The tiny workload's file, absolute."""
    return TINY / "workload.py"


@pytest.fixture(scope="session")
def tiny(workload_path: Path) -> Any:
    """The tiny workload, with its oracle."""
    return load_workload(workload_path)


@pytest.fixture(scope="session")
def tiny_params(workload_path: Path) -> dict[str, Any]:
    """The tiny params with an absolute workload, so that they hold in any folder; engines of what is installed here."""
    raw = YAML(typ="safe", pure=True).load((TINY / "params.yaml").read_text())
    missing = {name for name in ("tensorrt", "tensorrt_rtx") if importlib.util.find_spec(name) is None}
    built = {name: asked for name, asked in raw["build"].items() if asked["backend"] not in missing}
    return {**raw, "workload": str(workload_path), "build": built}


@pytest.fixture(scope="session")
def line(once: Callable[..., Path], tiny_params: dict[str, Any]) -> Path:
    """A folder where every step of the tiny params up to benchmark has run. Read only."""

    def make(folder: Path) -> None:
        (folder / layout.PARAMS).write_text(json.dumps(tiny_params))
        with contextlib.chdir(folder):
            target.refresh()
            tree = load(layout.PARAMS)
            run_step("data", None)
            for name, node in tree.nodes.items():
                run_step(node.step, name)
            for name in tree.engines:
                run_step("evaluate", name)
                run_step("benchmark", name)

    return once("line", make)


@pytest.fixture
def project_copy(line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory is a copy of the line that a test may change."""
    folder = tmp_path / "project"
    shutil.copytree(line, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def tree(project_copy: Path) -> Tree:
    """The tree of the copied line, the working directory."""
    return load(layout.PARAMS)


@pytest.fixture(scope="session")
def artifact(line: Path) -> Any:
    """`artifact(name)`: the folder of an artifact of the line."""
    return lambda name: line / layout.artifact(name)


@pytest.fixture(scope="session")
def data_folder(line: Path) -> Path:
    """The splits of the line."""
    return line / layout.DATA


@pytest.fixture
def write_workload(tmp_path: Path) -> Any:
    """`write_workload(text)`: the path of a workload file of a test's own."""

    def write(text: str, name: str = "own.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def make_workload() -> Any:
    """`make_workload(model, inputs, outputs)`: a workload for a model of a test's own."""

    def make(model: Any, inputs: dict[str, Any], outputs: tuple[str, ...] = ("logits",)) -> ModuleType:
        import torch

        task = ModuleType("made_workload")
        task.NAME, task.PREPROCESSING, task.INPUTS, task.OUTPUTS = "made", "made-v1", inputs, outputs
        task.METRICS = {"accuracy": lambda out, y: (out[outputs[0]].argmax(1) == y).astype(np.float64)}
        task.model = lambda **_: model
        task.loss = lambda out, y: torch.nn.functional.cross_entropy(out[outputs[0]], y)
        return task

    return make


@pytest.fixture
def free_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a driver's leaks into the commands under test."""
    for name in [n for n in os.environ if n.startswith("ENGINESMITH_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def text() -> Any:
    """The tiny text workload: a BERT of four layers on a dynamic axis, with its oracle."""
    return load_workload(TINY / "text.py")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No training goes on from another test's state."""
    monkeypatch.setattr(layout, "STATE", tmp_path / ".enginesmith")


class PretendedGpu:
    """As `CudaSession`, of a pretended GPU with a clock of its own: what is enqueued is done at once."""

    inputs = outputs = ()
    device = "cuda"
    memory_bytes = 5
    waits = False

    def __init__(self, ms: float, clock: SimpleNamespace) -> None:
        self.ms, self.clock, self._enqueue = ms, clock, None

    @property
    def now(self) -> float:
        return float(self.clock.now)

    def work(self, ms: float) -> None:
        self.clock.now += ms

    def load(self, batch: Any) -> None:
        self._enqueue: Any = lambda: self.work(self.ms)

    def _loaded(self) -> Any:
        return self._enqueue

    def launch(self) -> None:
        self._loaded()()

    def fetch(self) -> Any:
        return {"y": 1}

    def device_ms(self, calls: int) -> float:
        start = self.now
        for _ in range(calls):
            self._loaded()()
        return (self.now - start) / calls

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    """`on_device(ms)`: a session of so long calls, on a GPU that spins two million cycles a millisecond."""
    from tasks import planted

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(planted, "spinner", lambda session: lambda cycles: session.work(cycles / 2e6))
    monkeypatch.setattr(planted, "time", SimpleNamespace(perf_counter=lambda: clock.now / 1e3))
    return lambda ms: PretendedGpu(ms, clock)


@pytest.fixture(scope="session")
def fake_nvml() -> ModuleType:
    """The module of a card that says what a test wants."""
    spec = importlib.util.spec_from_file_location("fake_nvml", Path(__file__).with_name("fake_nvml.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

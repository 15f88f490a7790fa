"""A small project, made once: two models of very different speed as engines, measured and compared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import layout, params, target, tracking
from tasks.compare import compare
from tasks.files import read_json, write_json
from tasks.params import Tree
from tasks.promote import PromoteReport, promote
from tasks.record import RecordReport, record
from tasks.target import Target

MAKE = """
import shutil
from tasks import layout, tracking
from tasks.__main__ import run
from tasks.files import read_json, write_json
run("data", None)
for name in ("wide", "thin"):
    run("train", name), run("export", f"{name}-onnx")
for name in ("wide-eager", "wide-ort", "thin-ort"):
    run("build", name), run("evaluate", name), run("benchmark", name)
# Recorded latencies in ms per batch that don't depend on what else this machine does.
for name, latency in (("wide-eager", 8.0), ("wide-ort", 4.0), ("thin-ort", 0.5)):
    path = layout.report("benchmark", name)
    raw = read_json(path)
    medians = {"timing": latency, "baseline": 8.0}
    for key, value in medians.items():
        raw[key] |= {"p50": value, "medians": [value * (1 + i / 1000) for i in range(20)]}
    write_json(path, {**raw, "unstable": None})
run("compare", None)
tracking.client().search_experiments()
shutil.copyfile("mlflow.db", "empty.db")
run("record", None)
"""
PARAMS: dict[str, Any] = {
    "baseline": "wide-eager",
    "data": {"seed": 1, "train": 320, "calibration": 32, "validation": 64, "test": 150},
    "train": {
        "wide": {"epochs": 2, "batch": 32, "lr": 1e-2, "model": {"width": 48}},
        "thin": {"epochs": 4, "batch": 32, "lr": 1e-2, "model": {"width": 4}},
    },
    "export": {"wide-onnx": {"from": "wide"}, "thin-onnx": {"from": "thin"}},
    "build": {
        "wide-eager": {"from": "wide", "backend": "eager"},
        "wide-ort": {"from": "wide-onnx", "backend": "onnxruntime"},
        "thin-ort": {"from": "thin-onnx", "backend": "onnxruntime"},
    },
    "benchmark": {"batch": 16, "openings": 1, "rounds": 20, "max_rounds": 20, "window_ms": 10, "warmup_ms": 100}
    | {"max_width": 0.99, "max_lost": 1000, "energy_s": 0.05},
    "gates": {"accuracy_change": {"min": -0.4}, "speedup": {"min": 1.0}},
}


@dataclass(frozen=True)
class Place:
    """A copy of the project, which is the working directory, with an MLflow store of its own."""

    root: Path
    tree: Tree
    here: Target

    @property
    def workload(self) -> Path:
        return Path(self.tree.params.workload)

    @property
    def store(self) -> Any:
        return tracking.client()

    def record(self) -> RecordReport:
        report = record(self.tree, self.workload, self.here)
        write_json(layout.RECORD, report)
        return report

    def promote(self, winner: str | None = None, here: Target | None = None) -> PromoteReport:
        """Promote, with another winner named in the comparison if one is given."""
        if winner:
            write_json(layout.COMPARISON, {**read_json(layout.COMPARISON), "winner": winner})
        report = promote(self.tree, self.workload, layout.DATA, here or self.here)
        write_json(layout.PROMOTION, report)
        return report

    def compare(self) -> None:
        write_json(layout.COMPARISON, compare(self.tree, layout.DATA))

    def change(self, path: Path, **values: Any) -> None:
        """Edit a JSON file as someone might by hand."""
        import json

        path.write_text(json.dumps({**read_json(path), **values}))

    def runs(self, query: str = "", **more: Any) -> list[Any]:
        found = self.store.get_experiment_by_name("tiny")
        return list(self.store.search_runs([found.experiment_id], query, **more)) if found else []

    def versions(self) -> dict[str, Any]:
        return {str(v.version): v for v in self.store.search_model_versions("name = 'tiny'")}

    def aliases(self) -> dict[str, str]:
        """Alias without the target's id → version."""
        model = self.store.get_registered_model("tiny")
        return {a.removesuffix(f"-{self.here.id}"): str(v) for a, v in model.aliases.items()}


def change(raw: dict[str, Any]) -> None:
    for section in ("prune", "distill", "quantize"):
        del raw[section]
    raw.update(PARAMS)


@pytest.fixture(scope="session")
def made(
    once: Callable[..., Path],
    new_project: Callable[[Path], Path],
    command: Callable[..., Any],
    edit: Callable[..., None],
) -> Path:
    def make(folder: Path) -> None:
        edit(new_project(folder), change)
        done = command(folder, "python", "-c", MAKE)
        assert done.returncode == 0, done.stderr

    return once("registry", make)


@pytest.fixture
def copied(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehome: Callable[[Path, Path], None]
) -> Iterator[Path]:
    """A copy of the project, with its own store, in which the comparison is recorded; the working directory."""
    root = tmp_path / "project"
    shutil.copytree(made, root, ignore=shutil.ignore_patterns(".git", ".dvc"))
    monkeypatch.chdir(root)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "ENGINESMITH_FLOW_RUN"):
        os.environ.pop(name, None)
    rehome(root, made)
    yield root
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture
def recorded(copied: Path) -> Place:
    """A project whose comparison is in MLflow."""
    return Place(copied, params.load(layout.PARAMS), target.fingerprint())


@pytest.fixture
def place(copied: Path) -> Place:
    """A project of which nothing is in MLflow yet."""
    Path("empty.db").rename("mlflow.db")
    shutil.rmtree("mlartifacts")
    layout.RECORD.unlink()
    return Place(copied, params.load(layout.PARAMS), target.fingerprint())

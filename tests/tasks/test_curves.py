"""Learning curves from the reports, and in DVC's plots."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from tasks import curves, layout
from tasks.files import write_json

ROOT = Path(__file__).resolve().parents[2]


def node(step: str, name: str) -> Any:
    return SimpleNamespace(step=step, name=name)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reports of a training, a pruning in two steps, and a model that was not trained on; one is missing."""
    monkeypatch.chdir(tmp_path)
    for step, name, epochs in (("train", "base", (1, 2, 3)), ("prune", "slim", (1, 2, 1)), ("share", "one", ())):
        curve = [{"epoch": e, "loss": 1 / e, "validation": 0.5 + e / 10, "seconds": 1.0} for e in epochs]
        write_json(layout.report(step, name), {"curve": curve})
    write_json(layout.report("export", "onnx"), {"opset": 18})
    nodes = (
        node("train", "base"),
        node("prune", "slim"),
        node("share", "one"),
        node("qat", "gone"),
        node("export", "onnx"),
    )
    return SimpleNamespace(nodes={n.name: n for n in nodes})


def test_points_are_of_the_models_asked_for_with_epochs_counted_on(tree: Any) -> None:
    found = curves.points(tree, ("base", "slim", "one", "gone", "onnx"))
    assert [(p.artifact, p.step, p.epoch) for p in found] == [
        *(("base", "train", e) for e in (1, 2, 3)),
        *(("slim", "prune", e) for e in (1, 2, 3)),
    ]
    assert [p.loss for p in found[3:]] == [1, 1 / 2, 1]
    assert curves.points(tree, ("onnx", "one")) == []


def test_without_curves_there_is_no_table(tree: Any, tmp_path: Path) -> None:
    curves.write(tmp_path / "curves.csv", SimpleNamespace(nodes={"onnx": tree.nodes["onnx"]}))
    assert not (tmp_path / "curves.csv").exists()


def test_dvc_plots_the_curves_of_every_artifact_and_their_difference(
    tree: Any, tmp_path: Path, command: Callable[..., Any]
) -> None:
    plots = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["plots"]
    assert [name for plot in plots for name in plot] == ["accuracy over speed-up", "learning curves", "training loss"]
    (tmp_path / "dvc.yaml").write_text(json.dumps({"plots": plots[1:]}))
    table = tmp_path / "reports/latest/curves.csv"
    table.parent.mkdir(parents=True)

    def run(*words: str) -> Any:
        done = command(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    curves.write(table, tree)
    run("git", "init", "-q")
    run("git", "config", "user.email", "test@example.invalid")
    run("git", "config", "user.name", "Test")
    run("dvc", "init", "-q")
    shutil.copytree(ROOT / ".dvc/plots", tmp_path / ".dvc/plots")
    run("git", "add", "-A")
    run("git", "commit", "-qm", "before")
    table.write_text(table.read_text().replace("base,train,1,1.0,", "base,train,1,2.0,"))
    assert run("dvc", "plots", "show").strip().endswith("index.html")
    shown = json.loads(run("dvc", "plots", "diff", "HEAD", "--json"))
    assert not shown.get("errors")
    loss = shown["data"]["training loss"][0]["content"]
    assert loss["encoding"]["color"]["field"] == "artifact" and loss["encoding"]["y"]["field"] == "loss"
    values = {(v["rev"], v["artifact"], v["epoch"]): float(v["loss"]) for v in loss["data"]["values"]}
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(values) == 2 * len(rows) == 12
    assert (values["HEAD", "base", "1"], values["workspace", "base", "1"]) == (1, 2)
    assert shown["data"]["learning curves"][0]["content"]["encoding"]["y"]["field"] == "validation"

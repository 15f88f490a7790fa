"""Sharing: the function is that of layers averaged by hand, each weight is kept once, ties survive what follows."""

from __future__ import annotations

import copy
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tasks import account, checkpoint, export, factorize, fit, parity, share
from tasks.data import write
from tasks.errors import Fault
from tasks.settings import FactorizeParams, ShareParams
from tasks.structure import Factorized
from tasks.workloads import protocol

TEXT = str(Path(__file__).resolve().parent.parent / "tiny" / "text.py")
STACK = "net.bert.encoder.layer"


def params(**given: Any) -> ShareParams:
    return ShareParams.model_validate({"from": "base", "epochs": 0, "batch": 32, **given})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text: Any) -> Path:
    """An untrained BERT of four layers, whose layers differ, and small splits."""
    folder = tmp_path_factory.mktemp("share")
    torch.manual_seed(0)
    checkpoint.save(checkpoint.Checkpoint(text.model().eval(), TEXT), folder / "base")
    samples = text.samples(0)[0]
    for split, rows in (("train", slice(0, 200)), ("validation", slice(200, 300))):
        write(folder / f"{split}.npz", {k: v[rows] for k, v in samples.items()})
    return folder


@pytest.fixture(scope="module")
def halves(folder: Path) -> tuple[share.ShareReport, Path]:
    """The base in two groups by average, fine-tuned for an epoch."""
    return share.share(folder / "base", folder, folder / "halves", params(groups=2, epochs=1)), folder / "halves"


def by_hand(model: nn.Module, runs: list[list[int]], how: str) -> nn.Module:
    """The slow reference: every layer keeps its own copy of what its run shares."""
    model = copy.deepcopy(model)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    for run in runs:
        for name, parameter in model.named_parameters():
            for i in run:
                if name.startswith(f"{STACK}.{i}."):
                    rest = name.removeprefix(f"{STACK}.{i}.")
                    sources = [own[f"{STACK}.{j}.{rest}"] for j in (run if how == "average" else run[:1])]
                    parameter.data = sum(sources, torch.zeros(())) / len(sources)
    return model


def outputs(model: nn.Module, task: Any, batch: int = 3) -> torch.Tensor:
    samples = task.samples(1)[0]
    with torch.no_grad():
        return fit.forward(model.eval(), task, fit.tensors({k: v[:batch] for k, v in samples.items()}))["logits"]


@pytest.mark.parametrize("how", ["average", "copy"])
@pytest.mark.parametrize(("groups", "runs"), [(1, [[0, 1, 2, 3]]), (3, [[0, 1], [2], [3]])])
def test_it_computes_what_layers_shared_by_hand_compute(
    folder: Path, text: Any, how: str, groups: int, runs: list[list[int]]
) -> None:
    model = checkpoint.load(folder / "base").model
    expected = outputs(by_hand(model, runs, how), text)
    name, layers = share.longest_stack(model, "base")
    assert name == STACK and share.cut(layers, groups, name) == runs
    before = outputs(model, text)
    share.share_layers(model, name, runs, params(groups=groups, how=how))
    assert torch.allclose(outputs(model, text), expected, atol=1e-6)
    assert not torch.allclose(before, expected, atol=1e-4)


def test_each_shared_weight_counts_once_and_no_work_is_saved(halves: tuple[share.ShareReport, Path]) -> None:
    report, target = halves
    loaded = checkpoint.load(target)
    layer = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    assert report.stack == STACK
    assert [r.layers for r in report.runs] == [[f"{STACK}.{i}" for i in run] for run in ([0, 1], [2, 3])]
    assert all((r.parameters_before, r.parameters_after) == (2 * layer, layer) for r in report.runs)
    assert all(r.distance > 0 for r in report.runs)
    assert report.cost.parameters_before - report.cost.parameters_after == 2 * layer
    assert report.cost.parameters_after == fit.parameters(loaded.model)
    assert report.cost.multiply_adds_before == report.cost.multiply_adds_after
    assert sum(c.parameters_after for c in report.cost.layers) == report.cost.parameters_after


def test_fine_tuning_and_reloading_keep_the_ties_and_store_them_once(
    halves: tuple[share.ShareReport, Path], folder: Path, text: Any
) -> None:
    report, target = halves
    loaded = checkpoint.load(target)
    layers = list(loaded.model.get_submodule(STACK))
    assert layers[0] is layers[1] and layers[2] is layers[3] and layers[0] is not layers[2]
    assert len(report.curve) == 1 and 0 <= report.validation <= 1
    stored = torch.load(target / checkpoint.FILE, weights_only=True)["state"]
    assert not [name for name in stored if name.startswith((f"{STACK}.1.", f"{STACK}.3."))]
    assert (target / checkpoint.FILE).stat().st_size < 0.75 * (folder / "base" / checkpoint.FILE).stat().st_size
    start = checkpoint.load(folder / "base").model
    share.share_layers(start, STACK, [[0, 1], [2, 3]], params(groups=2))
    key = f"{STACK}.0.attention.self.query.weight"
    assert not torch.equal(start.get_parameter(key), loaded.model.get_parameter(key))
    checkpoint.save(loaded, target.parent / "again")
    assert (target.parent / "again" / checkpoint.FILE).read_bytes() == (target / checkpoint.FILE).read_bytes()


def test_onnx_holds_a_shared_weight_once(tmp_path: Path, text: Any) -> None:
    model = text.model(layers=2).eval()
    share.share_layers(model, STACK, [[0, 1]], params())
    export.to_onnx(model, text, tmp_path / "model.onnx", 18)
    graph = onnx.load(tmp_path / "model.onnx").graph
    held = sum(len(tensor.raw_data) for tensor in graph.initializer)
    layer = 4 * fit.parameters(model.get_submodule(STACK)[0])
    assert held < 4 * fit.parameters(model) + layer / 8
    assert parity.parity(model, text, tmp_path, text.samples(1)[0]) < 1e-4


def test_a_shared_model_is_shared_further_and_factorised_once(
    halves: tuple[share.ShareReport, Path], folder: Path, text: Any, tmp_path: Path
) -> None:
    share.share(halves[1], folder, tmp_path / "one", params(groups=1))
    loaded = checkpoint.load(tmp_path / "one")
    assert len(set(loaded.model.get_submodule(STACK))) == 1
    low = FactorizeParams.model_validate({"from": "one", "rank": 0.25, "samples": 0, "epochs": 0})
    train = text.samples(0)[0]
    layers, changes = factorize.factorize_layers(loaded.model, text, train, low)
    names = [layer.name for layer in layers if layer.rank]
    assert f"{STACK}.0.attention.self.query" in names
    assert not [layer.name for layer in layers if f"{STACK}.1." in layer.name]
    checkpoint.save(replace(loaded, structure=(*loaded.structure, *changes)), tmp_path / "low")
    again = checkpoint.load(tmp_path / "low").model
    assert torch.equal(outputs(again, text), outputs(loaded.model, text))
    assert len(set(again.get_submodule(STACK))) == 1


def test_a_stack_without_an_encoder_s_names_is_shared_with_its_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
    for i, block in enumerate(model):
        block[1].running_mean.fill_(i)
    name, layers = share.longest_stack(model, "base")
    share.share_layers(model, name, share.cut(layers, 1, name), params())
    assert model[0] is model[1] and torch.equal(model[0][1].running_mean, torch.full((4,), 0.5))
    found = account.count(model, types.SimpleNamespace(INPUTS={"x": ("float32", (4,))}, OUTPUTS=("y",)))
    assert found.multiply_adds == 2 * 16 and found.parameters == 16 + 4 + 8


def test_no_stack_is_a_fault_that_names_what_there_is(tiny: Any) -> None:
    with pytest.raises(Fault, match=r"(?s)nothing to share in base.*stem: Conv2d, BatchNorm2d, ReLU.*ModuleList"):
        share.longest_stack(tiny.model(), "base")


def test_layers_of_one_shape_that_compute_differently_are_no_stack() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=2, dilation=2))
    with pytest.raises(Fault, match=r"the model: Conv2d, Conv2d"):
        share.longest_stack(model, "base")


@pytest.mark.parametrize(("order", "groups"), [("0123", 4), ("0123", 9), ("0011", 2), ("0001", 2)])
def test_groups_that_share_nothing_or_part_shared_layers_are_a_fault(order: str, groups: int) -> None:
    modules = [nn.Linear(2, 2) for _ in range(4)]
    with pytest.raises(Fault, match=f"can't be shared in {groups} groups"):
        share.cut([modules[int(i)] for i in order], groups, "stack")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"structure": tuple(Factorized(f"{STACK}.{i}.output.dense", 8) for i in range(4))}, "is factorised"),
        ({"masks": {f"{STACK}.0.output.dense.weight": torch.ones(32, 64, dtype=torch.bool)}}, "is sparse"),
    ],
)
def test_sparse_or_factorised_layers_are_refused_before_any_training(
    folder: Path, tmp_path: Path, text: Any, change: dict[str, Any], what: str
) -> None:
    model = text.model().eval()
    for step in change.get("structure", ()):
        step.apply(model)
    checkpoint.save(checkpoint.Checkpoint(model, TEXT, **change), tmp_path / "source")
    with pytest.raises(Fault, match=what):
        share.share(tmp_path / "source", folder, tmp_path / "target", params(groups=2))
    assert not (tmp_path / "target").exists()


def test_the_dynamic_axis_stays_free(halves: tuple[share.ShareReport, Path], text: Any) -> None:
    model = checkpoint.load(halves[1]).model
    samples = text.samples(1)[0]
    index = np.flatnonzero(protocol.lengths(text, samples) <= 5)[:4]
    rows = {k: v[index] for k, v in samples.items()}
    short = fit.predict(model, text, protocol.cut(text, rows, 5))["logits"]
    assert np.allclose(short, fit.predict(model, text, rows)["logits"], atol=1e-5)

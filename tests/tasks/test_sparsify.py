from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from tasks import checkpoint, distill, export, fit, onnx_file, quantize, sparsify
from tasks.data import write
from tasks.errors import Fault
from tasks.settings import DistillParams, ExportParams, QuantizeParams, SparsifyParams
from tasks.structure import Tied

TINY = Path(__file__).resolve().parents[1] / "tiny"


def params(**given: object) -> SparsifyParams:
    return SparsifyParams.model_validate({"from": "x", "epochs": 0, **given})


def groups(weight: torch.Tensor) -> list[list[float]]:
    """Every 4 neighbouring inputs of a weight [out, in, …], the slow way."""
    found = []
    for row in weight.detach().movedim(1, -1).reshape(-1, weight.shape[1]).tolist():
        found += [row[i : i + 4] for i in range(0, len(row), 4)]
    return found


def most(weight: torch.Tensor) -> int:
    return max(sum(value != 0 for value in group) for group in groups(weight))


@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.Conv2d(16, 8, 3), nn.Conv2d(32, 8, (1, 2), groups=2)])
def test_magnitude_keeps_the_two_largest_of_four_inputs(layer: Any) -> None:
    before = groups(layer.weight)
    mask = sparsify.sparsify_weight(layer, None, None)
    assert torch.equal(mask, layer.weight != 0)
    for old, new in zip(before, groups(layer.weight), strict=True):
        largest = sorted(old, key=abs)[2:]
        assert new == [value if value in largest else 0 for value in old]


def slow_sparsegpt(weight: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """arXiv:2301.00774, algorithm 1, with the inverse of what remains taken anew at every column."""
    weight, count = weight.copy(), len(hessian)
    hessian = hessian + 0.1 * np.diag(hessian).mean() * np.eye(count)
    inverse = [np.linalg.inv(hessian[j:, j:]) for j in range(count)]
    gone = np.zeros(weight.shape, bool)
    for j in range(count):
        if j % 4 == 0:
            loss = np.stack([weight[:, j + k] ** 2 / inverse[j + k][0, 0] for k in range(4)], 1)
            for row, least in enumerate(loss.argsort(1)[:, :2]):
                gone[row, j + least] = True
        error = np.where(gone[:, j], weight[:, j], 0) / inverse[j][0, 0]
        weight[:, j:] -= error[:, None] * inverse[j][0]
    return np.where(gone, 0, weight)


def test_sparsegpt_is_the_paper_s_taken_slowly() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 8)
    x = torch.randn(500, 32) @ torch.randn(32, 32)
    moment = x.T @ x / len(x)
    slow = slow_sparsegpt(layer.weight.detach().double().numpy(), moment.double().numpy())
    sparsify.sparsify_weight(layer, moment, None)
    assert np.allclose(layer.weight.detach(), slow, atol=1e-4)


@pytest.mark.parametrize("layer", [nn.Linear(32, 16), nn.Conv2d(16, 8, 3, stride=2)])
def test_sparsegpt_loses_less_of_the_outputs_than_magnitude(layer: Any, make_workload: Any) -> None:
    torch.manual_seed(0)
    linear = isinstance(layer, nn.Linear)
    task = make_workload(nn.Sequential(layer), {"x": ("float32", (32,) if linear else (16, 7, 7))})
    x = (torch.randn(60, 32) @ torch.randn(32, 32)) if linear else torch.randn(60, 1, 7, 7) + torch.randn(60, 16, 7, 7)
    arrays = {"x": x.numpy(), "label": np.zeros(60)}
    dense, start = layer(x).detach(), layer.weight.detach().clone()
    moment = sparsify.second_moments(nn.Sequential(layer), task, arrays, [layer], 60)[layer]
    errors = []
    for given in (None, moment):
        layer.weight.data.copy_(start)
        sparsify.sparsify_weight(layer, given, None)
        assert most(layer.weight) == 2
        errors.append(float(((layer(x) - dense) ** 2).sum()))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("by_data", [False, True])
def test_zeros_that_were_there_stay(by_data: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    fixed = torch.rand(8, 16) > 0.4
    layer.weight.data *= fixed
    x = torch.randn(100, 16)
    mask = sparsify.sparsify_weight(layer, x.T @ x if by_data else None, fixed)
    assert not (mask & ~fixed).any() and most(layer.weight) == 2
    assert not layer.weight[~mask].any()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.depthwise = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 3, groups=16)
        self.wide, self.twice, self.unused = nn.Conv2d(16, 16, 1), nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied, self.also = nn.Linear(16, 16), nn.Linear(16, 16)
        self.also.weight = self.tied.weight
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.wide(self.depthwise(self.narrow(x)))).mean((2, 3))
        return self.head(self.also(self.tied(self.twice(torch.relu(self.twice(y))))))


def test_layers_that_can_not_or_may_not_be_sparse_stay_as_they_are_and_say_why(make_workload: Any) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    task = make_workload(model, {"x": ("float32", (4, 5, 5))})
    arrays = {"x": np.ones((8, 4, 5, 5), np.float32), "label": np.zeros(8)}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    layers, masks = sparsify.sparsify_layers(model, task, arrays, params(), {})
    assert {layer.name: layer.dense_because for layer in layers} == {
        "narrow": "it has 4 inputs and 16 outputs: not multiples of 16 and 8",
        "depthwise": "it has 1 inputs and 16 outputs: not multiples of 16 and 8",
        "wide": None,
        "twice": None,
        "unused": "the model never calls it",
        "tied": "its weight is shared with another layer",
        "also": "its weight is shared with another layer",
        "head": "it makes an output of the model",
    }
    assert list(masks) == ["wide.weight", "twice.weight"]
    for name, weight in before.items():
        assert torch.equal(weight, model.get_parameter(name)) == (name not in masks)
    assert all(layer.kept is None or 0.5 < layer.kept < 1 for layer in layers)


def test_skip_names_layers_or_is_a_fault_and_so_is_nothing_left(tiny: Any) -> None:
    arrays = {key: value[:8] for key, value in tiny.samples(0)[0].items()}
    layers, masks = sparsify.sparsify_layers(tiny.model().eval(), tiny, arrays, params(skip=["block.conv1"]), {})
    assert {layer.name: layer.dense_because for layer in layers}["block.conv1"] == "skip names it"
    assert list(masks) == ["block.conv2.weight"]
    with pytest.raises(Fault, match=r"skip names no layer\n  got: +conv9"):
        sparsify.sparsify_layers(tiny.model(), tiny, arrays, params(skip=["conv9"]), {})
    with pytest.raises(Fault, match="nothing to make 2:4 sparse"):
        sparsify.sparsify_layers(tiny.model(), tiny, arrays, params(skip=["block.*"]), {})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> tuple[Path, sparsify.SparsifyReport]:
    """A folder with data, a dense model of random weights, one of them pruned, and a sparse one of it, fine-tuned."""
    folder = tmp_path_factory.mktemp("sparse")
    arrays = tiny.samples(0)[0]
    for split, rows in (("train", slice(160)), ("validation", slice(160, 240)), ("calibration", slice(240, 272))):
        write(folder / f"{split}.npz", {key: value[rows] for key, value in arrays.items()})
    torch.manual_seed(0)
    dense = checkpoint.Checkpoint(tiny.model().eval(), str(TINY / "workload.py"))
    pruned = {"head.weight": torch.rand_like(dense.model.head.weight) > 0.5}  # type: ignore[union-attr, arg-type]
    fit.apply_masks(dense.model, pruned)
    checkpoint.save(replace(dense, masks=pruned), folder / "dense")
    given = params(method="sparsegpt", permute=True, samples=64, epochs=2, batch=16)
    return folder, sparsify.sparsify(folder / "dense", folder, folder / "sparse", given)


def test_a_fine_tuned_model_is_plain_and_still_two_of_four(made: tuple[Path, sparsify.SparsifyReport]) -> None:
    folder, report = made
    dense, loaded = checkpoint.load(folder / "dense"), checkpoint.load(folder / "sparse")
    assert {type(m) for m in loaded.model.modules()} == {type(m) for m in dense.model.modules()}
    assert list(loaded.model.state_dict()) == list(dense.model.state_dict())
    assert sorted(loaded.masks) == ["block.conv1.weight", "block.conv2.weight", "head.weight"]
    for layer in report.layers:
        weight = loaded.model.get_submodule(layer.name).weight
        assert layer.two_of_four == (layer.dense_because is None) == layer.name.startswith("block.conv")
        if layer.two_of_four:
            assert most(weight) == 2  # type: ignore[arg-type]
            assert layer.method == "sparsegpt" and layer.permutation_gain is not None and layer.permutation_gain > 0
    # The head reads channels that were permuted: its own zeros moved with them.
    zeros = ~loaded.masks["head.weight"]
    assert zeros.sum() == (~dense.masks["head.weight"]).sum()
    assert not loaded.model.head.weight[zeros].any()  # type: ignore[union-attr, index]
    assert report.zeros_before < 0.1 < report.zeros_after == pytest.approx(0.49, abs=0.05)
    assert len(report.curve) == 2 and report.validation == max(e.validation for e in report.curve)
    assert report.cost.parameters_before == report.cost.parameters_after


def test_a_sparse_student_stays_two_of_four_when_distilled(
    made: tuple[Path, sparsify.SparsifyReport], tmp_path: Path
) -> None:
    folder, _ = made
    given = DistillParams.model_validate({"from": "x", "teacher": "y", "epochs": 1, "batch": 16})
    distill.distill(folder / "sparse", folder / "dense", folder, tmp_path / "kd", given)
    before, after = checkpoint.load(folder / "sparse"), checkpoint.load(tmp_path / "kd")
    assert not torch.equal(before.model.block.conv1.weight, after.model.block.conv1.weight)  # type: ignore
    assert most(after.model.block.conv1.weight) == most(after.model.block.conv2.weight) == 2  # type: ignore


@pytest.fixture(scope="module")
def exported(made: tuple[Path, sparsify.SparsifyReport]) -> tuple[Path, export.ExportReport]:
    """The sparse model's ONNX folder."""
    folder, _ = made
    report = export.export(folder / "sparse", folder, folder / "onnx", ExportParams.model_validate({"from": "x"}))
    return folder / "onnx", report


def test_the_files_of_a_sparse_model_are_proven_layer_by_layer(
    exported: tuple[Path, export.ExportReport], tmp_path: Path
) -> None:
    folder, report = exported
    notes = onnx_file.notes(onnx_file.load(folder))
    assert json.loads(notes["sparse_layers"]) == ["block.conv1.weight", "block.conv2.weight"]
    assert [layer.layer for layer in report.sparse_layers] == [None, *json.loads(notes["sparse_layers"]), None]
    assert [layer.two_of_four for layer in report.sparse_layers] == [False, True, True, False]
    given = QuantizeParams.model_validate({"from": "x", "calibration": "minmax", "samples": 16})
    quantized = quantize.quantize(folder, TINY / "workload.py", folder.parent, tmp_path / "int8", given)
    assert [layer.two_of_four for layer in quantized.sparse_layers] == [False, True, True, False]
    values = onnx_file.constants(onnx_file.load(tmp_path / "int8").graph)
    for layer in quantized.sparse_layers:
        if layer.two_of_four:
            stored = torch.from_numpy(values[layer.name].copy())
            assert stored.dtype == torch.int8 and most(stored) <= 2


def test_a_file_that_lost_the_zeros_is_refused(
    exported: tuple[Path, export.ExportReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fold(model: object, task: object, path: Path, *_: object) -> None:
        proto = onnx_file.load(exported[0])
        for tensor in proto.graph.initializer:
            if tensor.name == "block.conv2.weight":
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 1e-7, tensor.name))
        onnx.save(proto, path)

    monkeypatch.setattr(export, "to_onnx", fold)
    source = exported[0].parent
    with pytest.raises(Fault, match=r"block.conv2.weight was made 2:4 sparse, and isn't in the file"):
        export.export(source / "sparse", source, tmp_path / "onnx", ExportParams.model_validate({"from": "x"}))
    assert not (tmp_path / "onnx").exists()


def test_a_transformer_of_shared_layers_is_proven_in_its_dynamic_int8_file(text: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arrays = {key: value[:32] for key, value in text.samples(0)[0].items()}
    write(tmp_path / "calibration.npz", arrays)
    write(tmp_path / "validation.npz", arrays)
    model, shared = text.model(layers=2).eval(), Tied("net.bert.encoder.layer.1", "net.bert.encoder.layer.0")
    shared.apply(model)
    layers, masks = sparsify.sparsify_layers(model, text, arrays, params(), {})
    saved = checkpoint.Checkpoint(model, str(TINY / "text.py"), {"layers": 2}, (shared,), masks)
    checkpoint.save(saved, tmp_path / "sparse")
    export.export(tmp_path / "sparse", tmp_path, tmp_path / "onnx", ExportParams.model_validate({"from": "x"}))
    given = QuantizeParams.model_validate({"from": "x", "activations": "dynamic", "samples": 16})
    report = quantize.quantize(tmp_path / "onnx", TINY / "text.py", tmp_path, tmp_path / "int8", given)
    proven = [layer.name for layer in report.sparse_layers if layer.two_of_four]
    assert len(proven) == sum(layer.two_of_four for layer in layers) == 7
    reasons = {layer.reason for layer in report.sparse_layers if not layer.two_of_four}
    assert reasons == {"it has no constant weight", "it has 32 inputs and 2 outputs: not multiples of 16 and 8"}

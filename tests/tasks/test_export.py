"""Export: any batch, the opset asked for, equal to PyTorch, and the caller's model as it was."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from tasks import checkpoint, onnx_file
from tasks.data import read
from tasks.errors import Fault
from tasks.export import check_file, export, to_onnx
from tasks.files import read_json, sha256, size_bytes
from tasks.fit import predict
from tasks.parity import parity
from tasks.settings import ExportParams

FORMS = {
    "view": lambda y: y.view(2, 3),
    "constant": lambda y: y + torch.ones(2, 3),
    "int": lambda y: y + torch.zeros(int(y.shape[0]), 3),
    "branch": lambda y: y if y.shape[0] == 2 else y * 2,
    "mean": lambda y: y.mean(0),
}


SAMPLES = {"x": np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32), "label": np.zeros(5)}


class Head(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.linear, self.dropout, self.form = nn.Linear(4, 3), nn.Dropout(0.5), form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self.dropout(self.linear(x)))


@pytest.fixture
def head_task(make_workload: Any) -> Any:
    return make_workload(None, {"x": ("float32", (4,))})


@pytest.fixture(scope="module")
def exported(make_workload: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model, its modes mixed, and the folder of its file."""
    folder, model = tmp_path_factory.mktemp("exported"), Head(lambda y: y)
    model.linear.eval()
    to_onnx(model, make_workload(None, {"x": ("float32", (4,))}), folder / "model.onnx", 21, notes={"b": "1", "a": "2"})
    return model, folder


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("name", ["base", "slim-kd"])
def test_the_file_gives_pytorchs_outputs_at_any_batch(
    artifact: Any, data_folder: Path, tiny: Any, name: str, batch: int
) -> None:
    part = {k: v[:batch] for k, v in read(data_folder / "test.npz").items()}
    session = ort.InferenceSession(str(artifact(f"{name}-onnx") / "model.onnx"), providers=["CPUExecutionProvider"])
    (got,) = session.run(["logits"], {"image": part["image"]})
    expected = predict(checkpoint.load(artifact(name)).model, tiny, part)["logits"]
    np.testing.assert_allclose(got, expected, atol=1e-3 * np.abs(expected).max())


def test_the_report_is_of_the_file(line: Path, artifact: Any) -> None:
    report, folder = read_json(line / "results/export/base-onnx.json"), artifact("base-onnx")
    model = onnx.load(folder / "model.onnx")
    assert report["opset"] == onnx_file.opset(model) == 18
    assert (report["size_bytes"], report["sha256"]) == (size_bytes(folder / "model.onnx"), sha256(folder))
    assert report["nodes"] == len(model.graph.node)
    assert report["largest_error"] < 1e-4
    assert report["proof_batches"] == [1, 3, 7]


def test_the_file_says_what_it_was_made_of(artifact: Any, tiny: Any) -> None:
    assert onnx_file.notes(onnx_file.load(artifact("base-onnx"))) == {
        "model_sha256": sha256(artifact("base") / "model.pt"),
        "precision": "fp32",
        "preprocessing": tiny.PREPROCESSING,
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_is_not_dynamic_is_an_error_that_names_the_axis(head_task: Any, tmp_path: Path, form: str) -> None:
    with pytest.raises(Fault) as caught:
        to_onnx(Head(FORMS[form]), head_task, tmp_path / "model.onnx", 18)
        check_file(onnx_file.load(tmp_path), 18)
    assert caught.value.what == "the batch is not dynamic"
    assert "axis 0" in str(caught.value)
    assert "x" in str(caught.value.expected) or "logits" in str(caught.value.got)


def test_a_model_that_cannot_be_traced_is_told_in_the_tracers_words(head_task: Any, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="the model can't be exported") as caught:
        to_onnx(Head(lambda y: y.view(8, 3)), head_task, tmp_path / "model.onnx", 18)
    assert "[8, 3]" in str(caught.value.got)


def test_modes_are_restored_module_by_module(exported: Any) -> None:
    model, _ = exported
    assert (model.training, model.linear.training, model.dropout.training) == (True, False, True)


def test_modes_are_restored_after_a_failed_export(head_task: Any, tmp_path: Path) -> None:
    model = Head(FORMS["view"]).train()
    model.linear.eval()
    with pytest.raises(Fault):
        to_onnx(model, head_task, tmp_path / "model.onnx", 18)
    assert (model.training, model.linear.training, model.dropout.training) == (True, False, True)


def test_a_model_in_training_mode_is_exported_in_eval_mode(exported: Any, head_task: Any) -> None:
    model, folder = exported
    assert parity(model, head_task, folder, SAMPLES) < 1e-5
    assert "Dropout" not in {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}
    assert model.training


def test_the_opset_asked_for_is_in_the_file(exported: Any, artifact: Any) -> None:
    assert onnx_file.opset(onnx.load(exported[1] / "model.onnx")) == 21
    assert onnx_file.opset(onnx.load(artifact("base-onnx") / "model.onnx")) == 18


def test_another_opset_is_an_error_with_the_usable_range(artifact: Any) -> None:
    with pytest.raises(Fault, match=r"got:      18\n  expected: 20") as caught:
        check_file(onnx_file.load(artifact("base-onnx")), 20)
    assert "18 to 21" in str(caught.value)


@pytest.mark.parametrize(("change", "what"), [(1.05, "differs from PyTorch"), (float("nan"), "got:      nan")])
def test_other_outputs_than_pytorchs_are_an_error(exported: Any, head_task: Any, change: float, what: str) -> None:
    model = copy.deepcopy(exported[0])
    with torch.no_grad():
        model.linear.weight *= change
    with pytest.raises(Fault, match=what):
        parity(model, head_task, exported[1], SAMPLES)


def test_a_file_with_a_fixed_batch_is_refused_by_the_proof(exported: Any, head_task: Any, tmp_path: Path) -> None:
    proto = onnx.load(exported[1] / "model.onnx")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(Fault, match="refuses a batch of 3"):
        parity(exported[0], head_task, tmp_path, SAMPLES)
    with pytest.raises(Fault, match="x axis 0 is 1"):
        check_file(proto, 21)


def test_equal_models_give_equal_bytes(exported: Any, head_task: Any, tmp_path: Path) -> None:
    to_onnx(copy.deepcopy(exported[0]), head_task, tmp_path / "model.onnx", 21, notes={"a": "2", "b": "1"})
    content = (tmp_path / "model.onnx").read_bytes()
    assert content == (exported[1] / "model.onnx").read_bytes()
    assert str(Path(torch.__file__).parent.parent).encode() not in content


@pytest.fixture(scope="module")
def external(artifact: Any, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("external") / "base-external"
    return folder, export(
        artifact("base"), data_folder, folder, ExportParams(**{"from": "base", "external_data": True})
    )


def test_external_data_travels_in_the_folder_and_counts(external: Any) -> None:
    folder, report = external
    sidecar = folder / "model.onnx.data"
    assert report.size_bytes == sidecar.stat().st_size + (folder / "model.onnx").stat().st_size
    assert sorted(p.name for p in folder.iterdir()) == ["model.onnx", "model.onnx.data", "proof.npz"]


def test_external_data_is_part_of_the_digest(external: Any, tmp_path: Path) -> None:
    folder, report = external
    assert sha256(folder) == report.sha256
    (tmp_path / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())
    (tmp_path / "model.onnx.data").write_bytes((folder / "model.onnx.data").read_bytes()[:-4] + b"\0\0\0\1")
    assert sha256(tmp_path) != report.sha256


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.linear(v), lambda v: self.linear(v) * 2, (x,))


def test_the_file_says_nothing_of_the_machine_it_was_made_on(make_workload: Any, tmp_path: Path) -> None:
    to_onnx(Branched(), make_workload(None, {"x": ("float32", (4,))}), tmp_path / "model.onnx", 18)
    assert len(list(onnx_file.graphs(onnx.load(tmp_path / "model.onnx").graph))) == 3
    assert Path(__file__).name.encode() not in (tmp_path / "model.onnx").read_bytes()


def test_a_failed_export_leaves_nothing(
    artifact: Any, tmp_path: Path, write_workload: Any, workload_path: Path
) -> None:
    text = workload_path.read_text().replace("Path(__file__).parent", repr(str(workload_path.parent)))
    path = write_workload(text)
    parent = dataclasses.replace(checkpoint.load(artifact("base")), workload_path=str(path))
    checkpoint.save(parent, tmp_path / "parent")
    with pytest.raises(Fault, match="no data"):
        export(tmp_path / "parent", tmp_path / "nowhere", tmp_path / "out", ExportParams(**{"from": "parent"}))
    assert not (tmp_path / "out").exists()

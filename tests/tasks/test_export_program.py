"""Exported programs: any batch, the model's outputs, the same bytes again, and nothing of this machine in them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import checkpoint, exported, proof
from tasks.check import faults
from tasks.data import data, read
from tasks.errors import Fault
from tasks.export import export
from tasks.files import sha256, size_bytes
from tasks.settings import DataParams, ExportParams
from tasks.structure import FakeQuantized
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parents[1] / "tiny"
PARAMS = ExportParams.model_validate({"from": "model", "format": "program"})


def model_of(file: str, folder: Path, **keywords: Any) -> None:
    """A checkpoint of a tiny workload's fresh model, and the splits of its data."""
    data(TINY / file, folder / "data", DataParams(train=40, calibration=16, validation=20, test=20))
    torch.manual_seed(0)
    model = load_workload(TINY / file).model(**keywords)
    checkpoint.save(checkpoint.Checkpoint(model, str(TINY / file), keywords), folder / "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with an image model, its program, and the report."""
    folder = tmp_path_factory.mktemp("program")
    model_of("workload.py", folder)
    return folder, export(folder / "model", folder / "data", folder / "program", PARAMS)


def test_the_report_is_of_the_program(made: Any) -> None:
    folder, report = made
    files = sorted(file.name for file in (folder / "program").iterdir())
    assert files == [exported.NOTES, exported.FILE, proof.FILE]
    assert report.opset is None
    assert report.size_bytes == size_bytes(folder / "program") - size_bytes(folder / "program" / proof.FILE)
    assert report.largest_error < 1e-5
    assert report.nodes > 10


def test_the_notes_say_what_it_was_made_of(made: Any) -> None:
    folder, _ = made
    raw, notes = json.loads((folder / "program" / exported.NOTES).read_text()), exported.notes(folder / "program")
    assert raw["precision"] == "fp32" and raw["preprocessing"] == notes.preprocessing == "tiny-v1"
    assert notes.model_sha256 == sha256(folder / "model" / checkpoint.FILE)
    assert [(i.name, i.dtype, i.shape) for i in notes.inputs] == [("image", "float32", (None, 1, 8, 8))]
    assert [(o.name, o.dtype, o.shape) for o in notes.outputs] == [("logits", "float32", (None, 4))]
    assert notes.axes == {} and notes.sparsity is None


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 20])
def test_the_program_gives_pytorchs_outputs_at_any_batch(made: Any, batch: int) -> None:
    folder, _ = made
    images = torch.from_numpy(read(folder / "data/test.npz")["image"][:batch])
    program, _ = exported.load(folder / "program")
    with torch.inference_mode():
        want = checkpoint.load(folder / "model").model(images)
        torch.testing.assert_close(program.module()(images), want)


def test_an_equal_model_gives_equal_bytes_without_a_path_of_this_machine(made: Any, tmp_path: Path) -> None:
    folder, _ = made
    export(folder / "model", folder / "data", tmp_path / "elsewhere" / "again", PARAMS)
    assert sha256(tmp_path / "elsewhere" / "again") == sha256(folder / "program")
    with zipfile.ZipFile(folder / "program" / exported.FILE) as archive:
        held = b"".join(archive.read(name) for name in archive.namelist())
    assert not re.findall(rb"[\w/.-]+\.py\b", held)


@pytest.mark.parametrize(("file", "keywords"), [("text.py", {"layers": 1}), ("lstm.py", {"kind": "lstm", "width": 8})])
def test_a_dynamic_axis_is_free_in_the_program(tmp_path: Path, file: str, keywords: dict[str, Any]) -> None:
    model_of(file, tmp_path, **keywords)
    report = export(tmp_path / "model", tmp_path / "data", tmp_path / "program", PARAMS)
    assert report.largest_error < 1e-4
    program, notes = exported.load(tmp_path / "program")
    assert notes.axes == {"tokens": 12}
    rng, model = np.random.default_rng(0), checkpoint.load(tmp_path / "model").model
    for batch, length in ((1, 12), (3, 5), (7, 2)):
        ids = torch.from_numpy(rng.integers(3, 9, (batch, length)))
        with torch.inference_mode():
            torch.testing.assert_close(program.module()(ids, torch.ones_like(ids)), model(ids, torch.ones_like(ids)))


class Plain(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.linear, self.dropout, self.form = nn.Linear(4, 3), nn.Dropout(0.5), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.dropout(self.linear(x)))


NOTED = {"precision": "fp32", "preprocessing": "made-v1", "model_sha256": "0"}


@pytest.mark.parametrize("form", [lambda y: (y, y + 1), lambda y: {"more": y + 1, "logits": y}], ids=["tuple", "dict"])
def test_outputs_are_known_by_name(make_workload: Any, tmp_path: Path, form: Any) -> None:
    task, model = make_workload(None, {"x": ("float32", (4,))}, ("logits", "more")), Plain(form)
    exported.to_program(model, task, tmp_path, NOTED)
    program, notes = exported.load(tmp_path)
    assert [o.name for o in notes.outputs] == ["logits", "more"]
    results = exported.by_name(program.module()(torch.ones(3, 4)), task.OUTPUTS)
    torch.testing.assert_close(results["logits"], model.eval().linear(torch.ones(3, 4)))
    torch.testing.assert_close(results["more"], results["logits"] + 1)


def test_modes_gradients_and_attention_are_as_before(make_workload: Any, tmp_path: Path) -> None:
    model = Plain(lambda y: y).train()
    model.linear.eval()
    exported.to_program(model, make_workload(None, {"x": ("float32", (4,))}), tmp_path, NOTED)
    assert (model.training, model.linear.training, model.dropout.training) == (True, False, True)
    assert torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()


def test_a_fixed_batch_is_a_fault(make_workload: Any, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="the batch is not dynamic"):
        exported.to_program(
            Plain(lambda y: y.view(2, 3)), make_workload(None, {"x": ("float32", (4,))}), tmp_path, NOTED
        )


def test_a_model_of_qat_is_refused(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made
    loaded = checkpoint.load(folder / "model")
    change = (FakeQuantized({}),)
    monkeypatch.setattr(
        checkpoint, "load", lambda _: checkpoint.Checkpoint(loaded.model, loaded.workload_path, {}, change)
    )
    with pytest.raises(Fault, match="a model of qat can't be an exported program"):
        export(folder / "model", folder / "data", tmp_path / "program", PARAMS)


@pytest.fixture
def copied(made: Any, tmp_path: Path) -> Path:
    """A copy of the program's folder."""
    import shutil

    return Path(shutil.copytree(made[0] / "program", tmp_path / "program"))


def test_what_is_no_program_is_a_fault(copied: Path) -> None:
    (copied / exported.FILE).write_bytes((copied / exported.FILE).read_bytes()[:999])
    with pytest.raises(Fault, match="is not an exported program"):
        exported.load(copied)
    (copied / exported.FILE).unlink()
    with pytest.raises(Fault, match="no program"):
        exported.load(copied)


@pytest.mark.parametrize("text", ["", "[]", '{"precision": "fp32"}'])
def test_what_are_no_notes_is_a_fault(copied: Path, text: str) -> None:
    (copied / exported.NOTES).write_text(text)
    with pytest.raises(Fault, match="is not the notes of a program"):
        exported.load(copied)


def test_sparse_layers_are_found_in_the_program(tmp_path: Path, make_workload: Any) -> None:
    model_of("text.py", tmp_path, layers=1, width=32)
    loaded = checkpoint.load(tmp_path / "model")
    name = "net.bert.encoder.layer.0.intermediate.dense.weight"
    weight = loaded.model.get_parameter(name)
    mask = torch.tensor([True, True, False, False]).repeat(weight.shape[0], weight.shape[1] // 4)
    with torch.no_grad():
        weight.mul_(mask)
    checkpoint.save(
        checkpoint.Checkpoint(loaded.model, loaded.workload_path, loaded.architecture, (), {name: mask}),
        tmp_path / "model",
    )
    report = export(tmp_path / "model", tmp_path / "data", tmp_path / "program", PARAMS)
    assert [(layer.name, layer.two_of_four) for layer in report.sparse_layers] == [(name, True)]
    assert exported.notes(tmp_path / "program").sparse_layers == (name,)
    assert exported.notes(tmp_path / "program").sparsity == "2:4"


def test_settings_of_onnx_are_refused_for_a_program(tiny_params: dict[str, Any]) -> None:
    raw = {**tiny_params, "export": {**tiny_params["export"]}}
    raw["export"]["p"] = {"from": "base", "format": "program", "opset": 18, "external_data": True}
    found = faults(raw, models=False)
    assert [line.split(":")[0] for line in found] == ["export.p.external_data", "export.p.opset"]
    assert all("that is of ONNX files" in line for line in found)

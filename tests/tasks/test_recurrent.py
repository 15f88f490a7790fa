"""LSTMs in the export: one node a layer, on any batch and length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tasks import recurrent
from tasks.export import to_onnx
from tasks.workloads.protocol import load_workload

LSTM = Path(__file__).resolve().parent.parent / "tiny" / "lstm.py"


def run(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    import onnxruntime

    return onnxruntime.InferenceSession(str(path)).run(None, inputs)[0]


@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"batch_first": False, "bias": False}])
def test_an_lstm_layer_is_exported_as_it_computes(tmp_path: Path, make_workload: Any, options: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 5, **{"batch_first": True, **options})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, (h, c) = self.lstm(x if self.lstm.batch_first else x.transpose(0, 1))
            y = y if self.lstm.batch_first else y.transpose(0, 1)
            return torch.cat([y.sum(1), h.sum(0), c[-1]], 1)

    torch.manual_seed(0)
    model = Net().eval()
    task = make_workload(model, {"x": ("float32", ("time", 3))})
    task.AXES, task.lengths = {"time": 12}, lambda inputs: np.full(len(inputs["x"]), 12)
    to_onnx(model, task, tmp_path / "model.onnx", 18)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("LSTM") == options.get("num_layers", 1)
    for batch, steps in ((1, 1), (3, 12), (7, 5)):
        x = torch.randn(batch, steps, 3)
        np.testing.assert_allclose(run(tmp_path / "model.onnx", {"x": x.numpy()}), model(x).detach().numpy(), atol=1e-5)


def test_a_text_lstm_is_exported_and_padding_changes_nothing(tmp_path: Path) -> None:
    task = load_workload(LSTM)
    torch.manual_seed(0)
    model = task.model(kind="lstm", width=8).eval()
    arrays, _ = task.samples(0)
    to_onnx(model, task, tmp_path / "model.onnx", 18)
    for batch in (1, 3, 7):
        ids, mask = arrays["input_ids"][:batch], arrays["attention_mask"][:batch]
        longest = int(mask.sum(1).max())
        full = run(tmp_path / "model.onnx", {"input_ids": ids, "attention_mask": mask})
        cut = run(tmp_path / "model.onnx", {"input_ids": ids[:, :longest], "attention_mask": mask[:, :longest]})
        np.testing.assert_allclose(full, cut, atol=1e-5)
        np.testing.assert_allclose(
            full, model(torch.from_numpy(ids), torch.from_numpy(mask)).detach().numpy(), atol=1e-5
        )


def test_the_layer_computes_again_after_the_export_even_after_an_error() -> None:
    layer = nn.LSTM(2, 3)
    x = torch.randn(4, 1, 2)
    before = layer(x)[0]
    with pytest.raises(NotImplementedError, match="zero states"), recurrent.exportable(layer):
        layer(x, (torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)))
    assert torch.equal(layer(x)[0], before)


def test_an_error_at_the_second_layer_leaves_the_first_as_it_was() -> None:
    model = nn.Sequential(nn.LSTM(2, 3), nn.LSTM(3, 3))
    del model[1].weight_hh_l0
    before = set(model[0].__dict__), set(model[0].state_dict())
    with pytest.raises(AttributeError, match="weight_hh_l0"), recurrent.exportable(model):
        pass
    assert (set(model[0].__dict__), set(model[0].state_dict())) == before
    assert torch.isfinite(model[0](torch.ones(4, 1, 2))[0]).all()

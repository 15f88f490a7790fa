"""Which layers are compared, what they put out, and what can't be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks import distill_layers
from tasks.distill_layers import Recorder, blocks, last_attention, pairs, plan
from tasks.errors import Fault
from tasks.settings import DistillParams
from tasks.structure import Factorized
from tasks.workloads.protocol import load_workload

LAYER = "net.bert.encoder.layer"
LSTM = Path(__file__).resolve().parent.parent / "tiny" / "lstm.py"


def params(**changes: Any) -> DistillParams:
    return DistillParams.model_validate({"from": "slim", "teacher": "base", **changes})


@pytest.mark.parametrize(("layers", "expected"), [(1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])])
def test_blocks_are_mapped_uniformly_and_the_last_to_the_last(text: Any, layers: int, expected: list[int]) -> None:
    found = pairs(text.model(layers=layers, width=8), text.model(width=8), None)
    assert found == {f"{LAYER}.{i}": f"{LAYER}.{j}" for i, j in enumerate(expected)}


def test_blocks_of_a_convolutional_net_and_of_layers_of_other_shapes() -> None:
    from tasks.workloads import digits

    assert blocks(digits.model()) == ["blocks.0", "blocks.1", "blocks.2"]
    stages = nn.ModuleDict({"one": digits.model().blocks, "two": digits.model().blocks})
    assert blocks(stages) == [f"{stage}.{i}" for stage in ("one", "two") for i in range(3)]
    assert blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == ["0", "1"]
    assert blocks(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))) == []


def test_each_use_of_a_shared_layer_is_told_apart_and_a_block_called_twice_gives_its_last() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)] * 2)
            self.block = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.block(self.layers[1](self.layers[0](x))))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(2, 3)
    with Recorder(model, ["layers.0", "layers.1", "block"]) as recorder:
        model(2 * x)
        y = model(x)
        once = recorder["layers.0"], recorder["layers.1"]
        assert torch.equal(recorder["block"], y)
    model(3 * x)
    torch.testing.assert_close(once[0], model.layers[0](x))
    torch.testing.assert_close(once[1], model.layers[0](once[0]))


def test_the_attention_of_a_factorised_and_pruned_model_is_found(text: Any) -> None:
    model = text.model(layers=2, width=16)
    Factorized(f"{LAYER}.1.attention.self.query", 4).apply(model)
    found = last_attention(model)
    assert found and (found.query, found.heads) == (f"{LAYER}.1.attention.self.query", 4)
    how = plan(text.model(layers=1, width=8), model, text, params(hidden=1, attention=1))
    assert [(m.student[-1], m.teacher[-1], m.width, m.teacher_width) for m in how.hidden] == [("0", "1", 8, 16)]
    assert how.heads == 4 and all(match.padded for match in how.matches)


def test_what_has_no_attention_is_refused(tiny: Any, text: Any) -> None:
    with pytest.raises(Fault, match="no attention maps to learn from"):
        plan(tiny.model(), tiny.model(), tiny, params(attention=1))
    with pytest.raises(Fault, match="no attention maps in the student"):
        plan(load_workload(LSTM).model(kind="lstm"), text.model(width=8), text, params(attention=1))


def test_what_has_no_blocks_needs_pairs(tiny: Any) -> None:
    with pytest.raises(Fault, match=r"no blocks.*\n?.*0 in the student"):
        plan(tiny.model(), tiny.model(), tiny, params(hidden=1))
    how = plan(tiny.model(width=4), tiny.model(), tiny, params(hidden=1, pairs={"block": "block"}))
    (match,) = how.hidden
    assert (match.width, match.teacher_width, match.padded) == (4, 16, False)
    with pytest.raises(Fault, match="layers that the teacher doesn't have"):
        plan(tiny.model(), tiny.model(), tiny, params(hidden=1, pairs={"block": "blocks.0"}))


def test_other_positions_are_refused(tiny: Any, text: Any) -> None:
    with pytest.raises(Fault, match="can't be compared"):
        plan(tiny.model(), tiny.model(), tiny, params(hidden=1, pairs={"pool": "block"}))
    with pytest.raises(Fault, match="can't be compared"):
        plan(text.model(width=8), text.model(width=8), text, params(hidden=1, pairs={f"{LAYER}.0": "net.bert.pooler"}))


def test_an_lstms_states_can_learn_from_a_transformers(text: Any) -> None:
    task = load_workload(LSTM)
    given = {"ahead": f"{LAYER}.3"}
    how = plan(task.model(kind="lstm", width=6), text.model(width=8), task, params(hidden=1, pairs=given))
    assert [(m.student, m.width, m.teacher_width, m.padded) for m in how.hidden] == [("ahead", 6, 8, True)]


def test_states_whose_padding_cant_be_told_are_refused(make_workload: Any) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(3, 4, 1), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x.transpose(1, 2)).mean(2))

    task = make_workload(None, {"x": ("float32", ("time", 3))})
    task.AXES = {"time": 8}
    with pytest.raises(Fault, match="padding in the output of conv can't be told"):
        plan(Turned(), Turned(), task, params(hidden=1, pairs={"conv": "conv"}))


@pytest.mark.parametrize("shape", [(2, 5), (2, 7, 5), (2, 5, 3, 4)])
def test_states_become_rows_of_positions(shape: tuple[int, ...]) -> None:
    states = torch.randn(shape)
    rows = distill_layers.rows(states)
    assert rows.shape[0] == 2 and rows.shape[2] == 5
    last = states if len(shape) == 2 else states[:, -1] if len(shape) == 3 else states[:, :, -1, -1]
    assert torch.equal(rows[:, -1], last)

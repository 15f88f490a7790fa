"""Operations and bytes of modules, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tasks import account
from tasks.module_work import of_modules


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(),
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 36, 10),
    )


@pytest.fixture
def task(net: nn.Module, make_workload: Any) -> Any:
    return make_workload(net, {"x": ("float32", (3, 6, 6))})


def test_each_module_reads_its_inputs_and_weights_and_writes_its_outputs(net: nn.Module, task: Any) -> None:
    conv, norm, relu, point, linear = of_modules(net, task, 5, None, "fp32", compiled=False)
    wide, narrow = 5 * 8 * 36, 5 * 4 * 36
    assert conv.multiply_adds == 5 * 36 * 8 * 27 and conv.bytes == 4 * (5 * 3 * 36 + 8 * 27 + wide)
    assert norm.multiply_adds == 0 and norm.bytes == 4 * (2 * wide + 4 * 8)
    assert relu.bytes == 4 * 2 * wide
    assert point.bytes == 4 * (wide + 4 * 8 + 4 + narrow)
    assert linear.bytes == 4 * (5 * 144 + 1440 + 10 + 50) and linear.multiply_adds == 5 * 1440
    assert conv.products[0].unrolled_bytes == 4 * 5 * 36 * 27 and point.products[0].unrolled_bytes == 0
    for work in (conv, point, linear):
        assert sum(product.multiply_adds for product in work.products) == work.multiply_adds


def test_halves_have_two_bytes_and_linear_weights_in_int8_one(net: nn.Module, task: Any) -> None:
    full = of_modules(net, task, 5, None, "fp32", compiled=False)
    half = of_modules(net, task, 5, None, "bf16", compiled=False)
    assert [work.bytes for work in half] == [work.bytes // 2 for work in full]
    assert {work.precision for work in half} == {"bf16"}
    byte = of_modules(net, task, 5, None, "int8", compiled=False)
    assert full[-1].bytes - byte[-1].bytes == 3 * 1440
    assert (byte[-1].precision, byte[2].precision) == ("int8", "fp32")


def test_compiled_models_count_what_multiplies(net: nn.Module, task: Any) -> None:
    found = of_modules(net, task, 1, None, "fp32", compiled=True)
    assert [work.kind for work in found] == ["Conv2d", "Conv2d", "Linear"]


def test_a_module_called_twice_counts_twice(make_workload: Any) -> None:
    block = nn.Linear(6, 6, bias=False)
    (found,) = of_modules(
        nn.Sequential(block, block), make_workload(block, {"x": ("float32", (6,))}), 2, None, "fp32", True
    )
    assert found.kind == "Linear ×2" and found.multiply_adds == 2 * 2 * 36
    assert found.bytes == 2 * 4 * (12 + 36 + 12)


def test_a_bert_counts_what_its_account_does_at_a_shorter_length_too(text: Any) -> None:
    torch.manual_seed(0)
    model = text.model(layers=2)
    whole = sum(work.multiply_adds for work in of_modules(model, text, 3, None, "fp32", compiled=False))
    assert whole == 3 * account.count(model, text).multiply_adds
    short = of_modules(model, text, 3, 6, "fp32", compiled=False)
    linear = [work for work in short if work.kind == "Linear" and "intermediate" in work.name]
    assert [work.multiply_adds for work in linear] == [3 * 6 * 32 * 64] * 2
    embedding = next(work for work in short if work.name.endswith("word_embeddings"))
    assert embedding.bytes == 3 * 6 * (8 + 2 * 4 * 32), "ids, and the rows read and written"

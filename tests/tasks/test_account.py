from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks import account


def task(*shape: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(INPUTS={"x": ("float32", shape)}, OUTPUTS=("y",))


def slow_convolution(x: torch.Tensor, layer: nn.Conv2d) -> tuple[torch.Tensor, int]:
    """A 2-d convolution as loops, counting every multiply-add, padding included."""
    padded = nn.functional.pad(x, (layer.padding[1],) * 2 + (layer.padding[0],) * 2)
    height, width = layer.kernel_size
    rows = (padded.shape[2] - height) // layer.stride[0] + 1
    columns = (padded.shape[3] - width) // layer.stride[1] + 1
    out, done = torch.zeros(len(x), layer.out_channels, rows, columns), 0
    group_in, group_out = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    for o in range(layer.out_channels):
        first = o // group_out * group_in
        for r in range(rows):
            for c in range(columns):
                for i in range(group_in):
                    for a in range(height):
                        for b in range(width):
                            value = padded[0, first + i, r * layer.stride[0] + a, c * layer.stride[1] + b]
                            out[0, o, r, c] += value * layer.weight[o, i, a, b]
                            done += 1
    return out, done


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.Conv2d(4, 4, (3, 1), stride=2, groups=4, bias=False),
        nn.Conv2d(4, 6, 1, groups=2, bias=False),
    ],
)
def test_convolutions_agree_with_counted_loops(layer: nn.Conv2d) -> None:
    x = torch.randn(1, layer.in_channels, 5, 6)
    with torch.no_grad():
        expected, done = slow_convolution(x, layer)
        assert torch.allclose(layer(x), expected, atol=1e-5)
    found = account.count(nn.Sequential(layer), task(*x.shape[1:]))
    assert found.multiply_adds == done
    assert found.parameters == sum(p.numel() for p in layer.parameters())
    assert found.activation_bytes == expected.numel() * 4
    assert found.peak_activation_bytes == (x.numel() + expected.numel()) * 4


def test_a_transposed_convolution_counts_each_input_value() -> None:
    layer = nn.ConvTranspose2d(3, 5, 2, stride=2, bias=False)
    assert account.count(nn.Sequential(layer), task(3, 4, 4)).multiply_adds == 3 * 4 * 4 * 5 * 2 * 2


def test_a_linear_layer_over_a_sequence() -> None:
    found = account.count(nn.Sequential(nn.Linear(8, 3)), task(7, 8))
    assert found.multiply_adds == 7 * 8 * 3
    assert found.parameters == 8 * 3 + 3 and found.bytes == 4 * found.parameters


class Twice(nn.Module):
    """One block called twice, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.block(self.block(x))))


def test_a_block_called_twice_works_twice_and_weighs_once() -> None:
    found = account.count(Twice(), task(4))
    layers = {layer.name: layer for layer in found.layers}
    assert layers["block"].calls == 2 and layers["block"].multiply_adds == 2 * 16
    assert layers["block"].parameters == 16


def test_a_tied_weight_weighs_once() -> None:
    model = Twice()
    found = account.count(model, task(4))
    assert found.parameters == sum(p.numel() for p in model.parameters()) == 16 + 16 + 4
    assert found.multiply_adds == 4 * 16


def test_buffers_weigh_but_are_no_parameters() -> None:
    found = account.count(nn.Sequential(nn.BatchNorm2d(6)), task(6, 2, 2))
    assert found.parameters == 12
    assert found.bytes == 12 * 4 + 12 * 4 + 8
    assert found.multiply_adds == 0


def test_the_mode_is_restored_and_statistics_stay() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    model.train()
    before = model[0].running_mean.clone()
    account.count(model, task(2, 3, 3))
    assert model.training and torch.equal(model[0].running_mean, before)
    assert not model[0]._forward_hooks


def test_each_modules_mode_is_restored() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout())
    model[0].eval()
    account.count(model, task(2, 3, 3))
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


def test_resnet8_has_the_closed_form_of_its_paper() -> None:
    from tasks.workloads import digits

    found = account.count(digits.model(width=16), digits)
    sizes = {28: 16, 14: 32, 7: 64}
    expected = 28 * 28 * 9 * 1 * 16
    for side, width in sizes.items():
        before = width if side == 28 else width // 2
        expected += side * side * 9 * (before * width + width * width)
        expected += 0 if side == 28 else side * side * before * width
    assert found.multiply_adds == expected + 64 * 10
    assert found.parameters == 77754


def test_half_the_width_needs_about_a_quarter(tmp_path: Path) -> None:
    from tasks.workloads import digits

    full, half = (account.count(digits.model(width=w), digits) for w in (16, 8))
    assert 0.24 < half.multiply_adds / full.multiply_adds < 0.27

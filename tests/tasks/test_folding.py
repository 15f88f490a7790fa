"""Batch norms folded into convolutions: the same outputs, and those that must stay are named with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tasks import folding

INPUTS = {"x": ("float32", (2, 4, 4))}


@pytest.fixture
def pairs_of(make_workload: Any) -> Any:
    """`pairs_of(model, x)`: what is folded and what is left, of a model whose statistics and scales are random."""

    def find(model: nn.Module, x: torch.Tensor, inputs: Any = INPUTS) -> tuple[dict[str, str], dict[str, str]]:
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None:
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
                norm.weight.data.uniform_(0.5, 2)
                norm.bias.data.normal_()
        return folding.foldable(model.eval(), make_workload(model, inputs), {next(iter(inputs)): x})

    torch.manual_seed(0)
    return find


@pytest.mark.parametrize("frozen", [False, True])
def test_folding_changes_no_output_and_leaves_what_is_frozen_so(tiny: Any, pairs_of: Any, frozen: bool) -> None:
    model, x = tiny.model(width=8), torch.randn(3, 1, 8, 8)
    model.requires_grad_(not frozen)
    pairs, left = pairs_of(model, x, tiny.INPUTS)
    assert pairs == {"stem.1": "stem.0", "block.bn1": "block.conv1", "block.bn2": "block.conv2"} and not left
    before = model(x)
    for norm, conv in pairs.items():
        folding.fold(model, norm, conv)
    assert torch.allclose(model(x), before, atol=1e-4)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert {p.requires_grad for p in model.parameters()} == {not frozen}


def test_tied_convolutions_stay_as_they_are(pairs_of: Any) -> None:
    """The fault: two convolutions hold one tensor, each is called once, and folding scales it for both."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
    )
    model[2].weight = model[0].weight
    pairs, left = pairs_of(model, torch.randn(2, 2, 4, 4))
    assert pairs == {"5": "4"}
    assert left == {"1": "not folded: 0 stands, or shares a parameter, at several names"}


def test_a_tied_bias_counts_as_well_and_so_does_a_norm_at_two_names(pairs_of: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))
    model[2].bias = model[0].bias
    pairs, left = pairs_of(model, torch.randn(2, 2, 4, 4))
    assert not pairs and "shares a parameter" in left["1"]
    norm = nn.BatchNorm2d(2)
    single = nn.Sequential(nn.Conv2d(2, 2, 1), norm)
    single[0].again = norm
    pairs, left = pairs_of(single, torch.randn(2, 2, 4, 4))
    assert not pairs and len(left) == 1


class Cases(nn.Module):
    """Convolutions called twice, read twice and transposed; norms that stand alone, without statistics, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.read, self.turned = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.ConvTranspose2d(2, 2, 1)
        self.alone, self.of_twice, self.of_read, self.of_turned, self.unused = (nn.BatchNorm2d(2) for _ in range(5))
        self.fine = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        self.bare = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.of_twice(self.twice(self.twice(self.alone(x))))
        y = self.read(x)
        return self.bare(self.of_turned(self.turned(self.fine(self.of_read(y) * y)))).mean((2, 3))


def test_only_a_norm_that_alone_reads_a_convolution_called_once_is_folded(pairs_of: Any) -> None:
    pairs, left = pairs_of(Cases(), torch.randn(2, 2, 4, 4))
    assert pairs == {"fine.1": "fine.0"}
    assert {name: reason.removeprefix("not folded: ") for name, reason in left.items()} == {
        "alone": "it isn't the only reader of a convolution's output",
        "of_twice": "it or twice is called more than once",
        "of_read": "it isn't the only reader of a convolution's output",
        "of_turned": "turned is a transposed convolution",
        "bare.1": "it keeps no statistics",
        "unused": "its forward is never called",
    }

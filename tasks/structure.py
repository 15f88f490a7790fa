"""Changes of a model's module tree that a checkpoint has to make again on loading."""

from __future__ import annotations

from typing import Any

from torch import nn


def factors(module: nn.Module, rank: int) -> nn.Sequential:
    """Two fresh layers of a given rank in place of a linear layer or an ungrouped convolution."""
    if isinstance(module, nn.Linear):
        return nn.Sequential(
            nn.Linear(module.in_features, rank, bias=False),
            nn.Linear(rank, module.out_features, bias=module.bias is not None),
        )
    assert isinstance(module, nn.Conv2d) and module.groups == 1
    kept: dict[str, Any] = {
        key: getattr(module, key) for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    return nn.Sequential(
        nn.Conv2d(module.in_channels, rank, bias=False, **kept),
        nn.Conv2d(rank, module.out_channels, 1, bias=module.bias is not None),
    )


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of the one at a dotted name, in the same mode."""
    parent, _, key = name.rpartition(".")
    new.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), key, new)

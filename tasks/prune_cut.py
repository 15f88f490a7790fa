"""A dependency group of channels, and its removal: proven right on samples, or put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch_pruning as tp
from torch import nn

from tasks import fit, structure
from tasks.prune_ranking import PRUNABLE
from tasks.workloads.protocol import Workload

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Group:
    """Layers whose output channels go together. `root` numbers them; every `parts` of them share a fate.

    `parts` is above 1 where a grouped convolution or norm wants its groups to stay alike.
    """

    root: nn.Module
    outputs: tuple[nn.Module, ...]
    parts: int
    whole: tp.dependency.Group


def widths(module: nn.Module) -> tuple[int, int]:
    """Input and output channels (or features) of a convolution or linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    assert isinstance(module, nn.modules.conv._ConvNd)
    return module.in_channels, module.out_channels


def remove(
    model: nn.Module, task: Workload, sample: fit.Tensors, group: Group, units: list[int], round_to: int
) -> str | None:
    """Remove channels in place; the reason if what is left isn't right, with the model as it was.

    `sample` [n, …] are the inputs on which what is left is compared.
    """
    graph = group.whole._DG
    width = widths(group.root)[1]
    part = width // group.parts
    indices = [unit + i * part for i in range(group.parts) for unit in units]
    cut = graph.get_pruning_group(group.root, graph.get_pruner_of_module(group.root).prune_out_channels, indices)
    targets = {dep.target.module for dep, _ in cut}
    restore = structure.remembered(targets)
    frozen = {m: [n for n, p in m.named_parameters(recurse=False) if not p.requires_grad] for m in targets}
    with torch.no_grad(), fit.eval_mode(model):
        with _without(cut):
            expected = fit.forward(model, task, sample)
        try:
            cut.prune()
            left = {widths(m)[1] for m in group.outputs}
            reason = _wrong_width(left, width - len(indices), round_to)
            if reason is None:
                got = fit.forward(model, task, sample)
                same = all(_same(got[name], value) for name, value in expected.items())
                reason = None if same else "without some of its channels the model doesn't compute what is left of it"
        except Exception as error:
            reason = f"without some of its channels the model doesn't run: {' '.join(str(error).split())[:120]}"
    if reason:
        restore()
        return reason
    for module, keys in frozen.items():
        for key in keys:
            module.get_parameter(key).requires_grad_(False)
    return None


def _wrong_width(left: set[int], expected: int, round_to: int) -> str | None:
    right = left == {expected} and expected >= round_to and expected % round_to == 0
    return None if right else "more of its channels would go than those chosen"


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two outputs are the same within rounding errors."""
    if got.shape != expected.shape:
        return False
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())


@contextlib.contextmanager
def _without(cut: tp.dependency.Group) -> Iterator[None]:
    """Layers that take up a group's channels see zeros in those that go; norms over channels leave them out."""
    hooks = []
    for dep, indices in cut:
        module, gone = dep.target.module, list(indices)
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            hooks.append(module.register_forward_hook(lambda m, x, _, gone=gone: _norm(m, x[0], gone)))
        elif isinstance(module, PRUNABLE) and cut._DG.is_in_channel_pruning_fn(dep.handler):
            hooks.append(module.register_forward_pre_hook(lambda m, x, gone=gone: _zeroed(m, x[0], gone)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeroed(module: nn.Module, x: torch.Tensor, gone: Sequence[int]) -> torch.Tensor:
    """The input of a convolution [n, channels, …] or a linear layer [n, …, features] with zeros in some channels."""
    axis = x.dim() - 1 - (len(module.kernel_size) if isinstance(module, nn.modules.conv._ConvNd) else 0)
    return x.index_fill(axis, torch.tensor(gone), 0)


def _norm(module: nn.LayerNorm | nn.GroupNorm, x: torch.Tensor, gone: Sequence[int]) -> torch.Tensor:
    """What a norm makes of [n, …, features] (layer) or [n, channels, …] (groups) without some; zeros in their place."""
    axis = x.dim() - 1 if isinstance(module, nn.LayerNorm) else 1
    kept = torch.tensor([i for i in range(x.shape[axis]) if i not in set(gone)])
    weight, bias = (None if p is None else p[kept] for p in (module.weight, module.bias))
    inner = x.index_select(axis, kept)
    if isinstance(module, nn.LayerNorm):
        made = nn.functional.layer_norm(inner, (len(kept),), weight, bias, module.eps)
    else:
        made = nn.functional.group_norm(inner, module.num_groups, weight, bias, module.eps)
    return torch.zeros_like(x).index_copy(axis, kept, made)

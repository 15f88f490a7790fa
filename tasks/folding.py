"""Batch norms folded into the convolution before them: Jacob et al. 2018, arXiv:1712.05877, section 3.2."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from tasks import fit
from tasks.structure import replace_module
from tasks.workloads.protocol import Workload

CONVOLUTION = nn.modules.conv._ConvNd


def foldable(model: nn.Module, task: Workload, example: fit.Tensors) -> dict[str, str]:
    """Every batch norm that alone reads the output of a convolution, with that convolution; both are called once."""
    calls: Counter[nn.Module] = Counter()
    made: dict[object, nn.Module] = {}

    def hook(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        calls[module] += 1
        made[output.grad_fn] = module

    names = {m: n for n, m in model.named_modules() if isinstance(m, CONVOLUTION | nn.modules.batchnorm._BatchNorm)}
    hooks = [module.register_forward_hook(hook) for module in names]
    try:
        with torch.enable_grad(), fit.eval_mode(model):
            outputs = fit.forward(model, task, example)
    finally:
        for handle in hooks:
            handle.remove()
    readers = _readers([value.grad_fn for value in outputs.values()])
    pairs = {}
    for node, norm in made.items():
        sources = [before for before, _ in node.next_functions if before in made] if node is not None else []  # type: ignore[attr-defined]
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and len(sources) == 1 and readers[sources[0]] == 1:
            conv = made[sources[0]]
            once = calls[norm] == calls[conv] == 1
            if once and isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d) and norm.running_mean is not None:
                pairs[names[norm]] = names[conv]
    return pairs


def _readers(ends: list[Any]) -> Counter[object]:
    """How many nodes of an autograd graph read each node's output; an output of the model is read once more."""
    readers: Counter[object] = Counter(ends)
    todo, seen = list(ends), set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            readers.update(before for before, _ in node.next_functions)
            todo += [before for before, _ in node.next_functions]
    return readers


@torch.no_grad()
def fold(model: nn.Module, norm_name: str, conv_name: str) -> None:
    """Put a batch norm's scale and shift into the convolution before it; an identity takes its place."""
    norm, conv = model.get_submodule(norm_name), model.get_submodule(conv_name)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm) and isinstance(conv, CONVOLUTION)
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale if norm.bias is None else norm.bias - norm.running_mean * scale
    conv.weight.mul_(scale.reshape(-1, *[1] * (conv.weight.dim() - 1)))
    conv.bias = nn.Parameter(shift if conv.bias is None else shift + conv.bias * scale)
    replace_module(model, norm_name, nn.Identity())

"""Batch norms folded into the convolution before them: Jacob et al. 2018, arXiv:1712.05877, section 3.2."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tasks import fit
from tasks.structure import replace_module
from tasks.workloads.protocol import Workload

CONVOLUTION = nn.modules.conv._ConvNd


@dataclass
class _Calls:
    """What a run of the model calls: how often each module, and the node of the autograd graph that it made last."""

    names: dict[nn.Module, str]
    count: Counter[nn.Module]
    made: dict[Any, nn.Module]
    readers: Counter[Any]


def foldable(model: nn.Module, task: Workload, example: fit.Tensors) -> tuple[dict[str, str], dict[str, str]]:
    """Every batch norm that alone reads the output of a convolution, with that convolution; both are called once.

    And every other batch norm, with the reason why it stays: a convolution that shares a parameter
    would change in both places.
    """
    calls = _run(model, task, example)
    before = {norm: conv for node, norm in calls.made.items() if (conv := _maker(node, calls)) is not None}
    shared = _shared(model)
    pairs, left = {}, {}
    for norm, name in calls.names.items():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            reason = _obstacle(norm, before.get(norm), calls, shared)
            if reason:
                left[name] = f"not folded: {reason}"
            else:
                pairs[name] = calls.names[before[norm]]
    return pairs, left


def _obstacle(norm: Any, conv: nn.Module | None, calls: _Calls, shared: set[nn.Module]) -> str:
    if not calls.count[norm]:
        return "its forward is never called"
    if norm.running_mean is None:
        return "it keeps no statistics"
    if conv is None:
        return "it isn't the only reader of a convolution's output"
    name = calls.names[conv]
    if not isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"{name} is a transposed convolution"
    if calls.count[norm] > 1 or calls.count[conv] > 1:
        return f"it or {name} is called more than once"
    if norm in shared or conv in shared:
        return f"{calls.names[norm if norm in shared else conv]} stands, or shares a parameter, at several names"
    return ""


def _run(model: nn.Module, task: Workload, example: fit.Tensors) -> _Calls:
    """Run the model with a gradient for every parameter, since the graph leaves frozen ones out; they stay frozen."""
    kinds = CONVOLUTION | nn.modules.batchnorm._BatchNorm
    names: dict[nn.Module, str] = {m: n for n, m in model.named_modules() if isinstance(m, kinds)}
    count: Counter[nn.Module] = Counter()
    made: dict[Any, nn.Module] = {}

    def hook(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        count[module] += 1
        if output.grad_fn is not None:
            made[output.grad_fn] = module

    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    hooks = [module.register_forward_hook(hook) for module in names]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad(), fit.eval_mode(model):
            outputs = fit.forward(model, task, example)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for handle in hooks:
            handle.remove()
    return _Calls(names, count, made, _readers([value.grad_fn for value in outputs.values()]))


def _maker(node: Any, calls: _Calls) -> nn.Module | None:
    """The convolution whose output a node alone reads."""
    sources = [before for before, _ in node.next_functions if before in calls.made]
    alone = len(sources) == 1 and calls.readers[sources[0]] == 1
    return calls.made[sources[0]] if alone and isinstance(calls.made[sources[0]], CONVOLUTION) else None


def _shared(model: nn.Module) -> set[nn.Module]:
    """The modules that stand at several names, and the convolutions one of whose own parameters does."""
    modules = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    tensors = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        module
        for module, times in modules.items()
        if times > 1 or (isinstance(module, CONVOLUTION) and any(tensors[p] > 1 for p in module.parameters(False)))
    }


def _readers(ends: list[Any]) -> Counter[Any]:
    """How many nodes of an autograd graph read each node's output; an output of the model is read once more."""
    readers: Counter[Any] = Counter(ends)
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
    """Put a batch norm's scale and shift into the convolution before it; an identity takes its place.

    The convolution's bias is trained on if any parameter of the two was.
    """
    norm, conv = model.get_submodule(norm_name), model.get_submodule(conv_name)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm) and isinstance(conv, CONVOLUTION)
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale if norm.bias is None else norm.bias - norm.running_mean * scale
    conv.weight.mul_(scale.reshape(-1, *[1] * (conv.weight.dim() - 1)))
    trained = any(p.requires_grad for module in (norm, conv) for p in module.parameters())
    conv.bias = nn.Parameter(shift if conv.bias is None else shift + conv.bias * scale, trained)
    replace_module(model, norm_name, nn.Identity())

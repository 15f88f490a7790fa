"""Structured pruning of whole channels, in dependency groups.

A group is all that one channel runs through: residual sums, norms, depthwise convolutions and
the inputs of the next layers, so that they stay consistent (DepGraph, Fang et al. 2023,
arXiv:2301.12900, the Torch-Pruning library). Importance, as a multiple of the group's mean:
DepGraph's group magnitude (squared L2 norms, a mean over the group's layers), first-order Taylor
(Molchanov et al. 2019, arXiv:1906.10771), the batch norm's scale (Liu et al. 2017,
arXiv:1708.06519); or random as a control. What is left computes exactly what the full model does
with those channels at zero wherever they are taken up, and norms over channels without them:
every group is checked for it, and put back if it isn't so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch_pruning as tp
from torch import nn

from tasks import fit
from tasks.prune_cut import Group, remove, widths
from tasks.prune_ranking import (
    PRUNABLE,
    Candidate,
    Cut,
    Layer,
    gradients,
    named,
    output_layers,
    require_named,
    starts,
    weakest,
)
from tasks.settings import PruneParams
from tasks.structure import shared_parameters, thawed
from tasks.transformer import attentions
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

CUTTABLE = (
    *PRUNABLE,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Embedding,
    nn.PReLU,
)
IMPORTANCE = {
    "magnitude": tp.importance.GroupMagnitudeImportance,
    "taylor": tp.importance.GroupTaylorImportance,
    "norm_scale": tp.importance.BNScaleImportance,
    "random": tp.importance.RandomImportance,
}
SAMPLES = 8


def prune_channels(
    model: nn.Module,
    task: Workload,
    train: Arrays,
    params: PruneParams,
    ratio: float | None = None,
    last: Cut | None = None,
) -> Cut:
    """Remove the share `ratio` (else `params.ratio`) of the output channels in place, to multiples of `round_to`.

    What is left is the nearest multiple, so that a small share may take nothing. Layers that make the
    model's outputs keep theirs, and so does a group with no more than `round_to` channels, one that
    no gradient reaches (Taylor), or one that can't be cut rightly; every other keeps at least `round_to`.
    """
    ratio = params.ratio if ratio is None else ratio
    names: dict[nn.Module, str] = {m: n for n, m in model.named_modules() if isinstance(m, PRUNABLE)}
    require_named(list(names.values()), params)
    before = starts(last, {name: widths(module)[1] for module, name in names.items()})
    refused = _refused(model, task, names, before, params)
    if params.importance == "taylor":
        with thawed(model):
            gradients(model, task, train, params)
    groups, candidates = [], []
    for group in _groups(model, task, names, refused):
        scores = IMPORTANCE[params.importance]()(group.whole)
        reason = _unscored(scores, params)
        if reason:
            refused |= dict.fromkeys(group.outputs, reason)
            continue
        multiple = params.round_to // math.gcd(params.round_to, group.parts)
        root = names[group.root]
        groups.append(group)
        candidates.append(
            Candidate(root, scores.view(group.parts, -1).mean(0).cpu(), before[root] // group.parts, multiple)
        )
    sample = fit.tensors({name: train[name][:SAMPLES] for name in task.INPUTS})
    for group, units in zip(groups, weakest(candidates, ratio, params), strict=True):
        reason = f"nothing could go from its group at ratio {ratio:.3g} and round_to {params.round_to}"
        if units:
            reason = remove(model, task, sample, group, units, params.round_to)
        refused |= dict.fromkeys(group.outputs, reason) if reason else {}
    model.zero_grad(set_to_none=True)
    layers = [_layer(name, before[name], widths(module)[1], refused.get(module)) for module, name in names.items()]
    return Cut(layers, last.masks if last else {})


def _refused(
    model: nn.Module, task: Workload, names: dict[nn.Module, str], before: dict[str, int], params: PruneParams
) -> dict[nn.Module, str]:
    """Layers that keep their output channels whatever the ratio, and why."""
    protected = output_layers(model, task, fit.tensors(protocol.example(task, 2)))
    heads = {p for a in attentions(model) for p in (a.query, a.key, a.value)}
    refused = {}
    for module, name in names.items():
        width = before[name]
        if module in protected:
            refused[module] = "it makes an output of the model"
        elif module in heads:
            refused[module] = "it feeds attention heads: granularity head removes those"
        elif not named(name, params):
            refused[module] = "only doesn't name it"
        elif width <= params.round_to:
            refused[module] = f"it has {width} channels, and round_to is {params.round_to}"
    return refused


def _groups(
    model: nn.Module, task: Workload, names: dict[nn.Module, str], refused: dict[nn.Module, str]
) -> Iterator[Group]:
    """Every group that may be cut; the layers of those that may not are added to `refused`."""
    example = fit.tensors(protocol.example(task, 2))
    graph = tp.DependencyGraph().build_dependency(
        model, example, forward_fn=lambda m, x: list(fit.forward(m, task, x).values()), verbose=False
    )
    faults = _faults(model, task, example)
    lost = "no gradient passes it, so that its channels can't be followed"
    refused.update({m: refused.get(m, lost) for m in names if m not in graph.module2node})
    seen: set[nn.Module] = set()
    for root in [m for m in graph.module2node if m in names]:
        if root in seen or root in refused:
            continue
        width = widths(root)[1]
        whole = graph.get_pruning_group(root, graph.get_pruner_of_module(root).prune_out_channels, list(range(width)))
        cut = [dep.target.module for dep, _ in whole if graph.is_out_channel_pruning_fn(dep.handler)]
        outputs = tuple(dict.fromkeys(m for m in cut if m in names))
        seen.update(outputs)
        parts, reason = _parts(whole, width)
        reason = reason or _fused(graph, root, width)
        kept = next((m for m in outputs if m in refused), None)
        if kept is not None:
            reason = f"its channels are tied to those of {names[kept]}: {refused[kept]}"
        for target in [dep.target.module for dep, _ in whole]:
            reason = reason or faults.get(target)
            if isinstance(target, nn.Parameter):
                reason = reason or "its channels meet a bare parameter of the model"
        if reason:
            refused.update({m: refused.get(m, reason) for m in outputs})
        else:
            yield Group(root, outputs, parts, whole)


def _faults(model: nn.Module, task: Workload, example: fit.Tensors) -> dict[nn.Module, str]:
    """Modules that no group may reach, since they would come out wrong, and why."""
    calls: dict[nn.Module, int] = {}
    holders = [(m, n) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    hooks = [m.register_forward_hook(lambda m, *_: calls.update({m: calls.get(m, 0) + 1})) for m, _ in holders]
    with torch.no_grad():
        fit.forward(model, task, example)
    for hook in hooks:
        hook.remove()
    shared = shared_parameters(model)
    faults = {}
    for module, name in holders:
        if any(id(p) in shared for p in module.parameters(recurse=False)):
            faults[module] = f"its channels meet {name}, whose weights are shared with another layer"
        elif calls.get(module, 0) > 1:
            faults[module] = f"its channels meet {name}, which runs more than once"
        elif not isinstance(module, CUTTABLE):
            faults[module] = f"its channels meet {name}, a {type(module).__name__}, which isn't cut"
    return faults


def _parts(whole: tp.dependency.Group, width: int) -> tuple[int, str | None]:
    """How many like parts grouped convolutions and norms divide the channels into; a reason if that fails."""
    parts = 1
    for dep, indices in whole:
        module = dep.target.module
        groups = module.num_groups if isinstance(module, nn.GroupNorm) else getattr(module, "groups", 1)
        if groups > 1 and not (isinstance(module, PRUNABLE) and groups == module.out_channels):
            parts = math.lcm(parts, groups)
            inwards = isinstance(module, PRUNABLE) and whole._DG.is_in_channel_pruning_fn(dep.handler)
            full = widths(module)[not inwards] if isinstance(module, PRUNABLE) else module.num_channels
            if list(indices) != list(range(width)) or width != full:
                return 1, "its channels are only part of what a grouped layer takes"
    if width % parts:
        return 1, f"its {width} channels don't divide into {parts} groups"
    return parts, None


def _fused(graph: tp.DependencyGraph, root: nn.Module, width: int) -> str | None:
    """The reason if a channel of a layer takes others of the same layer along, as in a gated or fused projection."""
    for channel in (0, width - 1):
        whole = graph.get_pruning_group(root, graph.get_pruner_of_module(root).prune_out_channels, [channel])
        for dep, indices in whole:
            if dep.target.module is root and graph.is_out_channel_pruning_fn(dep.handler) and len(set(indices)) > 1:
                return f"{len(set(indices))} of its own channels meet each other: it is several layers in one"
    return None


def _unscored(scores: torch.Tensor | None, params: PruneParams) -> str | None:
    if scores is None:
        return "no batch norm follows it, and importance is norm_scale"
    if scores.isfinite().all():
        return None
    return "no gradient reaches it" if params.importance == "taylor" else "its importance isn't a number"


def _layer(name: str, before: int, after: int, reason: str | None) -> Layer:
    note = None
    if after != before and after % 8 and not before % 8:
        note = f"{after} is no multiple of 8: kernels pad it, so that it may be no faster than {after + -after % 8}"
    return Layer(name, before, after, reason if after == before else None, note)

"""Unstructured pruning: single weights become zero and are held there by masks.

Magnitude: Han et al. 2015, arXiv:1506.02626; Taylor: |weight · gradient|, Molchanov et al. 2019,
arXiv:1906.10771; random as a control. The zeros run through the same dense kernels as any other
number: this shrinks a compressed file, not the time of an engine.
"""

from __future__ import annotations

import torch
from torch import nn

from tasks import fit
from tasks.checkpoint import Masks
from tasks.fit import apply_masks
from tasks.prune_ranking import PRUNABLE, Cut, Layer, gradients, named, output_layers, require_named, starts
from tasks.settings import PruneParams
from tasks.structure import thawed
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload


def prune_weights(model: nn.Module, task: Workload, train: Arrays, params: PruneParams, ratio: float, last: Cut) -> Cut:
    """Zero the share `ratio` of the weights of linear layers and convolutions in place, and mask them.

    Weights that `last` masks count as gone and stay so. Layers that make an output, embeddings,
    norms and biases stay whole; with scope `global` every layer keeps at least one weight.
    """
    owners = {n: m for n, m in model.named_modules() if isinstance(m, PRUNABLE)}
    require_named(list(owners), params)
    protected = output_layers(model, task, fit.tensors(protocol.example(task, 2)))
    parameters = {id(p): n for n, p in model.named_parameters()}
    reasons = {n: _reason(n, m, protected, params) for n, m in owners.items()}
    chosen = {parameters[id(m.weight)]: m.weight for n, m in owners.items() if not reasons[n]}
    for name, module in owners.items():  # a weight shared with a layer that stays whole
        if reasons[name]:
            chosen.pop(parameters[id(module.weight)], None)
    if params.importance == "taylor":
        with thawed(model):
            gradients(model, task, train, params)
    scores = {name: _scores(weight, params.importance, last.masks.get(name)) for name, weight in chosen.items()}
    model.zero_grad(set_to_none=True)
    masks = {**last.masks, **(_all(scores, ratio) if params.scope == "global" else _each(scores, ratio))}
    apply_masks(model, masks)
    there = {
        n: int(last.masks[key].sum()) if (key := parameters[id(m.weight)]) in last.masks else m.weight.numel()
        for n, m in owners.items()
    }
    before = starts(last, there)
    layers = []
    for name, module in owners.items():
        key = parameters[id(module.weight)]
        left = int(masks[key].sum()) if key in masks else there[name]
        reason = reasons[name] or "its weight is shared with a layer that stays whole"
        stays = _unmoved(before[name], left, module.weight.numel(), ratio)
        layers.append(Layer(name, before[name], left, stays if key in chosen else reason))
    return Cut(layers, masks)


def _reason(name: str, module: nn.Module, protected: set[nn.Module], params: PruneParams) -> str | None:
    if module in protected:
        return "it makes an output of the model"
    return None if named(name, params) else "only doesn't name it"


def _unmoved(before: int, left: int, total: int, ratio: float) -> str | None:
    """Why a layer that may lose weights lost none."""
    if left < before:
        return None
    zero = left < total and total - left >= int(total * ratio)
    return f"at least {ratio:.3g} of it is zero already" if zero else f"none of its {left} weights could go"


def _scores(weight: torch.Tensor, importance: str, mask: torch.Tensor | None) -> torch.Tensor:
    if importance == "random":
        scores = torch.rand(weight.shape)
    elif importance == "taylor":
        assert weight.grad is not None
        scores = (weight * weight.grad).detach().abs()
    else:
        scores = weight.detach().abs()
    return scores if mask is None else scores.masked_fill(~mask, -1.0)


def _each(scores: dict[str, torch.Tensor], ratio: float) -> Masks:
    """Masks that drop the lowest share of every tensor, and whatever was masked before."""
    return {name: _keep(value, int(value.numel() * ratio)) for name, value in scores.items()}


def _all(scores: dict[str, torch.Tensor], ratio: float) -> Masks:
    """Masks that drop the lowest share of all tensors together; the best of each stays."""
    for value in scores.values():
        value.view(-1)[value.argmax()] = torch.inf
    flat = torch.cat([value.flatten() for value in scores.values()])
    kept = _keep(flat, int(len(flat) * ratio)).split([value.numel() for value in scores.values()])
    return {name: part.view_as(value).clone() for (name, value), part in zip(scores.items(), kept, strict=True)}


def _keep(scores: torch.Tensor, count: int) -> torch.Tensor:
    kept = scores >= 0
    kept.view(-1)[scores.flatten().topk(count, largest=False, sorted=False).indices] = False
    return kept

"""Pruning of whole attention heads: rows of query, key and value, columns of the output projection.

Taylor: |context · gradient of the loss by it|, which is the gradient of a gate on the head
(Michel et al. 2019, arXiv:1905.10650, section 4.1); magnitude: the norm of the head's weights;
random as a control. What is left computes exactly what the full model does with those heads'
context at zero: every layer is checked for it, and put back if it isn't so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tasks import device, fit, structure
from tasks.errors import Fault
from tasks.prune_ranking import Candidate, Cut, Layer, batches, named, require_named, starts, weakest
from tasks.settings import PruneParams
from tasks.structure import shared_parameters, thawed
from tasks.transformer import HEADS, Attention, attentions
from tasks.workloads.protocol import Arrays, Workload

OUTPUTS = ("out_proj", "o_proj", "out_lin")
WIDTHS = ("all_head_size", "inner_dim", "embed_dim")
TOLERANCE = 1e-4
SAMPLES = 8


@dataclass(frozen=True)
class Heads:
    """An attention with the projection that its heads' context goes to."""

    attention: Attention
    output: nn.Linear
    size: int

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.attention.query, self.attention.key, self.attention.value


def prune_heads(model: nn.Module, task: Workload, train: Arrays, params: PruneParams, ratio: float, last: Cut) -> Cut:
    """Remove the share `ratio` of the heads in place; every attention keeps at least one.

    Raises Fault if the model has no attention of the kind that `transformer.attentions` finds.
    """
    found = attentions(model)
    if not found:
        raise Fault(
            "no attention heads to prune",
            got=f"a {type(model).__name__} without them",
            expected="modules with linear query, key and value projections and a number of heads",
            do="prune channels, layers or weights",
        )
    require_named([a.name for a in found], params)
    before = starts(last, {a.name: a.heads for a in found})
    reasons = {a.name: None if named(a.name, params) else "only doesn't name it" for a in found}
    fits: list[Heads] = []
    for attention in found:
        heads, reason = _heads(model, attention)
        reasons[attention.name] = reasons[attention.name] or reason
        if heads and not reasons[attention.name]:
            fits.append(heads)
    scores = importance(model, task, train, params, fits)
    sample = fit.tensors({name: train[name][:SAMPLES] for name in task.INPUTS})
    candidates = [Candidate(h.name, scores[h.name], before[h.name]) for h in fits]
    for heads, gone in zip(fits, weakest(candidates, ratio, params), strict=True):
        if gone:
            reasons[heads.name] = remove(model, task, sample, heads, gone)
        elif heads.attention.heads == before[heads.name]:
            reasons[heads.name] = f"none of its {heads.attention.heads} heads could go at ratio {ratio:.3g}"
    layers = [_layer(a, before[a.name], reasons[a.name]) for a in attentions(model)]
    return Cut(layers, last.masks)


def importance(
    model: nn.Module, task: Workload, train: Arrays, params: PruneParams, fits: list[Heads]
) -> dict[str, torch.Tensor]:
    """A score [heads] for each attention; with scope `global` of norm 1 over a layer (Michel et al., section 4.1)."""
    if params.importance == "random":
        return {h.name: torch.rand(h.attention.heads) for h in fits}
    scores = _taylor(model, task, train, params, fits) if params.importance == "taylor" else _magnitude(fits)
    return {n: s / (s.norm() + 1e-12) for n, s in scores.items()} if params.scope == "global" else scores


def _magnitude(fits: list[Heads]) -> dict[str, torch.Tensor]:
    scores = {}
    for heads in fits:
        rows = sum(p.weight.detach().pow(2).sum(1) for p in heads.inputs)
        squares = rows + heads.output.weight.detach().pow(2).sum(0)
        scores[heads.name] = squares.view(-1, heads.size).sum(1).sqrt()
    return scores


def _taylor(
    model: nn.Module, task: Workload, train: Arrays, params: PruneParams, fits: list[Heads]
) -> dict[str, torch.Tensor]:
    """Mean over samples of |Σ context · gradient| for each head; the context is [n, tokens, heads · size].

    An attention that runs several times has one gate for all its runs.
    """
    contexts: dict[str, list[torch.Tensor]] = {h.name: [] for h in fits}

    def keep(name: str) -> object:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].requires_grad:
                inputs[0].retain_grad()
                contexts[name].append(inputs[0])

        return hook

    hooks = [h.output.register_forward_pre_hook(keep(h.name)) for h in fits]  # type: ignore[arg-type]
    sums, where = {h.name: torch.zeros(h.attention.heads) for h in fits}, device.resolve(params.device)
    with device.placed(where, model), fit.eval_mode(model), thawed(model):
        for part in batches(task, train, params):
            n = len(part["label"])
            task.loss(fit.forward(model, task, part), part["label"]).backward()
            for heads in fits:
                gates = torch.zeros(n, heads.attention.heads, device=where)
                for context in contexts[heads.name]:
                    if context.grad is not None:
                        slopes = (context * context.grad).detach()
                        gates += slopes.reshape(n, -1, heads.attention.heads, heads.size).sum((1, 3))
                sums[heads.name] += n * gates.abs().sum(0).cpu()
                contexts[heads.name].clear()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    return sums


def remove(model: nn.Module, task: Workload, sample: fit.Tensors, heads: Heads, gone: list[int]) -> str | None:
    """Remove heads in place; the reason if that can't be done, with the model as it was.

    `sample` [n, …] are the inputs on which what is left is compared.
    """
    kept = [
        i for h in range(heads.attention.heads) if h not in gone for i in range(h * heads.size, (h + 1) * heads.size)
    ]
    dropped = [i for i in range(heads.attention.heads * heads.size) if i not in set(kept)]
    modules = (heads.attention.module, *heads.inputs, heads.output)
    restore = structure.remembered(modules)
    whole = heads.output.weight.detach().clone()
    with torch.no_grad(), fit.eval_mode(model):
        heads.output.weight[:, dropped] = 0
        expected = fit.forward(model, task, sample)
        heads.output.weight.copy_(whole)
        _slice(heads, kept, len(gone))
        try:
            got = fit.forward(model, task, sample)
            same = all(torch.allclose(got[n], expected[n], atol=TOLERANCE, rtol=TOLERANCE) for n in expected)
            reason = None if same else "without some heads it doesn't compute what is left of it"
        except Exception as error:
            reason = f"without some heads it no longer runs: {' '.join(str(error).split())[:120]}"
        if reason:
            restore()
    return reason


def _slice(heads: Heads, kept: list[int], gone: int) -> None:
    module, number, width = heads.attention.module, heads.attention.heads, heads.attention.heads * heads.size
    for projection in heads.inputs:
        projection.weight = _part(projection.weight, projection.weight[kept])
        if projection.bias is not None:
            projection.bias = _part(projection.bias, projection.bias[kept])
        projection.out_features = len(kept)
    heads.output.weight = _part(heads.output.weight, heads.output.weight[:, kept])
    heads.output.in_features = len(kept)
    for names, old, new in ((HEADS, number, number - gone), (WIDTHS, width, len(kept))):
        for key in names:
            if getattr(module, key, None) == old:
                setattr(module, key, new)


def _part(whole: torch.Tensor, part: torch.Tensor) -> nn.Parameter:
    """A part of a parameter as a parameter, frozen if the whole is."""
    return nn.Parameter(part.detach().clone(), whole.requires_grad)


def _heads(model: nn.Module, attention: Attention) -> tuple[Heads | None, str | None]:
    """The attention's heads, or why they can't be taken apart."""
    width = attention.value.out_features
    if {attention.query.out_features, attention.key.out_features} != {width} or width % attention.heads:
        return None, "its queries and keys have another number of heads than its values"
    parent = model.get_submodule(attention.name.rpartition(".")[0])
    near = [getattr(attention.module, key, None) for key in OUTPUTS]
    near.append(getattr(getattr(parent, "output", None), "dense", None))
    output = next((m for m in near if isinstance(m, nn.Linear) and m.in_features == width), None)
    if output is None:
        return None, "its output projection wasn't found"
    shared = shared_parameters(model)
    own = (attention.query, attention.key, attention.value, output)
    if any(id(p) in shared for m in own for p in m.parameters(recurse=False)):
        return None, "its weights are shared with another layer"
    return Heads(attention, output, width // attention.heads), None


def _layer(attention: Attention, before: int, reason: str | None) -> Layer:
    return Layer(attention.name, before, attention.heads, reason if attention.heads == before else None)

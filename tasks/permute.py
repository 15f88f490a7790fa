"""Permutes channels so that 2:4 sparsity keeps more magnitude, without changing the model's function.

The order of a layer's input channels decides which weights compete in a group of 4. It is free
wherever all that makes these channels, passes them on or reads them can be put in the same order
(Pool and Yu 2021, "Channel Permutations for N:M Sparsity", NeurIPS). Torch-Pruning's dependency
groups (arXiv:2301.12900) say what that is; a random permutation then has to leave the outputs as
they were, or the channels stay in place. The search is the paper's greedy one, of channel swaps,
without its escapes from local optima.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_pruning as tp
from torch import nn

from tasks import fit
from tasks.checkpoint import Masks
from tasks.workloads.protocol import Arrays, Workload, example

TOLERANCE = 1e-4
MOVABLE = (nn.Linear, nn.Conv2d, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.Embedding)
Place = tuple[nn.Module, bool]
Slots = dict[Place, list[list[int]]]


def permute(
    model: nn.Module,
    task: Workload,
    train: Arrays,
    layers: dict[str, nn.Conv2d | nn.Linear],
    masks: Masks,
) -> tuple[Masks, dict[str, str]]:
    """Permute the input channels of `layers` in place, where that leaves the model's outputs as they are.

    Returns `masks` in the new order, and why each layer that wasn't permuted couldn't be.
    """
    reasons = dict.fromkeys(layers, "no layer makes its inputs one by one")
    names = {module: name for name, module in layers.items()}
    try:
        graph = tp.DependencyGraph().build_dependency(
            model.eval(), tuple(fit.tensors(example(task, 2)).values()), verbose=False
        )
    except Exception as error:
        return masks, dict.fromkeys(layers, f"the model can't be traced: {type(error).__name__}: {error}")
    samples = {key: value[:8] for key, value in train.items()}
    seen: set[nn.Module] = set()
    for root in list(model.modules()):
        if not isinstance(root, nn.Linear | nn.Conv2d | nn.Embedding) or root in seen or root not in graph.module2node:
            continue
        slots = _slots(graph, root)
        seen |= {module for module, reads in slots if not reads}
        readers = [module for (module, reads), where in slots.items() if reads and module in names and _plain(where)]
        if not readers:
            continue
        reason = _immovable(slots, set(model.modules())) or _probe(model, task, samples, slots)
        if reason is None:
            rows = torch.cat([columns(module.weight.detach()) for module in readers])
            masks = _move(model, slots, search(rows), masks)
        for name in (names[module] for module in readers):
            reasons.pop(name, None)
            if reason is not None:
                reasons[name] = reason
    return masks, reasons


def columns(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in, …] as rows of its inputs, [out · …, in]."""
    return weight.movedim(1, -1).reshape(-1, weight.shape[1])


def kept(rows: torch.Tensor) -> float:
    """The magnitude that the 2 largest of each 4 of rows [n, in] hold."""
    return float(rows.abs().double().reshape(-1, 4).topk(2, dim=1).values.sum())


def search(rows: torch.Tensor, rounds: int = 200) -> list[int]:
    """An order of the columns of rows [n, in] in which the 2 largest of each 4 hold more than before.

    Each round makes the best swaps of two columns of different groups, a group in at most one, until no
    swap helps. With the other three of a group sorted a ≥ b ≥ c, a column x in place of the fourth
    keeps Σ a + Σ max(b, x), and Σ max(b, x) = (Σ b + Σ x + Σ |b - x|) / 2: one matrix of distances.
    """
    x = rows.abs().float().T.contiguous()
    order, group = torch.arange(len(x)), torch.arange(len(x)) // 4
    value = _values(x, order)
    least = 1e-6 * float(value.diagonal().sum()) / 4
    for _ in range(rounds):
        gain = value + value.T
        gain -= value.diagonal()[:, None] + value.diagonal()[None, :]
        gain.masked_fill_(group[:, None] == group[None, :], 0)
        most, partner = gain.max(1)
        moved, source = set[int](), torch.arange(len(x))
        for i in most.argsort(descending=True, stable=True).tolist():
            j = int(partner[i])
            if most[i] > least and not {i // 4, j // 4} & moved:
                moved |= {i // 4, j // 4}
                source[i], source[j] = j, i
        if not moved:
            break
        order, x, value = order[source], x[source], value[:, source]
        touched = torch.cat([torch.arange(4) + 4 * k for k in sorted(moved)])
        value[touched] = _values(x, touched)
    return [int(k) for k in order]


def _values(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[places, in]: what the group of each place keeps with each column [in, n] of `x` at that place."""
    others = torch.stack([(places // 4) * 4 + (places + k) % 4 for k in (1, 2, 3)])
    top = x[others].topk(2, dim=0).values
    a, b = top[0], top[1]
    return a.sum(1)[:, None] + (b.sum(1)[:, None] + x.sum(1)[None, :] + torch.cdist(b, x, p=1)) / 2


def _slots(graph: Any, root: nn.Module) -> Slots:
    """Where the outputs of `root`, and all that shares their order, stand.

    By module and whether it reads them: for each channel of `root` its indices there.
    """
    weight = root.get_parameter("weight")
    width = weight.shape[1 if isinstance(root, nn.Embedding) else 0]
    prune = graph.get_pruner_of_module(root).prune_out_channels
    slots: Slots = {}
    for item in graph.get_pruning_group(root, prune, list(range(width))):
        reads = item.dep.handler.__name__ == "prune_in_channels"
        where = slots.setdefault((item.dep.target.module, reads), [[] for _ in range(width)])
        for index, channel in zip(item.idxs, item.root_idxs, strict=True):
            where[channel].append(int(index))
    return slots


def _plain(where: list[list[int]]) -> bool:
    return where == [[i] for i in range(len(where))]


def _immovable(slots: Slots, modules: set[nn.Module]) -> str | None:
    """Why these channels have to stay where they are, by what holds them, or None."""
    for (module, _), where in slots.items():
        if isinstance(module, nn.Parameter):
            return "a parameter outside of layers holds its channels"
        if module not in modules:
            continue  # An operation without weights.
        grouped = isinstance(module, nn.Conv2d) and module.groups not in (1, module.out_channels)
        if not isinstance(module, MOVABLE) or grouped:
            return f"a {'grouped convolution' if grouped else type(module).__name__} holds its channels"
        flat = [i for slot in where for i in slot]
        if len(set(flat)) != len(flat) or len({len(slot) for slot in where}) != 1:
            return f"a {type(module).__name__} holds its channels more than once"
    return None


def _probe(model: nn.Module, task: Workload, samples: Arrays, slots: Slots) -> str | None:
    """Why these channels have to stay, by what a random permutation of them does to the outputs, or None."""
    before = fit.predict(model, task, samples)
    order = torch.randperm(len(next(iter(slots.values()))), generator=torch.Generator().manual_seed(0))
    _move(model, slots, order.tolist(), {})
    after = fit.predict(model, task, samples)
    _move(model, slots, order.argsort().tolist(), {})
    for name, want in before.items():
        if abs(after[name] - want).max() > TOLERANCE * (abs(want).max() or 1):
            return "the model's outputs depend on the order of its channels, as those of attention heads do"
    return None


def _move(model: nn.Module, slots: Slots, order: list[int], masks: Masks) -> Masks:
    """Put channel `order[i]` in the place of channel i everywhere; returns the masks so."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        names.setdefault(id(tensor), []).append(name)
    moved, done = dict(masks), set()
    for (module, reads), where in slots.items():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            axis = _axis(module, tensor, reads)
            if axis is None or (id(tensor), axis) in done:
                continue
            done.add((id(tensor), axis))
            index = torch.arange(tensor.shape[axis])
            for place, channel in zip(where, order, strict=True):
                index[place] = torch.tensor(where[channel])
            with torch.no_grad():
                tensor.copy_(tensor.index_select(axis, index))
            moved |= {n: moved[n].index_select(axis, index) for n in names[id(tensor)] if n in moved}
    return moved


def _axis(module: nn.Module, tensor: torch.Tensor, reads: bool) -> int | None:
    """The axis of a module's tensor that its output (or input) channels lie along, if it has one."""
    if reads or isinstance(module, nn.Embedding):
        return 1 if tensor.ndim > 1 else None
    return 0 if tensor.ndim else None

"""What a model costs, layer by layer: parameters, bytes, multiply-adds, activation memory.

Counted on the model as it is, so that pruned, factorised and shared models are right by
construction. Multiply-adds are those of convolutions and matrix products (Sze et al. 2017,
arXiv:1703.09039, section III), those inside an attention too; a batch norm, an activation or a
pooling counts none. Zeros of a sparse weight count as any other number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tasks import checkpoint, fit, products
from tasks.closed_form import ClosedForm, closed_form
from tasks.workloads import protocol
from tasks.workloads.protocol import Workload


@dataclass(frozen=True)
class LayerCost:
    """One layer, or what a module that holds layers owns or multiplies itself, for a batch of one sample.

    `parameters` and `bytes` are of tensors not counted in an earlier layer, so that a tied
    weight counts once. `multiply_adds` and `activation_bytes` add up over all its calls.
    """

    name: str
    kind: str
    calls: int
    parameters: int
    bytes: int
    multiply_adds: int
    activation_bytes: int


@dataclass(frozen=True)
class AccountReport:
    """Totals, and the layers that they are the sums of.

    `bytes` holds parameters and buffers. `peak_activation_bytes` is the largest input plus
    output of a single call: the least that any schedule must hold at once. `closed_form` is of a
    BERT before compression, and None for other models.
    """

    parameters: int
    bytes: int
    multiply_adds: int
    activation_bytes: int
    peak_activation_bytes: int
    layers: list[LayerCost]
    closed_form: ClosedForm | None = None


@dataclass(frozen=True)
class Change:
    """What became of one layer; a layer that was replaced by several counts as their sum."""

    name: str
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    multiply_adds_before: int
    multiply_adds_after: int


@dataclass(frozen=True)
class Difference:
    """What a technique changed: totals, and every layer that holds parameters or multiplies."""

    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    multiply_adds_before: int
    multiply_adds_after: int
    layers: list[Change]


def difference(before: AccountReport, after: AccountReport, renamed: Mapping[str, str] | None = None) -> Difference:
    """Compare two accounts layer by layer; `renamed` maps a layer's old name, or a prefix of it, to the new one,
    or to "" if it is gone.

    A layer of `after` counts for the one of its name in `before`, else for the nearest above that
    name, such as the layer that it is a factor of; one that is gone has 0 after, one that is new
    has 0 before.
    """
    places: dict[str, str] = {}
    for old in before.layers:
        new = _new_name(old.name, renamed or {})
        if new is not None:
            places.setdefault(new, old.name)
    found: dict[str, list[LayerCost]] = {}
    new_ones = []
    for layer in after.layers:
        above = layer.name
        while above and above not in places:
            above = above.rpartition(".")[0]
        if above in places and (above or not layer.name):
            found.setdefault(places[above], []).append(layer)
        else:
            new_ones.append(layer)
    changes = [_change(old.name, [old], found.get(old.name, [])) for old in before.layers]
    changes += [_change(layer.name, [], [layer]) for layer in new_ones]
    used = [c for c in changes if any((c.bytes_before, c.bytes_after, c.multiply_adds_before, c.multiply_adds_after))]
    return Difference(
        before.parameters,
        after.parameters,
        before.bytes,
        after.bytes,
        before.multiply_adds,
        after.multiply_adds,
        used,
    )


def _change(name: str, old: list[LayerCost], new: list[LayerCost]) -> Change:
    return Change(
        name,
        sum(layer.parameters for layer in old),
        sum(layer.parameters for layer in new),
        sum(layer.bytes for layer in old),
        sum(layer.bytes for layer in new),
        sum(layer.multiply_adds for layer in old),
        sum(layer.multiply_adds for layer in new),
    )


def _new_name(name: str, renamed: Mapping[str, str]) -> str | None:
    for old, new in renamed.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old) if new else None
    return name


def account(source: Path) -> AccountReport:
    """Account for the model of an artifact, on one sample of ones."""
    loaded = checkpoint.load(source)
    return count(loaded.model, loaded.workload)


def count(model: nn.Module, task: Workload) -> AccountReport:
    """Run one sample through the model in eval mode and add up what every layer did."""
    calls: dict[nn.Module, list[tuple[int, int, int]]] = {}

    def called(module: nn.Module, inputs: tuple[object, ...], output: object, multiply_adds: int) -> None:
        leaf = not list(module.children())
        made, held = (_bytes(output), _bytes(output) + _bytes(inputs)) if leaf else (0, 0)
        calls.setdefault(module, []).append((multiply_adds, made, held))

    example = fit.tensors(protocol.example(task, 1))
    with torch.inference_mode(), fit.eval_mode(model), products.counting(model, called):
        outputs = fit.forward(model, task, example)
    layers = _layers(model, calls)
    first, output = next(iter(example.values())), outputs[task.OUTPUTS[0]]
    counted = [(layer.name, layer.parameters, layer.multiply_adds) for layer in layers]
    return AccountReport(
        parameters=sum(layer.parameters for layer in layers),
        bytes=sum(layer.bytes for layer in layers),
        multiply_adds=sum(layer.multiply_adds for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        peak_activation_bytes=max((held for all_calls in calls.values() for _, _, held in all_calls), default=0),
        layers=layers,
        closed_form=closed_form(model, first[0].numel(), output, counted),
    )


def _layers(model: nn.Module, calls: dict[nn.Module, list[tuple[int, int, int]]]) -> list[LayerCost]:
    """Every leaf, and every other module that holds tensors of its own or multiplies."""
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        parameters, size = _own(module, seen)
        done = calls.get(module, [])
        made = sum(m for _, m, _ in done)
        macs = sum(m for m, _, _ in done)
        if size or macs or not list(module.children()):
            layers.append(LayerCost(name, type(module).__name__, len(done), parameters, size, macs, made))
    return layers


def _own(module: nn.Module, seen: set[int]) -> tuple[int, int]:
    """Parameters, and bytes with buffers, of a module's own tensors that weren't seen before."""
    parameters = size = 0
    own: list[tuple[torch.Tensor, bool]] = [(p, True) for p in module.parameters(recurse=False)]
    own += [(b, False) for b in module.buffers(recurse=False)]
    for tensor, trained in own:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            parameters += tensor.numel() * trained
            size += tensor.numel() * tensor.element_size()
    return parameters, size


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes(v) for v in value.values())
    return sum(_bytes(v) for v in value) if isinstance(value, tuple | list) else 0

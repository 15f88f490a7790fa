"""Pruning of whole layers of a stack, such as the layers of a Transformer.

What goes is what changes its input least: 1 - the cosine between a layer's input and output over
training samples ("magnitude" here; ShortGPT, Men et al. 2024, arXiv:2403.03853; Gromov et al.
2024, arXiv:2403.17887, on how many can go), or what changes the loss least to the first order:
|gradient · (output - input)| ("taylor"); random as a control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tasks import device, fit
from tasks.checkpoint import Masks
from tasks.errors import Fault
from tasks.prune_ranking import Candidate, Cut, Layer, batches, few, named, require_named, starts, weakest
from tasks.settings import PruneParams
from tasks.structure import Kept, kept_names, thawed
from tasks.transformer import stacks
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

Stacks = dict[str, list[nn.Module]]
Call = tuple[nn.Module, torch.Tensor, torch.Tensor]


def prune_layers(model: nn.Module, task: Workload, train: Arrays, params: PruneParams, ratio: float, last: Cut) -> Cut:
    """Remove the share `ratio` of the layers of every stack in place; a stack keeps at least one.

    A stack without whose layers the model no longer runs is put back, and says so.

    `only` matches the layers' names before the first cut. Raises Fault if the model has no stack
    whose layers run one after the other.
    """
    running = running_stacks(model, task)
    if not running and last.layers:
        return last
    if not running:
        raise Fault(
            "no layers to prune",
            got=f"stacks of like layers: {few(list(stacks(model)))}",
            expected="a ModuleList or Sequential of layers of one class and shape that run one after the other, "
            "each with an output of its input's shape",
            do="prune channels, heads or weights",
        )
    now = {name: len(layers) for name, layers in running.items()}
    before = starts(last, now)
    names = {n: _names(model, n, originals(n, before[n], last.structure)) for n in running}
    if not last.layers:
        require_named([name for some in names.values() for name in some], params)
    free = {n: torch.tensor([named(name, params) for name in names[n]]) for n in running}
    scores = importance(model, task, train, params, running)
    candidates = [Candidate(n, scores[n].masked_fill(~free[n], torch.inf), before[n]) for n in running]
    spent = [Candidate(layer.name, torch.zeros(layer.after), layer.before) for layer in last.layers]
    candidates += [one for one in spent if one.name not in running]
    gone = {
        n: {i for i in some if free[n][i]} for n, some in zip(running, weakest(candidates, ratio, params), strict=False)
    }
    wanted = [Kept(n, tuple(i for i in range(now[n]) if i not in gone[n])) for n in running if gone[n]]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    broken = {cut.name: reason for cut in wanted if (reason := _apply(model, task, cut))}
    cuts = [cut for cut in wanted if cut.name not in broken]
    left = {**now, **{cut.name: len(cut.layers) for cut in cuts}}
    layers = {layer.name: layer for layer in last.layers}
    for n in running:
        layers[n] = Layer(n, before[n], left[n], _reason(before[n], left[n], ratio, broken.get(n)))
    return Cut(list(layers.values()), _masks(last.masks, parameters, model), (*last.structure, *cuts))


def _apply(model: nn.Module, task: Workload, cut: Kept) -> str | None:
    """Cut a stack shorter in place; the reason if the model doesn't run so, with the stack as it was."""
    stack = model.get_submodule(cut.name)
    whole = dict(stack._modules)
    cut.apply(model)
    try:
        with torch.no_grad(), fit.eval_mode(model):
            fit.forward(model, task, fit.tensors(protocol.example(task, 2)))
    except Exception as error:
        stack._modules = whole
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"without some layers the model no longer runs: {words[:160]}"
    return None


def _names(model: nn.Module, stack: str, numbers: Sequence[int]) -> list[str]:
    """The layers of a stack as they were called before the first cut; `numbers` is what they had then."""
    keys = list(model.get_submodule(stack)._modules)
    numbered = keys == [str(i) for i in range(len(keys))]
    return [f"{stack}.{key}" for key in (numbers if numbered else keys)]


def running_stacks(model: nn.Module, task: Workload) -> Stacks:
    """The stacks whose layers run once each, in order, with an output of their input's shape."""
    found = stacks(model)
    with torch.no_grad():
        calls, _ = _run(model, task, found, fit.tensors(protocol.example(task, 2)))
    return {
        name: layers
        for name, layers in found.items()
        if [module for module, _, _ in calls[name]] == layers and all(x.shape == y.shape for _, x, y in calls[name])
    }


def importance(
    model: nn.Module, task: Workload, train: Arrays, params: PruneParams, running: Stacks
) -> dict[str, torch.Tensor]:
    """A score [layers] for each stack: sums over samples of the mean change; padding counts nothing."""
    if params.importance == "random":
        return {name: torch.rand(len(layers)) for name, layers in running.items()}
    taylor = params.importance == "taylor"
    sums = {name: torch.zeros(len(layers)) for name, layers in running.items()}
    with device.placed(device.resolve(params.device), model):
        for part in batches(task, train, params):
            used = protocol.lengths(task, {name: part[name].cpu().numpy() for name in task.INPUTS})
            with torch.set_grad_enabled(taylor), thawed(model):
                calls, outputs = _run(model, task, running, part)
                slopes = _gradients(task.loss(outputs, part["label"]), calls) if taylor else {}
            for name, some in calls.items():
                changes = [_slope(x, y, slopes[id(y)]) if taylor else _turn(x, y, used) for _, x, y in some]
                sums[name] += torch.stack([change.sum() for change in changes]).detach().cpu()
    return sums


def _gradients(loss: torch.Tensor, calls: Mapping[str, list[Call]]) -> dict[int, torch.Tensor]:
    """The loss's gradient by each call's output, by the output's id; 0 where it doesn't depend on it."""
    made = [y for some in calls.values() for _, _, y in some]
    reached = [y for y in made if y.requires_grad]
    found = torch.autograd.grad(loss, reached, materialize_grads=True) if reached and loss.requires_grad else ()
    return {id(y): torch.zeros_like(y) for y in made} | {id(y): g for y, g in zip(reached, found, strict=False)}


def _turn(before: torch.Tensor, after: torch.Tensor, used: np.ndarray | None) -> torch.Tensor:
    """1 - cosine of input and output [n, tokens, d], a mean over the tokens that `used` counts; of [n, …] else."""
    if used is None or before.dim() != 3:
        return 1 - nn.functional.cosine_similarity(before.flatten(1), after.flatten(1))
    real = (torch.arange(before.shape[1]) < torch.from_numpy(used)[:, None]).float().to(before.device)
    change = 1 - nn.functional.cosine_similarity(before, after, dim=2)
    return (change * real).sum(1) / real.sum(1).clamp(min=1)


def _slope(before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """How far the loss moves, to the first order, when a layer's output becomes its input; one for each sample."""
    return (gradient * (after - before)).flatten(1).sum(1).abs()


def _run(
    model: nn.Module, task: Workload, found: Stacks, inputs: fit.Tensors
) -> tuple[dict[str, list[Call]], fit.Tensors]:
    """Every call of the stacks' layers in order, with its first input and output; and the model's outputs."""
    calls: dict[str, list[Call]] = {name: [] for name in found}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = args[0] if args else next(iter(kwargs.values()))
            calls[name].append((module, first, output[0] if isinstance(output, tuple) else output))

        return keep

    hooks = [
        layer.register_forward_hook(hook(name), with_kwargs=True)
        for name, layers in found.items()
        for layer in dict.fromkeys(layers)
    ]
    try:
        with fit.eval_mode(model):
            return calls, fit.forward(model, task, inputs)
    finally:
        for handle in hooks:
            handle.remove()


def originals(stack: str, before: int, structure: Sequence[Kept]) -> list[int]:
    """What the layers of a stack that are left were numbered before it was cut."""
    alive = list(range(before))
    for change in structure:
        alive = [alive[i] for i in change.layers] if change.name == stack else alive
    return alive


def renamed(structure: Sequence[Kept], before: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Names of the stacks' layers before they were cut, and after; "" for those that are gone.

    `before` has the layers' own names in each stack: numbers, or the names of a named Sequential.
    """
    names: dict[str, str] = {}
    for stack in dict.fromkeys(change.name for change in structure):
        alive = originals(stack, len(before[stack]), structure)
        new = dict(zip(alive, kept_names(before[stack], alive), strict=True))
        names |= {f"{stack}.{key}": f"{stack}.{new[i]}" if i in new else "" for i, key in enumerate(before[stack])}
    return names


def _masks(masks: Masks, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> Masks:
    """Masks under their parameters' new names; those of parameters that are gone are dropped.

    `parameters` are all as they were named before. A tied weight stays while any layer that holds it does.
    """
    of = {id(parameters[name]): mask for name, mask in masks.items()}
    return {name: of[id(p)] for name, p in model.named_parameters() if id(p) in of}


def _reason(before: int, after: int, ratio: float, broken: str | None) -> str | None:
    if before != after:
        return None
    return broken or f"none of its {before} layers could go at ratio {ratio:.3g}"

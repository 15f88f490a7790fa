"""Cross-layer weight sharing: neighbouring layers of a stack become one set of weights.

ALBERT, Lan et al. 2020, arXiv:1909.11942, trains such a model from scratch. Here the layers of a
trained one are averaged, or the first of each run is taken, and fine-tuning recovers what that
loses (Bae et al. 2025, arXiv:2410.20672, start from a trained model too). Parameters and
bytes fall; every layer is still computed, so multiply-adds and latency don't.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tasks import account, checkpoint, fit, layout
from tasks.data import read
from tasks.errors import Fault
from tasks.settings import ShareParams
from tasks.structure import Factorized, Tied
from tasks.transformer import stacks


@dataclass(frozen=True)
class Run:
    """Neighbouring layers that became one, at the place of the first.

    `distance` is the mean over the layers of ‖w - shared‖ / ‖w‖, all weights of a layer as one vector.
    """

    layers: list[str]
    parameters_before: int
    parameters_after: int
    distance: float


@dataclass(frozen=True)
class ShareReport:
    """What was shared, and validation scores in 0 … 1 before, after, and after fine-tuning."""

    stack: str
    runs: list[Run]
    cost: account.Difference
    validation_before: float
    validation_shared: float
    validation: float
    curve: list[fit.Epoch]


def share(source: Path, data: Path, target: Path, params: ShareParams) -> ShareReport:
    """Share the layers of the longest stack of `source`'s model, fine-tune, and write `target/model.pt`.

    Raises Fault if there is no such stack, `groups` leaves nothing to share or parts what is
    shared, the layers have masks, or factors are to be averaged.
    """
    fit.seed_everything(params.seed, params.threads, params.device)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    name, layers = longest_stack(model, source.name)
    _check_weights(parent, name, source.name, params)
    parts = cut(layers, params.groups, name)
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    before, score = account.count(model, task), fit.score(model, task, validation, params.device)
    runs, ties = share_layers(model, name, parts, params)
    shared = fit.score(model, task, validation, params.device)
    resume = layout.resume(target.name)
    curve = fit.fine_tune(model, task, train, validation, params, masks=parent.masks, resume=resume)
    checkpoint.save(replace(parent, model=model, structure=(*parent.structure, *ties)), target)
    return ShareReport(
        stack=name,
        runs=runs,
        cost=account.difference(before, account.count(model, task)),
        validation_before=score,
        validation_shared=shared,
        validation=max((e.validation for e in curve), default=shared),
        curve=curve,
    )


def longest_stack(model: nn.Module, source: str) -> tuple[str, list[nn.Module]]:
    """Name and layers of the longest stack; Fault, with what there is instead, if there is none."""
    for name, layers in stacks(model).items():
        if len({repr(layer) for layer in layers}) == 1:
            return name, layers
    lists = [(n, list(m)) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    seen = [f"{n or 'the model'}: {', '.join(type(m).__name__ for m in ms)}" for n, ms in lists if len(ms) > 1]
    more = f"; and {len(seen) - 5} more" if len(seen) > 5 else ""
    differ = f"lists of modules that differ in class, shapes or settings: {'; '.join(seen[:5])}{more}"
    raise Fault(
        f"nothing to share in {source}",
        got=differ if seen else "no list of modules",
        expected="a ModuleList or Sequential of layers that are alike, as the encoder of a Transformer",
        do="share before pruning or factorising makes layers differ, or leave this technique out",
    )


def cut(layers: list[nn.Module], groups: int, name: str) -> list[list[int]]:
    """Indices of the layers in `groups` runs of neighbours, equal within one, the longer first.

    Raises Fault if no two different layers share a run, or layers that are one already would be parted.
    """
    if groups < len(layers):
        runs = [part.tolist() for part in torch.arange(len(layers)).tensor_split(groups)]
        places = [{layers[i] for i in run} for run in runs]
        parted = [m for i, one in enumerate(places) for other in places[i + 1 :] for m in one & other]
        if not parted and any(len(modules) > 1 for modules in places):
            return runs
    raise Fault(
        f"{name} can't be shared in {groups} groups",
        got=f"{len(layers)} layers, {len(set(layers))} of them different: {_pattern(layers)}",
        expected="runs of neighbours that hold at least two different layers, and part no two that are one already",
        do="choose fewer groups",
    )


def share_layers(
    model: nn.Module, stack: str, runs: list[list[int]], params: ShareParams
) -> tuple[list[Run], list[Tied]]:
    """Make each run of the stack one module in place: the first, with its own weights or the run's average."""
    found, ties, prefix = [], [], _prefix(stack)
    keys = [prefix + key for key in model.get_submodule(stack)._modules]
    for run in runs:
        names = [keys[i] for i in run]
        modules = [model.get_submodule(n) for n in names]
        before = _parameters(modules)
        vectors = [nn.utils.parameters_to_vector(m.parameters()).detach().clone() for m in modules]
        if params.how == "average":
            _average(modules)
        shared = nn.utils.parameters_to_vector(modules[0].parameters()).detach()
        distance = sum(float((v - shared).norm() / v.norm().clamp_min(1e-12)) for v in vectors) / len(vectors)
        new = [Tied(n, names[0]) for n, m in zip(names, modules, strict=True) if m is not modules[0]]
        for tie in new:
            tie.apply(model)
        ties += new
        found.append(Run(names, before, _parameters(modules[:1]), distance))
    return found, ties


def _average(modules: list[nn.Module]) -> None:
    """Put the mean of the modules' tensors, buffers too, into the first; of whole numbers the first's stay."""
    states = [m.state_dict() for m in modules]
    mean = {
        key: torch.stack([s[key] for s in states]).mean(0) if value.is_floating_point() else value
        for key, value in states[0].items()
    }
    modules[0].load_state_dict(mean)


def _check_weights(parent: checkpoint.Checkpoint, stack: str, source: str, params: ShareParams) -> None:
    masked = sorted(name for name in parent.masks if name.startswith(_prefix(stack)))
    if masked:
        raise Fault(
            f"{source} is sparse",
            got=f"masks of {len(masked)} weights of {stack}, such as {masked[0]}",
            expected="layers without masks: the average of different zeros has none",
            do="share first, then make it sparse",
        )
    changes = [c.name for c in parent.structure if isinstance(c, Factorized) and c.name.startswith(_prefix(stack))]
    if changes and params.how == "average":
        raise Fault(
            f"{source} is factorised",
            got=f"factors of {len(changes)} layers of {stack}, such as {changes[0]}",
            expected="whole weights: the averages of two factors are no factors of the average",
            do="share first, then factorise; or take how: copy",
        )


def _parameters(modules: list[nn.Module]) -> int:
    return sum(p.numel() for p in {p for m in modules for p in m.parameters()})


def _prefix(stack: str) -> str:
    return f"{stack}." if stack else ""


def _pattern(layers: list[nn.Module]) -> str:
    order = list(dict.fromkeys(layers))
    return " ".join(str(order.index(m)) for m in layers)

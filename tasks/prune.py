"""Structured channel pruning with batch-norm recalibration and fine-tuning.

Channels are removed in dependency groups, so that residual sums and their neighbours stay
consistent: DepGraph, Fang et al. 2023, arXiv:2301.12900 (the Torch-Pruning library).
Importance: L2 magnitude of a group's filters (Li et al. 2017, arXiv:1608.08710), first-order
Taylor (Molchanov et al. 2019, arXiv:1906.10771), or random as a control.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch_pruning as tp
from torch import nn

from tasks import checkpoint, fit
from tasks.data import read
from tasks.errors import Fault
from tasks.settings import PruneParams
from tasks.workloads.protocol import Arrays, Workload

PRUNABLE = (nn.modules.conv._ConvNd, nn.Linear)


@dataclass(frozen=True)
class Layer:
    """Channels of one layer before and after, and why it kept them all, if it did."""

    name: str
    inputs_before: int
    inputs_after: int
    outputs_before: int
    outputs_after: int
    kept_because: str | None


@dataclass(frozen=True)
class PruneReport:
    """What was pruned, and validation scores in 0 … 1 after each stage of the recovery."""

    parameters_before: int
    parameters_after: int
    layers: list[Layer]
    validation_before: float
    validation_pruned: float
    validation_recalibrated: float
    validation: float
    curve: list[fit.Epoch]


def prune(source: Path, data: Path, target: Path, params: PruneParams) -> PruneReport:
    """Prune the model of `source`, recalibrate, fine-tune, and write `target/model.pt`.

    Raises Fault if no layer can be pruned with these settings.
    """
    fit.seed_everything(params.seed, params.threads)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    parameters, score = fit.parameters(model), fit.score(model, task, validation)
    layers = prune_channels(model, task, train, params)
    if all(layer.outputs_before == layer.outputs_after for layer in layers):
        reasons = "; ".join(f"{layer.name}: {layer.kept_because}" for layer in layers)
        raise Fault(
            f"nothing to prune in {source.name}",
            got=reasons,
            expected="at least one layer to lose channels",
            do="lower round_to or raise ratio",
        )
    pruned = fit.score(model, task, validation)
    recalibrate(model, task, train)
    recalibrated = fit.score(model, task, validation)
    curve = fit.fine_tune(model, task, train, validation, params)
    checkpoint.save(replace(parent, model=model), target)
    final = max((e.validation for e in curve), default=recalibrated)
    return PruneReport(parameters, fit.parameters(model), layers, score, pruned, recalibrated, final, curve)


def prune_channels(model: nn.Module, task: Workload, train: Arrays, params: PruneParams) -> list[Layer]:
    """Remove `ratio` of each layer's output channels in place, down to multiples of `round_to`.

    The layers that make the model's outputs keep theirs, and so does any layer with no more
    than `round_to` channels; every other keeps at least `round_to`.
    """
    example = {name: torch.from_numpy(train[name][:2]) for name in task.INPUTS}
    protected = output_layers(model, task, example)
    before = {n: widths(m) for n, m in model.named_modules() if isinstance(m, PRUNABLE)}
    outputs = {m: widths(m)[1] for m in model.modules() if isinstance(m, PRUNABLE)}
    narrow = {m for m, width in outputs.items() if width <= params.round_to}
    # A layer that the ratio would take below `round_to` stops there; the library would leave it whole.
    ratios = {m: min(params.ratio, 1 - (params.round_to + 0.5) / w) for m, w in outputs.items() if m not in narrow}
    pruner = tp.pruner.MagnitudePruner(
        model,
        tuple(example.values()),
        importance=_importance(params.importance),
        pruning_ratio=params.ratio,
        pruning_ratio_dict=ratios,
        round_to=params.round_to,
        ignored_layers=list(protected | narrow),
    )
    if params.importance == "taylor":
        _accumulate_gradients(model, task, train, params)
    pruner.step()
    model.zero_grad(set_to_none=True)
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, PRUNABLE):
            after = widths(module)
            layers.append(
                Layer(
                    name,
                    before[name][0],
                    after[0],
                    before[name][1],
                    after[1],
                    _reason(module, before[name][1], protected, params),
                )
            )
    return layers


def output_layers(model: nn.Module, task: Workload, example: fit.Tensors) -> set[nn.Module]:
    """The layers that reach an output of the model with no other layer in between."""
    made: dict[object, nn.Module] = {}
    hooks = [
        m.register_forward_hook(lambda m, _, out: made.update({out.grad_fn: m}))
        for m in model.modules()
        if isinstance(m, PRUNABLE)
    ]
    with torch.enable_grad():
        outputs = fit.forward(
            model.eval(), task, {n: v.requires_grad_(v.is_floating_point()) for n, v in example.items()}
        )
    for hook in hooks:
        hook.remove()
    found, todo, seen = set(), [v.grad_fn for v in outputs.values()], set()
    while todo:
        node = todo.pop()
        if node in made:
            found.add(made[node])
        elif node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return found


def recalibrate(model: nn.Module, task: Workload, train: Arrays, batch: int = 256) -> None:
    """Re-estimate batch-norm statistics over the training split (arXiv:2007.02491, section 3).

    All else stays in eval mode; batches are equal within one sample, so that none weighs more.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    n = len(train["label"])
    with torch.no_grad():
        for index in torch.arange(n).tensor_split(-(-n // batch)):
            fit.forward(model, task, {name: torch.from_numpy(train[name])[index] for name in task.INPUTS})
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def widths(module: nn.Module) -> tuple[int, int]:
    """Input and output channels (or features) of a convolution or linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    assert isinstance(module, nn.modules.conv._ConvNd)
    return module.in_channels, module.out_channels


def _importance(kind: str) -> tp.importance.Importance:
    if kind == "taylor":
        return tp.importance.GroupTaylorImportance()
    return tp.importance.RandomImportance() if kind == "random" else tp.importance.GroupMagnitudeImportance(p=2)


def _accumulate_gradients(
    model: nn.Module, task: Workload, train: Arrays, params: PruneParams, batches: int = 8
) -> None:
    for i in range(batches):
        part = {k: torch.from_numpy(v[i * params.batch : (i + 1) * params.batch]) for k, v in train.items()}
        if len(part["label"]):
            task.loss(fit.forward(model, task, part), part["label"]).backward()


def _reason(module: nn.Module, before: int, protected: set[nn.Module], params: PruneParams) -> str | None:
    if widths(module)[1] != before:
        return None
    if module in protected:
        return "it makes an output of the model"
    if before <= params.round_to:
        return f"it has {before} channels, and round_to is {params.round_to}"
    return f"nothing could go from its group at ratio {params.ratio} and round_to {params.round_to}"

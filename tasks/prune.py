"""Pruning of weights, channels, attention heads or whole layers, with recovery by fine-tuning.

One file for each granularity: `prune_weights`, `prune_channels`, `prune_heads`, `prune_layers`. In several
steps, the share that is gone follows the cubic schedule of Zhu and Gupta 2017, arXiv:1710.01878.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tasks import account, batches, checkpoint, device, fit, layout
from tasks.data import read
from tasks.errors import Fault
from tasks.prune_channels import prune_channels
from tasks.prune_heads import prune_heads
from tasks.prune_layers import prune_layers, renamed
from tasks.prune_ranking import Cut, Layer
from tasks.prune_weights import prune_weights
from tasks.settings import PruneParams
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

CUTS = {"weight": prune_weights, "channel": prune_channels, "head": prune_heads, "layer": prune_layers}
DENSE = (
    "zeros among dense weights cost what other numbers cost: no engine gets faster by it; "
    "channels, heads and layers do that"
)


@dataclass(frozen=True)
class Stage:
    """One step of iterative pruning: the share gone by then, and validation scores in 0 … 1 of its recovery."""

    ratio: float
    validation_pruned: float
    validation_recalibrated: float
    validation: float


@dataclass(frozen=True)
class PruneReport:
    """What was pruned, in the unit of `granularity`, and validation scores in 0 … 1.

    `validation_pruned` and `validation_recalibrated` are of the last stage, `removed` names whole
    layers that are gone.
    """

    granularity: str
    cost: account.Difference
    layers: list[Layer]
    removed: list[str]
    stages: list[Stage]
    validation_before: float
    validation_pruned: float
    validation_recalibrated: float
    validation: float
    curve: list[fit.Epoch]
    note: str | None


def prune(source: Path, data: Path, target: Path, params: PruneParams) -> PruneReport:
    """Prune the model of `source`, recalibrate, fine-tune, as often as `steps`, and write `target/model.pt`.

    Raises Fault if the model has nothing of this granularity, or nothing of it can go with these settings.
    """
    fit.seed_everything(params.seed, params.threads, params.device)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    before, score = account.count(model, task), fit.score(model, task, validation, params.device)
    children = {name: list(module._modules) for name, module in model.named_modules()}
    cut = Cut([], parent.masks)
    stages: list[Stage] = []
    curve: list[fit.Epoch] = []
    for step, ratio in enumerate(ratios(params), start=1):
        last, cut = cut, CUTS[params.granularity](model, task, train, params, ratio, cut)
        if _same(last, cut):
            continue
        pruned = fit.score(model, task, validation, params.device)
        recalibrate(model, task, train, on=params.device)
        recalibrated = fit.score(model, task, validation, params.device)
        resume = layout.resume(f"{target.name}-{step}")
        epochs = fit.fine_tune(model, task, train, validation, params, masks=cut.masks, resume=resume)
        stages.append(Stage(ratio, pruned, recalibrated, max((e.validation for e in epochs), default=recalibrated)))
        curve += [replace(epoch, epoch=epoch.epoch + len(curve)) for epoch in epochs]
    if not stages:
        raise _nothing(source.name, cut.layers, params)
    structure = (*parent.structure, *cut.structure)
    checkpoint.save(replace(parent, model=model, masks=cut.masks, structure=structure), target)
    names = renamed(cut.structure, children)
    return PruneReport(
        granularity=params.granularity,
        cost=account.difference(before, account.count(model, task), names),
        layers=cut.layers,
        removed=[name for name, new in names.items() if not new],
        stages=stages,
        validation_before=score,
        validation_pruned=stages[-1].validation_pruned,
        validation_recalibrated=stages[-1].validation_recalibrated,
        validation=stages[-1].validation,
        curve=curve,
        note=DENSE if params.granularity == "weight" else None,
    )


def ratios(params: PruneParams) -> list[float]:
    """The share gone after each step: ratio · (1 - (1 - t/steps)³), so that most goes early."""
    return [params.ratio * (1 - (1 - t / params.steps) ** 3) for t in range(1, params.steps + 1)]


def recalibrate(model: nn.Module, task: Workload, train: Arrays, batch: int = 256, on: device.Asked = "cpu") -> None:
    """Re-estimate batch-norm statistics over the training split (arXiv:2007.02491, section 3).

    All else stays in eval mode; batches are equal within one sample, so that none weighs more. With a
    dynamic axis they are of samples of similar length.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    model.eval()
    if not norms:
        return
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    n, lengths = len(train["label"]), protocol.lengths(task, train)
    inputs = {name: train[name] for name in task.INPUTS}
    (order,), where = batches.ordered(n, n, lengths), device.resolve(on)
    with device.placed(where, model), torch.no_grad():
        for rows in order.tensor_split(-(-n // batch)):
            fit.forward(model, task, batches.take(task, inputs, rows, lengths, where))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def _same(last: Cut, cut: Cut) -> bool:
    """Whether a step took nothing away."""
    there = {layer.name: layer.before for layer in cut.layers} | {layer.name: layer.after for layer in last.layers}
    return all(there[layer.name] == layer.after for layer in cut.layers)


def _nothing(name: str, layers: list[Layer], params: PruneParams) -> Fault:
    reasons = [f"{layer.name}: {layer.kept_because}" for layer in layers]
    return Fault(
        f"nothing to prune in {name}",
        got="; ".join(reasons[:12]) + (f"; and {len(reasons) - 12} more" if len(reasons) > 12 else ""),
        expected=f"at least one layer to lose {params.granularity}s",
        do="raise ratio" + (" or lower round_to" if params.granularity == "channel" else ""),
    )

"""Low-rank factorisation of linear layers and convolutions by truncated SVD.

A weight W [out, in·kernel] of rank r becomes two layers: in → r with the old kernel and
stride, then r → out, 1×1 (Eckart and Young 1936 for the optimum; Zhang et al. 2016,
arXiv:1505.06798, for convolutions). The activation-aware variant minimises the error of the
layer's output on data, not that of its weight: W is whitened by the Cholesky factor of its
inputs' second moment (Wang et al. 2024, arXiv:2403.07378).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tasks import account, checkpoint, fit
from tasks.data import read
from tasks.errors import Fault
from tasks.prune import output_layers
from tasks.settings import FactorizeParams
from tasks.structure import Factorized, factors, replace_module
from tasks.workloads.protocol import Arrays, Workload

DAMPING = 1e-4


@dataclass(frozen=True)
class LowRank:
    """One layer: its full rank, the rank it got, the share of energy kept, or why it was left alone.

    `energy` is the share of squared singular values, of the whitened weight if data was used.
    """

    name: str
    full_rank: int
    rank: int | None
    energy: float | None
    multiply_adds_before: int
    multiply_adds_after: int
    kept_because: str | None


@dataclass(frozen=True)
class FactorizeReport:
    """What was factorised, and validation scores in 0 … 1 before, after, and after fine-tuning."""

    parameters_before: int
    parameters_after: int
    multiply_adds_before: int
    multiply_adds_after: int
    layers: list[LowRank]
    validation_before: float
    validation_factorized: float
    validation: float
    curve: list[fit.Epoch]


def factorize(source: Path, data: Path, target: Path, params: FactorizeParams) -> FactorizeReport:
    """Factorise the model of `source`, fine-tune, and write `target/model.pt`.

    Raises Fault if no layer gets smaller by it.
    """
    fit.seed_everything(params.seed, params.threads)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    before, score = account.count(model, task), fit.score(model, task, validation)
    layers, structure = factorize_layers(model, task, train, params)
    if not structure:
        reasons = "; ".join(f"{layer.name}: {layer.kept_because}" for layer in layers)
        raise Fault(
            f"nothing to factorise in {source.name}",
            got=reasons,
            expected="at least one layer that gets smaller",
            do="lower rank or energy",
        )
    factorized = fit.score(model, task, validation)
    curve = fit.fine_tune(model, task, train, validation, params)
    checkpoint.save(replace(parent, model=model, structure=(*parent.structure, *structure)), target)
    after = account.count(model, task)
    return FactorizeReport(
        parameters_before=before.parameters,
        parameters_after=after.parameters,
        multiply_adds_before=before.multiply_adds,
        multiply_adds_after=after.multiply_adds,
        layers=layers,
        validation_before=score,
        validation_factorized=factorized,
        validation=max((e.validation for e in curve), default=factorized),
        curve=curve,
    )


def factorize_layers(
    model: nn.Module, task: Workload, train: Arrays, params: FactorizeParams
) -> tuple[list[LowRank], list[Factorized]]:
    """Replace layers in place, where that saves multiply-adds; returns every layer, and what was replaced.

    Layers that make an output, grouped convolutions and layers that share a weight stay.
    """
    example = {name: torch.from_numpy(train[name][:1]) for name in task.INPUTS}
    protected = output_layers(model, task, example)
    costs = {layer.name: layer.multiply_adds for layer in account.count(model, task).layers}
    chosen = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    shared = _shared(model)
    moments = second_moments(model, task, train, list(chosen.values()), params.samples) if params.samples else {}
    layers, structure = [], []
    for name, module in chosen.items():
        full = min(module.weight.shape[0], module.weight[0].numel())
        reason = _unfit(module, protected, shared)
        if reason:
            layers.append(LowRank(name, full, None, None, costs[name], costs[name], reason))
            continue
        first, second, rank, energy = decompose(module, params, moments.get(module))
        after = round(costs[name] * rank * (1 / module.weight.shape[0] + 1 / module.weight[0].numel()))
        if after >= costs[name]:
            reason = f"rank {rank} would need {after:,} multiply-adds, not fewer than {costs[name]:,}"
            layers.append(LowRank(name, full, None, energy, costs[name], costs[name], reason))
            continue
        pair = factors(module, rank)
        _fill(pair, module, first, second)
        replace_module(model, name, pair)
        layers.append(LowRank(name, full, rank, energy, costs[name], after, None))
        structure.append(Factorized(name, rank))
    return layers, structure


def decompose(
    module: nn.Conv2d | nn.Linear, params: FactorizeParams, moment: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, float]:
    """Factors of a weight [out, k]: first [rank, k], second [out, rank], the rank, and the energy kept.

    `moment` [k, k] is E[x xᵀ] of the layer's inputs; None decomposes the weight itself.
    """
    weight = module.weight.detach().flatten(1).double()
    if moment is None:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        damped = moment.double() + DAMPING * moment.double().diagonal().mean() * torch.eye(len(moment)).double()
        root = torch.linalg.cholesky(damped)
        u, s, vh = torch.linalg.svd(weight @ root, full_matrices=False)
        vh = torch.linalg.solve_triangular(root, vh, upper=False, left=False)
    energy = (s**2).cumsum(0) / (s**2).sum()
    rank = choose_rank(energy, params)
    half = s[:rank].sqrt()
    first, second = half[:, None] * vh[:rank], u[:, :rank] * half
    return first.float(), second.float(), rank, float(energy[rank - 1])


def choose_rank(energy: torch.Tensor, params: FactorizeParams) -> int:
    """The rank, at least 1: a share `rank` of the full one, or the least that keeps `energy`; to `round_to`."""
    full = len(energy)
    if params.energy is not None:
        rank = int((energy < params.energy - 1e-12).sum()) + 1
    else:
        rank = max(1, round(full * (params.rank or 0.5)))
    return min(full, -(-rank // params.round_to) * params.round_to)


def second_moments(
    model: nn.Module, task: Workload, train: Arrays, modules: list[nn.Conv2d | nn.Linear], samples: int
) -> dict[nn.Module, torch.Tensor]:
    """E[x xᵀ] [k, k] of each layer's inputs over the first `samples` of the training split.

    A convolution's inputs are its unfolded patches, k = in_channels · kernel.
    """
    sums: dict[nn.Module, torch.Tensor] = {}

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        rows = _rows(module, inputs[0]).double()
        sums[module] = sums.get(module, torch.zeros(())) + rows.T @ rows / len(rows)

    hooks = [m.register_forward_hook(hook) for m in modules]
    fit.predict(model, task, {k: v[:samples] for k, v in train.items()})
    for handle in hooks:
        handle.remove()
    return sums


def _rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or isinstance(module.padding, str):
            return torch.zeros(1, module.weight[0].numel())
        patches = nn.functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return x.reshape(-1, x.shape[-1])


def _shared(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    return {key for key, modules in owners.items() if len(modules) > 1}


def _unfit(module: nn.Conv2d | nn.Linear, protected: set[nn.Module], shared: set[int]) -> str | None:
    if module in protected:
        return "it makes an output of the model"
    if id(module.weight) in shared:
        return "its weight is shared with another layer"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return "it is a grouped convolution"
    return None


def _fill(pair: nn.Sequential, module: nn.Conv2d | nn.Linear, first: torch.Tensor, second: torch.Tensor) -> None:
    state = pair.state_dict()
    values = {"0.weight": first, "1.weight": second}
    if module.bias is not None:
        values["1.bias"] = module.bias.detach()
    pair.load_state_dict({key: value.reshape(state[key].shape) for key, value in values.items()})

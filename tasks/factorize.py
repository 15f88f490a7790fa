"""Low-rank factorisation of linear layers, convolutions and embeddings by truncated SVD.

A weight W [out, in·kernel] of rank r becomes two layers: in → r with the old kernel and
stride, then r → out, 1×1 (Zhang et al. 2016, arXiv:1505.06798, for convolutions). An embedding
[words, width] becomes [words, r] and a linear layer r → width (ALBERT's, Lan et al. 2020,
arXiv:1909.11942, section 3.1). How ranks are found: `tasks/low_rank.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from tasks import account, checkpoint, fit, layout
from tasks.checkpoint import Masks
from tasks.data import read
from tasks.errors import Fault
from tasks.low_rank import Factorable, Spectrum, choose_rank, choose_together, decompose, matrix, second_moments
from tasks.prune_ranking import output_layers
from tasks.settings import FactorizeParams
from tasks.structure import Factorized, Tied, factors, replace_module, shared_parameters
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

KINDS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)


@dataclass(frozen=True)
class LowRank:
    """One layer: its full rank, the rank it got, the share of energy kept, or why it was left alone.

    `energy` is the share of squared singular values, of the whitened weight if data was used.
    Parameters are those of the weight, without the bias.
    """

    name: str
    full_rank: int
    rank: int | None
    energy: float | None
    parameters_before: int
    parameters_after: int
    kept_because: str | None


@dataclass(frozen=True)
class FactorizeReport:
    """What was factorised, and validation scores in 0 … 1 before, after, and after fine-tuning."""

    layers: list[LowRank]
    cost: account.Difference
    validation_before: float
    validation_factorized: float
    validation: float
    curve: list[fit.Epoch]


def factorize(source: Path, data: Path, target: Path, params: FactorizeParams) -> FactorizeReport:
    """Factorise the model of `source`, fine-tune, and write `target/model.pt`.

    Raises Fault if no layer gets smaller by it, or `only` has a glob that names no layer.
    """
    fit.seed_everything(params.seed, params.threads, params.device)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    before, score = account.count(model, task), fit.score(model, task, validation, params.device)
    layers, structure = factorize_layers(model, task, train, params, parent.masks)
    if not structure:
        reasons = "; ".join(f"{layer.name}: {layer.kept_because}" for layer in layers)
        raise Fault(
            f"nothing to factorise in {source.name}",
            got=reasons,
            expected="at least one layer that gets smaller",
            do="lower rank, energy or budget, or name other layers in only",
        )
    factorized = fit.score(model, task, validation, params.device)
    resume = layout.resume(target.name)
    curve = fit.fine_tune(model, task, train, validation, params, masks=parent.masks, resume=resume)
    checkpoint.save(replace(parent, model=model, structure=(*parent.structure, *structure)), target)
    return FactorizeReport(
        layers=layers,
        cost=account.difference(before, account.count(model, task)),
        validation_before=score,
        validation_factorized=factorized,
        validation=max((e.validation for e in curve), default=factorized),
        curve=curve,
    )


def factorize_layers(
    model: nn.Module, task: Workload, train: Arrays, params: FactorizeParams, masks: Masks | None = None
) -> tuple[list[LowRank], list[Factorized | Tied]]:
    """Replace layers in place, where that saves parameters; returns every layer, and what was replaced.

    A layer that stands in several places of the model is factorised once, for all of them. One without
    which the model no longer runs is put back.
    """
    modules = {n: m for n, m in model.named_modules() if isinstance(m, KINDS)}
    reasons = _reasons(model, task, modules, params, masks or {})
    chosen = {n: m for n, m in modules.items() if not reasons[n] and isinstance(m, Factorable)}
    seen = second_moments(model, task, train, list(chosen.values()), params.samples) if params.samples else {}
    spectra = {n: decompose(matrix(m), seen.get(m)) for n, m in chosen.items()}
    ranks = _ranks(spectra, params)
    places, layers, structure = _places(model), [], list[Factorized | Tied]()
    for name, module in modules.items():
        layer = _judged(name, module, spectra.get(name), ranks.get(name), reasons[name])
        rank = layer.rank
        if rank is not None and isinstance(module, Factorable):
            pair, others = factors(module, rank), [other for other in places[module] if other != name]
            _fill(pair, module, *spectra[name].factors(rank))
            broken = _replace(model, task, [name, *others], pair)
            if broken:
                layer = replace(layer, rank=None, parameters_after=layer.parameters_before, kept_because=broken)
            else:
                structure += [Factorized(name, rank), *[Tied(other, name) for other in others]]
        layers.append(layer)
    return layers, structure


def _replace(model: nn.Module, task: Workload, places: list[str], pair: nn.Module) -> str | None:
    """Put a layer's factors in its places; the reason if the model doesn't run so, with the layer as it was."""
    whole = model.get_submodule(places[0])
    for place in places:
        replace_module(model, place, pair)
    try:
        with torch.no_grad(), fit.eval_mode(model):
            fit.forward(model, task, fit.tensors(protocol.example(task, 2)))
    except Exception as error:
        for place in places:
            replace_module(model, place, whole)
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"with factors of it the model no longer runs: {words[:160]}"
    return None


def _ranks(spectra: Mapping[str, Spectrum], params: FactorizeParams) -> dict[str, int | None]:
    if params.budget is None:
        return {name: choose_rank(spectrum.energy, params) for name, spectrum in spectra.items()}
    return dict(zip(spectra, choose_together(list(spectra.values()), params.budget, params.round_to), strict=True))


def _judged(name: str, module: nn.Module, spectrum: Spectrum | None, rank: int | None, reason: str | None) -> LowRank:
    """What becomes of a layer: a rank that makes it smaller, or why it stays."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    before, full = weight.numel(), min(weight.shape[0], weight[0].numel())
    if spectrum is None:
        return LowRank(name, full, None, None, before, before, reason)
    if rank is None:
        return LowRank(name, full, None, None, before, before, "the budget is better spent on it whole")
    after, energy = spectrum.size(rank), float(spectrum.energy[rank - 1])
    if after >= before:
        reason = f"rank {rank} would need {after:,} parameters, not fewer than {before:,}"
        return LowRank(name, full, None, energy, before, before, reason)
    return LowRank(name, full, rank, energy, before, after, None)


def _reasons(
    model: nn.Module, task: Workload, modules: Mapping[str, nn.Module], params: FactorizeParams, masks: Masks
) -> dict[str, str | None]:
    """Why each layer can't be factorised, None if it can."""
    unknown = [glob for glob in params.only or () if not any(fnmatchcase(name, glob) for name in modules)]
    if unknown:
        raise Fault(
            "factorize: only names no layer",
            got=", ".join(unknown),
            expected=f"globs that match some of: {', '.join(modules)}",
            do="mend only",
        )
    outputs, shared = output_layers(model, task, fit.tensors(protocol.example(task, 2))), shared_parameters(model)
    calls = {layer.name: layer.calls for layer in account.count(model, task).layers}

    def reason(name: str, module: nn.Module) -> str | None:
        if params.only and not any(fnmatchcase(name, glob) for glob in params.only):
            return "only doesn't name it"
        if module in outputs:
            return "it makes an output of the model"
        if f"{name}.weight" in masks:
            return "its weight is sparse, and factors of it would not be"
        if id(module.weight) in shared:
            return "its weight is shared with another layer"
        if not calls.get(name, 1):
            return "it is not called: what holds it may read its weight"
        if not isinstance(module, Factorable):
            return f"a {type(module).__name__} is not factorised"
        if isinstance(module, nn.Conv2d) and module.groups != 1:
            return "it is a grouped convolution"
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            return "it is an embedding that renormalises its rows"
        return None

    return {name: reason(name, module) for name, module in modules.items()}


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module's places, each by the first name of the module that holds it."""
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules():
        for key, child in module._modules.items():
            if child is not None:
                places.setdefault(child, []).append(f"{name}.{key}" if name else key)
    return places


def _fill(pair: nn.Sequential, module: Factorable, first: torch.Tensor, second: torch.Tensor) -> None:
    state = pair.state_dict()
    values = {"0.weight": first.T if isinstance(module, nn.Embedding) else first, "1.weight": second}
    if not isinstance(module, nn.Embedding) and module.bias is not None:
        values["1.bias"] = module.bias.detach()
    pair.load_state_dict({key: value.reshape(state[key].shape) for key, value in values.items()})

"""2:4 sparsity along the input dimension, with fine-tuning under the masks.

Of each 4 neighbouring inputs of an output at most 2 have a weight: what sparse tensor cores take
(Mishra et al. 2021, arXiv:2104.08378). `magnitude` keeps the two largest. `sparsegpt` (Frantar and
Alistarh 2023, arXiv:2301.00774) chooses by what the layer's outputs lose on data, and moves what
it takes away to the weights that remain. Both masks are NVIDIA ModelOpt's. Its SparseGPT sees a
convolution as one flat row, and mends nothing; here its columns are ordered so that neighbours
are input channels at one place of the kernel, and the weights are mended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from tasks import account, checkpoint, fit, layout, two_of_four
from tasks.checkpoint import Masks
from tasks.data import read
from tasks.errors import Fault
from tasks.low_rank import second_moments
from tasks.permute import columns, kept, permute
from tasks.prune_ranking import output_layers
from tasks.settings import SparsifyParams
from tasks.structure import shared_parameters
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

PATTERN = "2:4 sparsity"
DAMPING = 0.1
SEARCH = {"pattern": PATTERN, "hessian_damp": DAMPING, "col_block_size": 128, "row_block_size": -1}


@dataclass(frozen=True)
class Layer:
    """One linear layer or convolution, and why it stays dense, if it does.

    `kept` is the share of the weight's magnitude that its mask left, in 0 … 1, before any mending.
    `permutation_gain` is by how much a permutation raised the share that the two largest of 4 hold.
    """

    name: str
    outputs: int
    inputs: int
    two_of_four: bool
    method: str | None
    kept: float | None
    permutation_gain: float | None
    unpermuted_because: str | None
    dense_because: str | None


@dataclass(frozen=True)
class SparsifyReport:
    """What was made sparse, and validation scores in 0 … 1 before, after, and after fine-tuning.

    The cost counts zeros too: only an engine that knows the pattern saves them.
    """

    cost: account.Difference
    layers: list[Layer]
    zeros_before: float
    zeros_after: float
    validation_before: float
    validation_sparse: float
    validation: float
    curve: list[fit.Epoch]


def sparsify(source: Path, data: Path, target: Path, params: SparsifyParams) -> SparsifyReport:
    """Make the model of `source` 2:4 sparse, fine-tune it so, and write `target/model.pt`.

    Raises Fault if no layer can be, or a glob of `skip` names none.
    """
    fit.seed_everything(params.seed, params.threads, params.device)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    before, score, zeros = account.count(model, task), fit.score(model, task, validation, params.device), _zeros(model)
    layers, masks = sparsify_layers(model, task, train, params, parent.masks)
    sparse = fit.score(model, task, validation, params.device)
    curve = fit.fine_tune(model, task, train, validation, params, masks=masks, resume=layout.resume(target.name))
    made = two_of_four.made(model, masks)
    layers = [replace(layer, two_of_four=f"{layer.name}.weight" in made) for layer in layers]
    checkpoint.save(replace(parent, model=model, masks=masks), target)
    return SparsifyReport(
        cost=account.difference(before, account.count(model, task)),
        layers=layers,
        zeros_before=zeros,
        zeros_after=_zeros(model),
        validation_before=score,
        validation_sparse=sparse,
        validation=max((e.validation for e in curve), default=sparse),
        curve=curve,
    )


def sparsify_layers(
    model: nn.Module, task: Workload, train: Arrays, params: SparsifyParams, masks: Masks
) -> tuple[list[Layer], Masks]:
    """Make every eligible layer 2:4 in place; returns every layer, and the masks beside those given.

    A weight that `masks` already keeps at zero stays so. Raises Fault if no layer is eligible.
    """
    chosen = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    dense = _dense(model, task, params, chosen)
    eligible = {name: module for name, module in chosen.items() if name not in dense}
    if not eligible:
        raise Fault(
            "nothing to make 2:4 sparse",
            got="; ".join(f"{name}: {reason}" for name, reason in dense.items()) or "no linear layer or convolution",
            expected=f"a layer with a multiple of {two_of_four.INPUTS} inputs and of {two_of_four.OUTPUTS} outputs",
            do="skip fewer layers, or make the model wider",
        )
    unpermuted = {name: _share(module.weight) for name, module in eligible.items()}
    stayed: dict[str, str] = {}
    if params.permute:
        masks, stayed = permute(model, task, train, eligible, masks)
    by_data = [m for m in eligible.values() if params.method == "sparsegpt" and _unfolds(m)]
    moments = second_moments(model, task, train, by_data, params.samples) if by_data else {}
    layers, masks = [], dict(masks)
    for name, module in chosen.items():
        outputs, inputs = module.weight.shape[:2]
        if name in dense:
            layers.append(Layer(name, outputs, inputs, False, None, None, None, None, dense[name]))
            continue
        weight, key = module.weight.detach().clone(), f"{name}.weight"
        gain = _share(weight) - unpermuted[name] if params.permute and name not in stayed else None
        masks[key] = sparsify_weight(module, moments.get(module), masks.get(key))
        share = float((weight * masks[key]).abs().sum() / weight.abs().sum())
        method = "sparsegpt" if module in moments else "magnitude"
        layers.append(Layer(name, outputs, inputs, True, method, share, gain, stayed.get(name), None))
    return layers, masks


def sparsify_weight(
    module: nn.Conv2d | nn.Linear, moment: torch.Tensor | None, fixed: torch.Tensor | None
) -> torch.Tensor:
    """Make one weight 2:4 along its inputs, in place, and return its mask, True where a weight may be.

    `moment` [k, k] is E[x xᵀ] of the layer's (unfolded) inputs; None goes by magnitude. What `fixed`
    holds at zero stays zero.
    """
    from modelopt.torch.sparsity.weight_sparsity.magnitude import create_asp_mask
    from modelopt.torch.sparsity.weight_sparsity.sparsegpt import create_sgpt_mask, prepare

    weight = module.weight.detach()
    fixed = torch.ones_like(weight, dtype=torch.bool) if fixed is None else fixed
    if moment is None:
        mask = create_asp_mask(weight, PATTERN) & fixed
        new = weight
    else:
        rows, hessian = _inputs_last(weight), _inputs_last_moment(moment, weight)
        found = create_sgpt_mask(rows, hessian.clone(), SEARCH) & _inputs_last(fixed)
        start, inverse = prepare(rows, hessian.clone(), DAMPING)
        mask = _inputs_first(found, weight)
        new = _inputs_first(mend(start, inverse, found), weight)
    with torch.no_grad():
        module.weight.copy_(new * mask)
    return mask


def mend(weight: torch.Tensor, inverse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zero a weight [out, k] where `mask` is False, and make up for it in the columns to the right.

    `inverse` [k, k] is the upper Cholesky factor of the inverse Hessian (arXiv:2301.00774, section 3).
    """
    weight = weight.clone()
    for j in range(weight.shape[1]):
        error = weight[:, j] * ~mask[:, j] / inverse[j, j]
        weight[:, j:] -= error[:, None] * inverse[j, j:]
    return weight * mask


def _dense(
    model: nn.Module, task: Workload, params: SparsifyParams, chosen: dict[str, nn.Conv2d | nn.Linear]
) -> dict[str, str]:
    """The layers that stay dense, and why."""
    for glob in params.skip or ():
        if not any(fnmatchcase(name, glob) for name in chosen):
            raise Fault(
                "skip names no layer", got=glob, expected=", ".join(chosen), do="name one of these, or leave it out"
            )
    outputs, shared = output_layers(model, task, fit.tensors(protocol.example(task, 2))), shared_parameters(model)
    calls = {layer.name: layer.calls for layer in account.count(model, task).layers}
    reasons = {}
    for name, module in chosen.items():
        if any(fnmatchcase(name, glob) for glob in params.skip or ()):
            reasons[name] = "skip names it"
        elif module in outputs:
            reasons[name] = "it makes an output of the model"
        elif id(module.weight) in shared:
            reasons[name] = "its weight is shared with another layer"
        elif not calls.get(name):
            reasons[name] = "the model never calls it"
        elif reason := two_of_four.unfit(*module.weight.shape[:2]):
            reasons[name] = reason
    return reasons


def _unfolds(module: nn.Conv2d | nn.Linear) -> bool:
    return isinstance(module, nn.Linear) or module.groups == 1


def _share(weight: torch.Tensor) -> float:
    total = float(weight.detach().abs().double().sum())
    return kept(columns(weight.detach())) / total if total else 1.0


def _zeros(model: nn.Module) -> float:
    """The share of zeros among the weights of linear layers and convolutions."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(int((w == 0).sum()) for w in weights) / max(1, sum(w.numel() for w in weights))


def _inputs_last(weight: torch.Tensor) -> torch.Tensor:
    """[out, in, …] as [out, … · in]."""
    return weight.movedim(1, -1).flatten(1)


def _inputs_first(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What `_inputs_last` made of a weight, in its shape again."""
    return rows.reshape(like.movedim(1, -1).shape).movedim(-1, 1).contiguous()


def _inputs_last_moment(moment: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A second moment [in · …, in · …] in the order of `_inputs_last`."""
    order = _inputs_last(torch.arange(weight[0].numel()).reshape(1, *weight.shape[1:]))[0]
    return moment.float()[order][:, order]

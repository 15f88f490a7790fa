"""Truncated SVD of a layer's weight, by the weight alone or by what the layer puts out on data, and its rank.

Eckart and Young 1936 for the optimum. By data: the weight is whitened by the Cholesky factor of
its inputs' second moment, so that what is dropped is the least of the output (Wang et al. 2024,
arXiv:2403.07378); for an embedding, whose inputs are one-hot, that is the words' frequency.
Ranks within a budget: one price per parameter for all layers, a Lagrange multiplier (Everett 1963).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tasks import fit
from tasks.errors import Fault
from tasks.settings import FactorizeParams
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

Factorable = nn.Linear | nn.Conv2d | nn.Embedding
DAMPING = 1e-4


@dataclass(frozen=True)
class Spectrum:
    """A weight [out, in] as `left` [out, n] · diag(`values` [n]) · `right` [n, in]; the values fall."""

    left: torch.Tensor
    values: torch.Tensor
    right: torch.Tensor

    @property
    def energy(self) -> torch.Tensor:
        """Share of the squared singular values that each rank from 1 to n keeps, [n]."""
        squares = self.values.double() ** 2
        return squares.cumsum(0) / squares.sum().clamp_min(1e-300)

    @property
    def whole(self) -> int:
        """Numbers in the weight."""
        return self.left.shape[0] * self.right.shape[1]

    def size(self, rank: int) -> int:
        """Numbers in the two factors of a rank."""
        return rank * (self.left.shape[0] + self.right.shape[1])

    def factors(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First [rank, in] and second [out, rank] factor, of equal scale."""
        half = self.values[:rank].sqrt()
        return half[:, None] * self.right[:rank], self.left[:, :rank] * half


def matrix(module: Factorable) -> torch.Tensor:
    """A layer's weight as [out, in]: in · kernel for a convolution, [width, words] for an embedding."""
    weight = module.weight.detach()
    return weight.T if isinstance(module, nn.Embedding) else weight.flatten(1)


def decompose(weight: torch.Tensor, moment: torch.Tensor | None) -> Spectrum:
    """The spectrum of a weight [out, in], whitened by `moment` if there is one: E[x xᵀ], [in, in] or its diagonal."""
    weight = weight.double()
    if moment is None or not moment.any():
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    elif moment.ndim == 1:
        root = moment.double().sqrt()
        u, s, vh = torch.linalg.svd(weight * root, full_matrices=False)
        vh = vh / root
    else:
        damped = moment.double() + DAMPING * moment.double().diagonal().mean() * torch.eye(len(moment)).double()
        root = torch.linalg.cholesky(damped)
        u, s, vh = torch.linalg.svd(weight @ root, full_matrices=False)
        vh = torch.linalg.solve_triangular(root, vh, upper=False, left=False)
    return Spectrum(u.float(), s.float(), vh.float())


def choose_rank(energy: torch.Tensor, params: FactorizeParams) -> int:
    """The rank, at least 1: a share `rank` of the full one, or the least that keeps `energy`; to `round_to`."""
    full = len(energy)
    if params.energy is not None:
        rank = int((energy < params.energy - 1e-12).sum()) + 1
    else:
        rank = max(1, round(full * (params.rank or 0.5)))
    return min(full, -(-rank // params.round_to) * params.round_to)


def choose_together(spectra: Sequence[Spectrum], budget: float, round_to: int) -> list[int | None]:
    """A rank for each weight, None for whole, so that all keep at most `budget` of their numbers.

    One price for all: a weight keeps the singular values that bring at least so much of its energy
    per number of its factors. Raises Fault if even the lowest ranks exceed the budget.
    """
    gains = [torch.diff(s.energy, prepend=torch.zeros(1)) / s.size(1) for s in spectra]
    prices = torch.cat(gains).unique()

    def at(price: float) -> list[int | None]:
        kept = [max(1, int((gain >= price).sum())) for gain in gains]
        ranks = [min(len(s.values), -(-r // round_to) * round_to) for s, r in zip(spectra, kept, strict=True)]
        return [r if s.size(r) < s.whole else None for s, r in zip(spectra, ranks, strict=True)]

    def held(price: float) -> int:
        return sum(s.whole if r is None else s.size(r) for s, r in zip(spectra, at(price), strict=True))

    most = budget * sum(s.whole for s in spectra)
    place = bisect.bisect_left(range(len(prices)), True, key=lambda i: held(float(prices[i])) <= most)
    if place < len(prices):
        return at(float(prices[place]))
    raise Fault(
        f"a budget of {budget} is too small",
        got=f"{int(most):,} parameters",
        expected=f"at least {held(math.inf):,}, which the lowest ranks in steps of {round_to} hold",
        do="lower round_to, or raise budget",
    )


def second_moments(
    model: nn.Module, task: Workload, train: Arrays, modules: Sequence[Factorable], samples: int
) -> dict[nn.Module, torch.Tensor]:
    """E[x xᵀ] [in, in] of each layer's inputs over the first `samples` of the training split.

    A convolution's inputs are its unfolded patches, in = in_channels · kernel. For an embedding it is the
    diagonal [words], each word counted once more than it was seen. Padding along the dynamic
    axis is left out: samples run in batches of one length.
    """
    sums: dict[nn.Module, torch.Tensor] = {}
    counts: dict[nn.Module, int] = {}

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        if isinstance(module, nn.Embedding):
            found = torch.bincount(inputs[0].flatten(), minlength=module.num_embeddings).double()
            rows = inputs[0].numel()
        else:
            x = _rows(module, inputs[0]).double()
            found, rows = x.T @ x, len(x)
        sums[module] = sums[module] + found if module in sums else found
        counts[module] = counts.get(module, 0) + rows

    hooks = [m.register_forward_hook(hook) for m in modules]
    try:
        for part in _even_batches(task, {k: v[:samples] for k, v in train.items()}):
            fit.predict(model, task, part)
    finally:
        for handle in hooks:
            handle.remove()
    return {m: (s + 1 if s.ndim == 1 else s) / (counts[m] + (len(s) if s.ndim == 1 else 0)) for m, s in sums.items()}


def _even_batches(task: Workload, arrays: Arrays) -> list[Arrays]:
    used = protocol.lengths(task, arrays)
    if used is None:
        return [arrays]
    rows = {int(length): (used == length).nonzero()[0] for length in sorted(set(used.tolist()))}
    return [protocol.cut(task, {k: v[r] for k, v in arrays.items()}, max(1, length)) for length, r in rows.items()]


def _rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(module, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode)
    patches = nn.functional.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
    return patches.transpose(1, 2).flatten(0, 1)

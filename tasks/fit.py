"""The training loop that train, prune and distill share."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tasks.settings import FitParams
from tasks.workloads.protocol import Arrays, Workload

Tensors = dict[str, torch.Tensor]
Masks = Mapping[str, torch.Tensor]
Loss = Callable[[Tensors, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Epoch:
    """One point of a learning curve; `validation` is the mean of the workload's first metric, in 0 … 1."""

    epoch: int
    loss: float
    validation: float
    seconds: float


def seed_everything(seed: int, threads: int) -> None:
    """Seed PyTorch and NumPy, ask for deterministic kernels, and fix the thread count."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(threads)


def forward(model: nn.Module, workload: Workload, inputs: Tensors) -> Tensors:
    """Run a model on its named inputs [n, …]; outputs by the workload's names."""
    result = model(*[inputs[name] for name in workload.INPUTS])
    if isinstance(result, dict):
        return {name: result[name] for name in workload.OUTPUTS}
    results = result if isinstance(result, tuple | list) else (result,)
    return dict(zip(workload.OUTPUTS, results, strict=True))


def tensors(arrays: Arrays) -> Tensors:
    """Arrays as tensors that share their memory."""
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; each module's own mode is restored after, also after an error."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.inference_mode()
def predict(model: nn.Module, workload: Workload, arrays: Arrays, batch: int = 256) -> Arrays:
    """Outputs [n, …] of a model in eval mode, in the order of the samples; each module's mode is restored."""
    data, n = tensors(arrays), len(arrays["label"])
    with eval_mode(model):
        parts = [forward(model, workload, {k: v[i : i + batch] for k, v in data.items()}) for i in range(0, n, batch)]
    return {name: torch.cat([part[name] for part in parts]).numpy() for name in workload.OUTPUTS}


def score(model: nn.Module, workload: Workload, arrays: Arrays) -> float:
    """Mean of the workload's first metric over a split, in 0 … 1."""
    metric = next(iter(workload.METRICS.values()))
    return float(metric(predict(model, workload, arrays), arrays["label"]).mean())


def parameters(model: nn.Module) -> int:
    """Number of parameters; a tied one counts once."""
    return sum(p.numel() for p in model.parameters())


def task_loss(workload: Workload) -> Loss:
    """The workload's own loss, in the form that `fit` takes."""
    return lambda outputs, labels, index: workload.loss(outputs, labels)


def apply_masks(model: nn.Module, masks: Masks | None) -> None:
    """Zero the weights at the False positions of `masks`, which maps parameters' names to boolean tensors."""
    if masks:
        named = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, mask in masks.items():
                named[name].masked_fill_(~mask, 0)


def fit(
    model: nn.Module,
    workload: Workload,
    train: Arrays,
    validation: Arrays,
    params: FitParams,
    loss: Loss,
    *,
    masks: Masks | None = None,
    resume: Path | None = None,
) -> list[Epoch]:
    """Train in place with AdamW (arXiv:1711.05101) under a one-cycle rate (arXiv:1708.07120).

    `loss(outputs, labels, index)` sees the rows `index` of the training split. The weights
    of the best validation epoch are kept; a diverging run (non-finite loss) raises ValueError.
    Where `masks` (parameter name → boolean) are False, weights are zero before the first step and after each.
    Prints one line an epoch with the time left.
    """
    seed_everything(params.seed, params.threads)
    data, n = tensors(train), len(train["label"])
    steps = -(-n // params.batch)
    apply_masks(model, masks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, params.lr, total_steps=max(2, steps * params.epochs))
    best, weights, curve, start = -1.0, copy.deepcopy(model.state_dict()), [], time.monotonic()
    for epoch in range(1, params.epochs + 1):
        model.train()
        total = 0.0
        for index in torch.randperm(n).tensor_split(steps):
            inputs = {name: value[index] for name, value in data.items()}
            value = loss(forward(model, workload, inputs), inputs["label"], index)
            if not torch.isfinite(value):
                raise ValueError(f"the loss is {value.item()} in epoch {epoch}: lower lr (got {params.lr})")
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            apply_masks(model, masks)
            schedule.step()
            total += value.item() * len(index)
        held_out, elapsed = score(model, workload, validation), time.monotonic() - start
        curve.append(Epoch(epoch, total / n, held_out, elapsed))
        left = elapsed / epoch * (params.epochs - epoch)
        print(
            f"epoch {epoch}/{params.epochs} · loss {total / n:.3f} · validation {held_out:.1%} · {left:.0f} s left",
            flush=True,
        )
        if held_out > best:
            best, weights = held_out, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    model.eval()
    return curve


def fine_tune(
    model: nn.Module,
    workload: Workload,
    train: Arrays,
    validation: Arrays,
    params: FitParams,
    *,
    masks: Masks | None = None,
    resume: Path | None = None,
) -> list[Epoch]:
    """As `fit`, with the workload's own loss; with no epochs the model stays as it is, but for the masks."""
    if not params.epochs:
        apply_masks(model, masks)
        return []
    return fit(model, workload, train, validation, params, task_loss(workload), masks=masks, resume=resume)

"""The training loop that all model steps share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from tasks import batches, device
from tasks import resume as states
from tasks.batches import tensors as tensors
from tasks.errors import Fault
from tasks.settings import FitParams
from tasks.training import Epoch as Epoch
from tasks.training import Training
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

Tensors = dict[str, torch.Tensor]
Masks = Mapping[str, torch.Tensor]
Loss = Callable[[Tensors, torch.Tensor, torch.Tensor], torch.Tensor]


def seed_everything(seed: int, threads: int | Literal["auto"], on: device.Asked = "cpu") -> None:
    """Seed PyTorch and NumPy, ask for deterministic kernels, and fix the thread count: 1 until "auto" is measured.

    Raises Fault if the device `on` isn't there.
    """
    device.prepare(device.resolve(on))
    torch.manual_seed(seed)
    np.random.seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1 if threads == "auto" else threads)


def forward(model: nn.Module, workload: Workload, inputs: Tensors) -> Tensors:
    """Run a model on its named inputs [n, …]; outputs by the workload's names."""
    result = model(*[inputs[name] for name in workload.INPUTS])
    if isinstance(result, dict):
        return {name: result[name] for name in workload.OUTPUTS}
    results = result if isinstance(result, tuple | list) else (result,)
    return dict(zip(workload.OUTPUTS, results, strict=True))


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


def predict(model: nn.Module, workload: Workload, arrays: Arrays, batch: int = 256, on: device.Asked = "cpu") -> Arrays:
    """Outputs [n, …] of a model in eval mode, in the order of the samples; each module's mode is restored.

    With a dynamic axis, batches are of samples of similar length. Fault if an output has that axis.
    """
    inputs, lengths = {name: arrays[name] for name in workload.INPUTS}, protocol.lengths(workload, arrays)
    order, where = batches.ordered(len(next(iter(inputs.values()))), batch, lengths), device.resolve(on)
    parts: list[Tensors] = []
    with device.placed(where, model), torch.inference_mode(), eval_mode(model):
        for rows in order:
            outputs = forward(model, workload, batches.take(workload, inputs, rows, lengths, where))
            parts.append({name: value.cpu() for name, value in outputs.items()})
    back = torch.cat(order).argsort()
    return {name: _together(name, [part[name] for part in parts])[back].numpy() for name in workload.OUTPUTS}


def _together(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise Fault(
            f"output {name} changes its shape from batch to batch",
            got=" and ".join(str(s) for s in sorted(shapes)[:2]),
            expected="one shape: outputs can't have the dynamic axis of the inputs",
            do="reduce the axis in the model, or pad in `samples` and name no AXES",
        )
    return torch.cat(parts)


def score(model: nn.Module, workload: Workload, arrays: Arrays, on: device.Asked = "cpu") -> float:
    """Mean of the workload's first metric over a split, in 0 … 1; computed in FP32."""
    metric = next(iter(workload.METRICS.values()))
    return float(metric(predict(model, workload, arrays, on=on), arrays["label"]).mean())


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
    of the best validation epoch are kept; a loss or score that isn't finite raises ValueError.
    Where `masks` (parameter name → boolean) are False, weights are zero before the first step and after each.
    With a file `resume`, a training that was killed goes on after the last epoch whose state is there, to the
    same weights; a state of other settings, weights, data, loss, device or code is left. Prints one line an epoch,
    and in epochs above 20 s one every 10 s. The model comes back to where it was from `params.device`.
    """
    seed_everything(params.seed, params.threads, params.device)
    apply_masks(model, masks)
    lengths, where = protocol.lengths(workload, train), device.resolve(params.device)
    belongs_to = states.digest(params, workload, model, masks, train, validation) if resume else ""

    def value(rows: torch.Tensor) -> torch.Tensor:
        inputs = batches.take(workload, train, rows, lengths, where)
        with device.mixed(where, params.precision):
            return loss(forward(model, workload, inputs), inputs["label"], rows)

    with device.placed(where, model, channels_last=params.precision == "bf16"):
        held = {name: mask.to(where) for name, mask in (masks or {}).items()}
        run = Training(model, params, len(train["label"]), lengths, value, lambda: apply_masks(model, held), where)
        if not (resume and run.go_on(states.load(resume, belongs_to))):
            seed_everything(params.seed, params.threads, params.device)
            run.choose_threads()
        while not run.finished:
            mean = run.epoch()
            run.end_epoch(mean, score(model, workload, validation, params.device))
            if resume:
                run.save(resume, belongs_to)
        model.load_state_dict(run.weights)
    model.eval()
    return run.curve


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

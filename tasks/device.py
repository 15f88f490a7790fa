"""Where a model step computes: the device, its arithmetic, and a model's way there and back.

Weights, data and checkpoints live on the CPU. What takes long (training, scores, gradients) runs on the
device that the settings name; what looks into a model's structure stays on the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from tasks.errors import Fault

Asked = Literal["cpu", "cuda", "auto"]
Precision = Literal["fp32", "bf16"]
# cuBLAS is repeatable only with a workspace of its own, which has to be asked for before its first use (its manual,
# section 2.1.4).
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def resolve(asked: Asked) -> torch.device:
    """The device asked for; `auto` is CUDA where there is a GPU. Fault if CUDA is asked for and there is none."""
    there = asked != "cpu" and torch.cuda.is_available()
    if asked == "cuda" and not there:
        build = f"PyTorch {torch.__version__}"
        raise Fault(
            "no CUDA device to train on",
            got=f"{build}, {'built for CUDA, sees no GPU' if torch.version.cuda else 'built for the CPU only'}",
            expected="an NVIDIA GPU, its driver, and a PyTorch built for CUDA",
            do="set device: cpu (or auto) for this artifact, or run it on a machine with a GPU",
        )
    return torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu")


def prepare(device: torch.device) -> None:
    """Make CUDA repeatable, and its FP32 as exact as the CPU's: no TF32. Before the first product on the device."""
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


def name(device: torch.device) -> str:
    """`cpu`, or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def mixed(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Automatic mixed precision: with `bf16`, products are of bfloat16, while weights, norms and losses stay FP32.

    Micikevicius et al. 2018, arXiv:1710.03740; bfloat16 needs no loss scaling (Kalamkar et al. 2019, arXiv:1905.12322).
    """
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


@contextlib.contextmanager
def placed(device: torch.device, *models: nn.Module, channels_last: bool = False) -> Iterator[None]:
    """Models on a device within the block, and back where they were after it, also after an error.

    Parameters stay the same objects, with their gradients, and tied tensors stay tied. `channels_last` lays out
    convolutions' weights as tensor cores want them. Not for use inside `inference_mode`: weights moved there
    can't be trained any more.
    """
    if device.type == "cpu":
        yield
        return
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a model can't be moved inside inference_mode: its weights could not be trained any more")
    homes = [(model, home) for model in models if (home := _home(model)) != device]
    for model, _ in homes:
        _move(model, device, torch.channels_last if channels_last else None)
    try:
        yield
    finally:
        for model, home in homes:
            _move(model, home, torch.contiguous_format if channels_last else None)


def _home(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def _move(model: nn.Module, device: torch.device, layout: torch.memory_format | None) -> None:
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            fits = layout is not None and tensor.dim() == 4
            there = tensor.to(device, memory_format=layout) if fits and layout else tensor.to(device)
            made[id(tensor)] = (tensor, there)
        return made[id(tensor)][1]

    model._apply(moved)

"""The state of a training after its last epoch, so that one that was killed goes on from there."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks import batches, device
from tasks.files import atomic, sha256
from tasks.settings import FitParams
from tasks.workloads.protocol import Arrays, Workload

CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("fit", "training", "batches", "device"))


def digest(
    params: FitParams, task: Workload, model: nn.Module, masks: Mapping[str, torch.Tensor] | None, *splits: Arrays
) -> str:
    """What a training's state belongs to.

    Settings, initial weights, masks, data with labels, PyTorch's version, the device, the training loop's code and
    the workload's file.
    """
    here = f"{torch.__version__} {device.name(device.resolve(params.device))}"
    found = hashlib.sha256(f"{here} {type(params).__name__} {params.model_dump_json()}".encode())
    workload = getattr(task, "__file__", None)
    for file in (*CODE, *([Path(workload)] if workload else ())):
        found.update(f"\0{file.name} {sha256(file)}\0".encode())
    for named in (model.state_dict(), masks or {}, *map(batches.tensors, splits)):
        for name, value in sorted(named.items()):
            if isinstance(value, torch.Tensor):
                found.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
                found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            else:
                found.update(f"\0{name} {value!r}\0".encode())
    return found.hexdigest()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state; the file is whole or the one before."""
    with atomic(path) as scratch:
        torch.save(state, scratch)


def on_cpu(tree: Any) -> Any:
    """Dictionaries and lists with every tensor on the CPU, so that a file of them loads anywhere."""
    if isinstance(tree, torch.Tensor):
        return tree.cpu()
    if isinstance(tree, dict):
        made = copy.copy(tree)
        made.update({key: on_cpu(value) for key, value in tree.items()})
        return made
    return [on_cpu(value) for value in tree] if isinstance(tree, list) else tree


def load(path: Path, belongs_to: str) -> dict[str, Any] | None:
    """The state in a file, if it belongs to this training; else None, and a line says why."""
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        print(f"{path} can't be read ({type(error).__name__}): training from the start", flush=True)
        return None
    if not isinstance(state, dict) or state.get("digest") != belongs_to:
        print(f"{path} is of other settings, weights, data or code: training from the start", flush=True)
        return None
    return state

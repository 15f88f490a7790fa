"""Model checkpoints: weights, and the layout that compression left, without pickled code.

A file holds the workload's path, the architecture keywords, the changes of the module tree
(`structure`), the numbers of every layer whose shape differs from a fresh model's (`layout`),
the masks of weights that stay zero, and the state dict, in which a tied weight stands once. It
is read with `weights_only`, so that loading runs no code of the file's.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks import structure
from tasks.errors import Fault
from tasks.files import atomic
from tasks.workloads.protocol import Workload, load_workload

FORMAT = 3
FILE = "model.pt"
Masks = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A model with what is needed to make it again.

    `structure` lists the changes of its module tree in order. `masks` maps a parameter's name to
    a boolean tensor of its shape: False where the weight is zero and has to stay so.
    """

    model: nn.Module
    workload_path: str
    architecture: dict[str, Any] = field(default_factory=dict)
    structure: tuple[structure.Change, ...] = ()
    masks: Masks = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return load_workload(Path(self.workload_path))


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write `folder/model.pt`; the same model gives the same bytes."""
    fresh = _fresh(checkpoint.workload, checkpoint.architecture, checkpoint.structure)
    state = checkpoint.model.state_dict()
    aliases = {name: first for name, first in _aliases(checkpoint.model).items() if name in state}
    _check_masks(checkpoint.masks, state)
    buffer = io.BytesIO()
    torch.save(
        {
            "format": FORMAT,
            "workload": checkpoint.workload_path,
            "architecture": checkpoint.architecture,
            "structure": [structure.written(change) for change in checkpoint.structure],
            "layout": layout(checkpoint.model, fresh),
            "aliases": aliases,
            "masks": {k: v.detach().clone().contiguous() for k, v in checkpoint.masks.items()},
            "state": {k: v.detach().clone().contiguous() for k, v in state.items() if k not in aliases},
        },
        buffer,
    )
    with atomic(folder / FILE) as scratch:
        scratch.write_bytes(buffer.getvalue())
    return folder / FILE


def load(folder: Path) -> Checkpoint:
    """Read `folder/model.pt`, in eval mode.

    Raises Fault, with the file's name, size and likely cause, if it isn't a checkpoint, and
    Fault if its workload is gone or makes another model now.
    """
    path = _path(folder)
    state = _read(path)
    workload = load_workload(Path(state["workload"]))
    try:
        changes = tuple(structure.read(change) for change in state["structure"])
        model = _fresh(workload, state["architecture"], changes)
        weights = state["state"] | {name: state["state"][first] for name, first in state["aliases"].items()}
        for name, numbers in state["layout"].items():
            _reshape(model.get_submodule(name), numbers, name, weights)
        for name, first in state["aliases"].items():
            _tie(model, name, first)
        model.load_state_dict(weights, strict=True)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise Fault(
            f"{path} doesn't fit its workload any more",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            expected=f"the model of {state['workload']} as it was when this was saved",
            do="retrain with `dvc repro`, or restore the workload file",
        ) from None
    return Checkpoint(model.eval(), state["workload"], state["architecture"], changes, state["masks"])


def workload_file(folder: Path) -> Path:
    """The workload file that `folder/model.pt` names, which may not exist here; runs none of its code."""
    return Path(_read(_path(folder))["workload"])


def _path(folder: Path) -> Path:
    return folder / FILE if folder.is_dir() or not folder.exists() else folder


def _fresh(workload: Workload, architecture: dict[str, Any], changes: tuple[structure.Change, ...]) -> nn.Module:
    model = workload.model(**architecture)
    for change in changes:
        change.apply(model)
    return model


def _aliases(model: nn.Module) -> dict[str, str]:
    """Names of tensors that stand in the model more than once, and the first name of each."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}


def _tie(model: nn.Module, name: str, first: str) -> None:
    (owner, _, key), (source, _, other) = name.rpartition("."), first.rpartition(".")
    setattr(model.get_submodule(owner), key, getattr(model.get_submodule(source), other))


def _check_masks(masks: Masks, state: dict[str, torch.Tensor]) -> None:
    for name, mask in masks.items():
        if name not in state or mask.dtype != torch.bool or mask.shape != state[name].shape:
            raise ValueError(f"mask of {name} is no boolean tensor of the shape of such a parameter")
        if state[name][~mask].any():
            raise ValueError(f"{name} is not zero where its mask says so")


def layout(model: nn.Module, fresh: nn.Module) -> dict[str, dict[str, Any]]:
    """Modules of `model` with other shapes than those of `fresh`, and their numbers that differ."""
    changed = {}
    for name, module in model.named_modules():
        other = fresh.get_submodule(name)
        numbers = {k: v for k, v in _numbers(module).items() if _numbers(other).get(k) != v}
        if numbers or _shapes(module) != _shapes(other):
            changed[name] = numbers
    return changed


def _numbers(module: nn.Module) -> dict[str, Any]:
    """A module's own whole numbers and tuples of them, such as `out_channels` or `normalized_shape`."""
    plain = {k: tuple(v) if isinstance(v, tuple) else v for k, v in vars(module).items() if not k.startswith("_")}
    return {k: v for k, v in plain.items() if all(type(i) is int for i in (v if isinstance(v, tuple) else (v,)))}


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {name: value.shape for name, value in own}


def _reshape(module: nn.Module, numbers: dict[str, Any], name: str, state: dict[str, torch.Tensor]) -> None:
    for attribute, value in numbers.items():
        setattr(module, attribute, value)
    prefix = f"{name}." if name else ""
    for key, parameter in module.named_parameters(recurse=False):
        setattr(module, key, nn.Parameter(torch.empty_like(state[prefix + key]), parameter.requires_grad))
    for key, _ in module.named_buffers(recurse=False):
        if prefix + key in state:
            setattr(module, key, torch.empty_like(state[prefix + key]))


def _read(path: Path) -> dict[str, Any]:
    expected = "a checkpoint written by Enginesmith"
    if not path.is_file():
        raise Fault(f"no checkpoint {path}", got="nothing there", expected=expected, do="run `dvc repro` or `dvc pull`")
    size = path.stat().st_size
    got = f"{size} bytes"
    if size == 0:
        raise Fault(
            f"{path} is empty", got=got, expected=expected, do="a write was cut off: delete it and run `dvc repro`"
        )
    with path.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise Fault(f"{path} is a Git LFS pointer", got=got, expected=expected, do="run `git lfs pull`")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=head.startswith(b"PK"))
    except Exception as error:
        cause = "truncated" if head.startswith(b"PK") else "not a PyTorch file"
        if head.startswith((b"PK", b"\x80")) and "unsupported" in str(error).lower():
            cause = "a pickle of a whole module, which is never loaded since it can run code"
        raise Fault(
            f"{path} is not a checkpoint",
            got=f"{got}; likely {cause}",
            expected=expected,
            do="save the state dict through tasks.checkpoint.save",
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = (
            f"format {state.get('format')!r}"
            if isinstance(state, dict) and "format" in state
            else "weights without a layout"
        )
        raise Fault(
            f"{path} is not a checkpoint of this version",
            got=f"{got}, {found}",
            expected=f"format {FORMAT}",
            do="save it through tasks.checkpoint.save",
        )
    return state

"""What the layers of an engine made from PyTorch have to do: products and bytes, module by module."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from tasks import fit, products
from tasks.onnx_work import Work
from tasks.systolic import Product, convolution
from tasks.workloads import protocol
from tasks.workloads.protocol import Workload

HALVES = ("fp16", "bf16")
BYTES = ("int8", "fp8")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NOTHING = (nn.Dropout, nn.Identity, nn.Flatten)


def of_modules(
    model: nn.Module, task: Workload, batch: int, length: int | None, precision: str, compiled: bool
) -> list[Work]:
    """The work of each module that moves or multiplies something, in the order of the model.

    A module reads its inputs and its own weights, of an embedding as much as it gives, and writes its outputs. In
    reduced precision floats count with its size; in INT8 and FP8 that holds for the weights of linear layers. What
    functions do between modules isn't counted. With `compiled`, only modules that multiply count: others are parts of
    their neighbours' kernels.
    """
    item = 2 if precision in HALVES else 4
    done: dict[nn.Module, list[tuple[int, int, tuple[Product, ...]]]] = {}

    def called(module: nn.Module, inputs: tuple[object, ...], output: object, multiply_adds: int) -> None:
        own = _bytes(output, item) if isinstance(module, nn.Embedding) else _own(module, precision, item)
        moved = _bytes(inputs, item) + _bytes(output, item) + own
        moves = not compiled and not list(module.children()) and not isinstance(module, NOTHING)
        if multiply_adds or moves:
            done.setdefault(module, []).append((multiply_adds, moved, _products(module, inputs, output, item)))

    example = protocol.example(task, batch)
    example = protocol.cut(task, example, length) if length else example
    with torch.inference_mode(), fit.eval_mode(model), products.counting(model, called):
        fit.forward(model, task, fit.tensors(example))
    return [_work(name, module, done[module], precision) for name, module in model.named_modules() if module in done]


def _work(name: str, module: nn.Module, calls: list[tuple[int, int, tuple[Product, ...]]], precision: str) -> Work:
    kind = type(module).__name__ + (f" ×{len(calls)}" if len(calls) > 1 else "")
    macs, moved = sum(call[0] for call in calls), sum(call[1] for call in calls)
    found = precision if macs or precision not in BYTES else "fp32"
    return Work(name or "(model)", kind, found, macs, moved, tuple(p for call in calls for p in call[2]))


def _products(module: nn.Module, inputs: tuple[object, ...], output: object, item: int) -> tuple[Product, ...]:
    given = next((value for value in inputs if isinstance(value, torch.Tensor)), None)
    if given is None or not isinstance(output, torch.Tensor):
        return ()
    if isinstance(module, nn.Linear):
        return (Product(given.numel() // module.in_features, module.in_features, module.out_features),)
    if isinstance(module, CONVOLUTIONS):
        padded = module.padding not in ("valid", 0) and any(p != 0 for p in _each(module.padding))
        in_place = prod(module.kernel_size) == 1 and prod(module.stride) == 1 and not padded
        return (convolution(tuple(output.shape), tuple(module.weight.shape), module.groups, item, in_place),)
    return ()


def _each(padding: Any) -> tuple[Any, ...]:
    return padding if isinstance(padding, tuple) else (padding,)


def _own(module: nn.Module, precision: str, item: int) -> int:
    """Bytes of a module's own weights and statistics."""
    size = 1 if precision in BYTES and isinstance(module, nn.Linear) else item
    weights = sum(p.numel() * (size if p.ndim > 1 else item) for p in module.parameters(recurse=False))
    return weights + sum(_bytes(b, item) for b in module.buffers(recurse=False) if b.is_floating_point())


def _bytes(value: object, item: int) -> int:
    """Bytes of the tensors in a value, floats of `item` bytes each."""
    if isinstance(value, torch.Tensor):
        return value.numel() * (item if value.is_floating_point() else value.element_size())
    if isinstance(value, dict):
        return sum(_bytes(v, item) for v in value.values())
    return sum(_bytes(v, item) for v in value) if isinstance(value, tuple | list) else 0

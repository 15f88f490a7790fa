"""The matrix products in an ONNX node, by its operator and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import onnx
from onnx import helper

from tasks.systolic import Product, convolution

QUANTIZED_LSTM = "DynamicQuantizeLSTM"
RECURRENT = {"LSTM", "GRU", "RNN", QUANTIZED_LSTM}
CONVOLUTIONS = {"Conv", "ConvInteger", "QLinearConv"}
MATRICES = {"MatMul", "MatMulInteger", "QLinearMatMul"}
# Where an operator's second factor is, if it isn't its second input.
SECOND = {"QLinearConv": 3, "QLinearMatMul": 3}


class Sized(Protocol):
    """What has a shape and a size in bytes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...


def products(node: onnx.NodeProto, known: Mapping[str, Sized]) -> tuple[Product, ...] | None:
    """A node's products; none for an operator that has none, and None where the shapes that it takes aren't known."""
    op = node.op_type
    if op not in CONVOLUTIONS | MATRICES | RECURRENT | {"ConvTranspose", "Gemm", "Einsum"}:
        return ()
    second = SECOND.get(op, 1)
    names = (node.input[0], *node.input[second : second + 2], node.output[0])
    if any(name not in known for name in (names[0], *names[1:2])):
        return None
    a, b = known[names[0]].shape, known[names[1]].shape
    settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if op in RECURRENT:
        return _recurrent(op, a, b, settings)
    if op == "Einsum":
        return (_einsum(settings["equation"].decode(), a, b),)
    if op == "Gemm":
        m, k = (a[1], a[0]) if settings.get("transA") else a
        return (Product(m, k, b[0] if settings.get("transB") else b[1]),)
    if op in MATRICES:
        return (_matrices(a, b),)
    groups = settings.get("group", 1)
    if op == "ConvTranspose":
        return (Product(a[0] * prod(a[2:]), b[0] // groups, prod(b[1:]), groups),)
    if node.output[0] not in known:
        return None
    in_place = prod(b[2:]) == 1 and prod(settings.get("strides", [1])) == 1 and not any(settings.get("pads", []))
    item = known[names[0]].bytes // max(1, prod(a))
    return (convolution(known[node.output[0]].shape, b, groups, item, in_place),)


def _matrices(a: tuple[int, ...], b: tuple[int, ...]) -> Product:
    """By NumPy's rules of `matmul`; samples that share a matrix are rows of one product."""
    k = a[-1]
    n = b[-1] if len(b) > 1 else 1
    if len(b) <= 2:
        return Product(prod(a[:-1]), k, n)
    many = prod(max(x, y) for x, y in zip(_padded(a[:-2], len(b) - 2), _padded(b[:-2], len(a) - 2), strict=True))
    return Product(a[-2] if len(a) > 1 else 1, k, n, many)


def _padded(batch: tuple[int, ...], least: int) -> tuple[int, ...]:
    return (1,) * (least - len(batch)) + batch


def _recurrent(op: str, x: tuple[int, ...], w: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[Product, ...]:
    """Inputs [steps, batch, k] by weights [directions, gates, k], for all steps at once; states by theirs, in turn."""
    steps, batch, k = x
    directions, gates = w[0], w[2] if op == QUANTIZED_LSTM else w[1]
    hidden = settings["hidden_size"]
    return Product(steps * batch, k, gates, directions), Product(batch, hidden, gates, directions * steps)


def _einsum(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> Product:
    """Rows are of the first factor alone, columns of the second; what both have and the result hasn't is summed."""
    given, out = equation.replace(" ", "").split("->")
    first, second = given.split(",")
    sizes = dict(zip(first, a, strict=True)) | dict(zip(second, b, strict=True))

    def size(letters: set[str]) -> int:
        return prod(sizes[letter] for letter in letters)

    left, right, kept = set(first), set(second), set(out)
    return Product(size(left - right), size((left & right) - kept), size(right - left), size(left & right & kept))

"""Proves in an ONNX file which layers are 2:4 sparse: at most 2 non-zero of 4 along the input dimension.

The pattern of sparse tensor cores (Mishra et al. 2021, arXiv:2104.08378). A weight is followed
back from its layer to the constant it is made of, through transposes and Q/DQ nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from tasks import onnx_file
from tasks.errors import Fault

if TYPE_CHECKING:
    import torch
    from torch import nn

GROUP, MOST = 4, 2
INPUTS, OUTPUTS = 16, 8
NOTE, NOTE_LAYERS = "sparsity", "sparse_layers"
PATTERN = "2:4"
PRODUCTS = ("Conv", "ConvInteger", "Gemm", "MatMul", "MatMulInteger")
THROUGH = ("Identity", "Cast", "QuantizeLinear")


@dataclass(frozen=True)
class SparseLayer:
    """One weight of a file's matrix products: [outputs, inputs, …].

    `name` is the constant's, or the node's if it has none. `layer` is the parameter that was made
    sparse and that it was found to be. `reason` says why it isn't proven to be 2:4.
    """

    name: str
    outputs: int | None
    inputs: int | None
    two_of_four: bool
    reason: str | None
    layer: str | None = None


def proof(model: onnx.ModelProto) -> list[SparseLayer]:
    """Every matrix product of a file, in its order, a weight that is used twice once."""
    return [_judge(name, used) for name, used in _weights(model)]


def check(model: onnx.ModelProto, made: Mapping[str, np.ndarray]) -> list[SparseLayer]:
    """As `proof`, with every layer of `made` found in it.

    `made` maps a layer's name to where its weight [outputs, inputs, …] may be non-zero. Raises
    Fault if one has no weight of its shape in the file that is zero wherever it has to be.
    """
    weights = _weights(model)
    layers = [_judge(name, used) for name, used in weights]
    for name, allowed in made.items():
        same = [i for i, (_, used) in enumerate(weights) if used is not None and used.shape == allowed.shape]
        fitting = [i for i in same if not (weights[i][1] & ~allowed).any()]
        if not fitting:
            least = min((int((weights[i][1] & ~allowed).sum()) for i in same), default=None)
            raise Fault(
                f"{name} was made 2:4 sparse, and isn't in the file",
                got=f"no weight of shape {list(allowed.shape)}"
                if least is None
                else f"{least} non-zero values where it has to be zero, at best",
                expected="the zeros that training kept",
                do="look at what folded or rewrote this weight on its way",
            )
        free = [i for i in fitting if layers[i].layer is None]
        layers[(free or fitting)[0]] = replace(layers[(free or fitting)[0]], layer=name)
    return layers


def made(model: nn.Module, masks: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The linear layers and convolutions that `masks` keep 2:4, and whose weights are; in the form of `check`."""
    from torch import nn

    weights = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    found = {name: masks[name].numpy() for name in weights if name in masks}
    return {
        name: mask
        for name, mask in found.items()
        if violations(mask) == 0 and violations((weights[name] != 0).numpy()) == 0
    }


def notes(made: Mapping[str, np.ndarray]) -> dict[str, str]:
    """What a file's metadata says of its sparsity; nothing if no layer was made sparse."""
    return {NOTE: PATTERN, NOTE_LAYERS: json.dumps(list(made))} if made else {}


def made_in(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The proven layers of a file that says that it was made sparse, in the form that `check` takes."""
    if onnx_file.notes(model).get(NOTE) != PATTERN:
        return {}
    return {name: used for name, used in _weights(model) if used is not None and violations(used) == 0}


def violations(used: np.ndarray) -> int | None:
    """Groups of 4 along axis 1 of a boolean array [outputs, inputs, …] with more than 2 True.

    None if it has no such groups: fewer than two axes, or inputs that aren't a multiple of 4.
    """
    if used.ndim < 2 or used.shape[1] % GROUP or not used.size:
        return None
    groups = np.moveaxis(used, 1, -1).reshape(-1, GROUP)
    return int((groups.sum(1) > MOST).sum())


def unfit(outputs: int, inputs: int) -> str | None:
    """Why sparse tensor cores won't take a layer of these sizes, by NVIDIA ASP's rule, or None."""
    if inputs % INPUTS == 0 and outputs % OUTPUTS == 0:
        return None
    return f"it has {inputs} inputs and {outputs} outputs: not multiples of {INPUTS} and {OUTPUTS}"


def _judge(name: str, used: np.ndarray | None) -> SparseLayer:
    if used is None:
        return SparseLayer(name, None, None, False, "it has no constant weight")
    outputs, inputs = used.shape[:2]
    bad = violations(used)
    if bad == 0:
        return SparseLayer(name, outputs, inputs, True, None)
    groups = used.size // GROUP
    reason = unfit(outputs, inputs) or f"{bad:,} of {groups:,} groups of 4 have more than 2 non-zero"
    return SparseLayer(name, outputs, inputs, False, reason)


def _weights(model: onnx.ModelProto) -> list[tuple[str, np.ndarray | None]]:
    """Name, and where it is non-zero [outputs, inputs, …], of the weight of every matrix product."""
    parts = list(onnx_file.graphs(model.graph))
    constants = {name: array for part in parts for name, array in onnx_file.constants(part).items()}
    makers = {output: node for part in parts for node in part.node for output in node.output}
    found: dict[tuple[str, bool], tuple[str, np.ndarray | None]] = {}
    for part in parts:
        for node in part.node:
            if node.op_type in PRODUCTS:
                for name, used, flipped in _operands(node, makers, constants):
                    found.setdefault((name, flipped), (name, used))
    return list(found.values())


def _operands(
    node: onnx.NodeProto, makers: dict[str, onnx.NodeProto], constants: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray | None, bool]]:
    """The constant operand of a product, [outputs, inputs, …]; a product of two computed ones has none."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    convolution = node.op_type.startswith("Conv")
    for place in (1,) if convolution else (1, 0):
        name, used = _nonzero(node.input[place], makers, constants)
        if used is None or used.ndim < 2:
            continue
        if node.op_type.endswith("Integer") and node.input[place] in constants:
            point = constants.get(node.input[place + 2] if len(node.input) > place + 2 else "", np.zeros(1))
            used = constants[node.input[place]] != (point.reshape(-1, *[1] * (used.ndim - 1)) if convolution else point)
        # Products contract the last axis of the left operand and the last but one of the right.
        transposed = bool(attributes.get("transB" if place else "transA", 0))
        flipped = not convolution and transposed == (place == 0)
        if flipped:
            used = used.swapaxes(-1, -2)
        yield name, used if convolution else used.reshape(-1, used.shape[-1]), flipped
        return
    yield node.name or node.output[0], None, False


def _nonzero(
    name: str, makers: dict[str, onnx.NodeProto], constants: dict[str, np.ndarray]
) -> tuple[str, np.ndarray | None]:
    """The constant that a value is made of, and where the value is non-zero; None if it is computed."""
    if name in constants:
        return name, constants[name] != 0
    node = makers.get(name)
    if node is None:
        return name, None
    if node.op_type == "DequantizeLinear" and node.input[0] in constants:
        return node.input[0], _dequantized(node, constants)
    if node.op_type in (*THROUGH, "DequantizeLinear"):
        return _nonzero(node.input[0], makers, constants)
    if node.op_type == "Transpose":
        root, used = _nonzero(node.input[0], makers, constants)
        order = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "perm"), None)
        return root, None if used is None else used.transpose(order)
    return name, None


def _dequantized(node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> np.ndarray | None:
    """Where a dequantised constant is non-zero: where it differs from its zero point."""
    array = constants[node.input[0]]
    if len(node.input) < 3 or not node.input[2]:
        return array != 0
    point = constants.get(node.input[2])
    if point is None:
        return None
    axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 1)
    if point.size > 1 and point.ndim == 1:
        point = point.reshape([-1 if i == axis % array.ndim else 1 for i in range(array.ndim)])
    elif point.size == 1:
        point = point.reshape(())
    if point.ndim == array.ndim and point.shape != array.shape:
        # Blocked: each zero point serves a run of values along its axis.
        for i, (points, values) in enumerate(zip(point.shape, array.shape, strict=True)):
            point = (
                point if points in (1, values) else point.repeat(-(-values // points), i)[_head(array.ndim, i, values)]
            )
    return np.asarray(array != point)


def _head(ndim: int, axis: int, count: int) -> tuple[slice, ...]:
    return tuple(slice(count) if i == axis else slice(None) for i in range(ndim))

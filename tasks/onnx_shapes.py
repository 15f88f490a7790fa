"""The shape of every tensor of an ONNX model at one batch and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tasks.onnx_file import graphs
from tasks.onnx_products import QUANTIZED_LSTM

# What exporters compute sizes with: the results are about as large as what goes in.
ARITHMETIC = {
    *("Shape", "Size", "Constant", "Identity", "Cast", "Slice", "Gather", "Concat", "Unsqueeze", "Squeeze", "Reshape"),
    *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Min", "Max", "Equal", "Where"),
}
SMALL = 1024
BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4}


@dataclass(frozen=True)
class Tensor:
    """A tensor's shape and ONNX type."""

    shape: tuple[int, ...]
    kind: int

    @property
    def bytes(self) -> int:
        """Its size in memory, rounded up."""
        bits = BITS.get(self.kind) or 8 * helper.tensor_dtype_to_np_dtype(self.kind).itemsize
        return -(-prod(self.shape) * bits // 8)


def tensors(model: onnx.ModelProto, batch: int, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Every tensor of the main graph whose shape is inferred for `batch` samples and these sizes of other axes."""
    light = _light(model)
    other = next(iter(lengths.values()), batch)  # An exporter may have given the one dynamic axis a name of its own.
    for value in light.graph.input:
        for index, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                dim.dim_value = lengths.get(dim.dim_param, other) if index else batch
    found = _inferred(light)
    return found | {
        i.name: Tensor(tuple(i.dims), i.data_type) for i in (*light.graph.initializer, *model.graph.initializer)
    }


def _inferred(light: onnx.ModelProto) -> dict[str, Tensor]:
    """What shape inference finds once what exporters compute sizes with has been computed; it changes `light`.

    Inference knows what a Slice gives only if its ends are constants, and exporters compute them from shapes.
    """
    found: dict[str, Tensor] = {}
    while True:
        try:
            graph = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
        except onnx.shape_inference.InferenceError:
            if not found:
                raise
            return found
        for value in (*graph.input, *graph.value_info, *graph.output):
            kind = value.type.tensor_type
            if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim) and kind.elem_type:
                found[value.name] = Tensor(tuple(dim.dim_value for dim in kind.shape.dim), kind.elem_type)
        if not _fold(light, found):
            return found


def _fold(light: onnx.ModelProto, known: Mapping[str, Tensor]) -> bool:
    """Put constants in the place of nodes that compute sizes; whether there were any.

    Those that a branch or a loop's body reads stay: inference tells these of nodes, and not of constants.
    """
    read_inside = {name for graph in list(graphs(light.graph))[1:] for node in graph.node for name in node.input}
    constants = {i.name: numpy_helper.to_array(i) for i in light.graph.initializer}
    kept, new = [], dict[str, np.ndarray]()
    for node in light.graph.node:
        values = _computed(node, constants, known, light)
        constants |= values or {}
        if values is None or not read_inside.isdisjoint(node.output):
            kept.append(node)
        else:
            new |= values
    del light.graph.node[:]
    light.graph.node.extend(kept)
    light.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in new.items())
    return bool(new)


def _computed(
    node: onnx.NodeProto, constants: Mapping[str, np.ndarray], known: Mapping[str, Tensor], light: onnx.ModelProto
) -> dict[str, np.ndarray] | None:
    """The output of a node that computes a size from constants, or from the shape of its input; None for any other."""
    if node.domain or node.op_type not in ARITHMETIC:
        return None
    feeds = {name: constants[name] for name in node.input if name in constants}
    if node.op_type in ("Shape", "Size") and node.input[0] in known:
        # Nothing of the input counts but its shape.
        feeds[node.input[0]] = np.broadcast_to(np.float32(0), known[node.input[0]].shape)
    if any(name and name not in feeds for name in node.input):
        return None
    try:
        (value,) = ReferenceEvaluator(node, opsets={o.domain: o.version for o in light.opset_import}).run(None, feeds)
    except Exception:  # Python code of any operator
        return None
    return {node.output[0]: np.asarray(value)} if np.size(value) <= SMALL else None


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for shape inference: large weights as inputs, no noted shapes, no operator unknown to it."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name
    graph.input.extend(model.graph.input)
    for node in model.graph.node:
        held = next((a.t for a in node.attribute if node.op_type == "Constant" and a.HasField("t")), None)
        if held is not None and prod(held.dims) > SMALL:
            graph.input.append(helper.make_tensor_value_info(node.output[0], held.data_type, list(held.dims)))
        else:
            graph.node.append(node)
    graph.output.extend(model.graph.output)
    for output in graph.output:
        output.type.tensor_type.ClearField("shape")
    given = {value.name for value in graph.input}
    for weight in model.graph.initializer:
        if prod(weight.dims) <= SMALL:
            graph.initializer.append(weight)
        elif weight.name not in given:
            graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    for node in graph.node:
        if node.op_type == QUANTIZED_LSTM:
            node.op_type, node.domain = "LSTM", ""
            del node.input[8:]
    return light

"""What the layers of an engine made from ONNX have to do: products and bytes, by the source's shapes.

Shapes come from ONNX's own inference at one batch and length. A layer stands for the nodes of the source that its
backend says it was fused from: it reads what comes from outside of them, weights included, and writes what others read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx
from onnx import TensorProto, helper

from tasks.manifest import Layer
from tasks.onnx_products import QUANTIZED_LSTM, products
from tasks.systolic import Product

# They give another view of their first input, or nothing that is computed.
VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"}
# Their results follow from shapes alone, which are fixed here.
SHAPES = {"Constant", "Shape", "Size"}
# They read no more of their first input than they give.
PARTS = {"Gather", "GatherElements", "GatherND", "Slice"}
SMALL = 1024
BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4}
PRECISIONS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.FLOAT8E4M3FN: "fp8",
}


@dataclass(frozen=True)
class Work:
    """What one layer does for one batch. `multiply_adds` may be more than `products` tell, where their sizes aren't."""

    name: str
    kind: str
    precision: str
    multiply_adds: int
    bytes: int
    products: tuple[Product, ...] = ()


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
    inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    found = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim) and kind.elem_type:
            found[value.name] = Tensor(tuple(dim.dim_value for dim in kind.shape.dim), kind.elem_type)
    return found | {i.name: Tensor(tuple(i.dims), i.data_type) for i in model.graph.initializer}


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for shape inference: large weights as inputs, no noted shapes, no operator unknown to it."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
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


def of_model(
    model: onnx.ModelProto, layers: Sequence[Layer], batch: int, lengths: Mapping[str, int]
) -> tuple[list[Work], list[str]]:
    """The work of each layer in the order that it runs, and sentences on what couldn't be counted.

    A layer that stands for no node of the source, such as a change of layout, has no work: the model doesn't ask for
    it. A product that no layer is told to stand for is a row of its own. Other such nodes count for nothing: what they
    do is fused, folded or gone. Without layers, every node is a row.
    """
    known, graph = tensors(model, batch, lengths), model.graph
    fixed = _fixed(graph)
    groups = _groups(graph, layers, fixed)
    found = [_work(graph, known, members, layer) for members, layer in groups]
    lost = [
        graph.node[i].name or graph.node[i].output[0]
        for members, _ in groups
        for i in members
        if products(graph.node[i], known) is None
    ]
    return found, [f"products of unknown size are left out, {len(lost)} in all, such as {lost[0]}"] if lost else []


def _fixed(graph: onnx.GraphProto) -> set[int]:
    """Indices of nodes that depend on weights and shapes alone: they are computed before the first call."""
    constant = {i.name for i in graph.initializer} | {""}
    found = set()
    for index, node in enumerate(graph.node):
        if node.op_type in SHAPES or (node.input and all(name in constant for name in node.input)):
            found.add(index)
            constant |= set(node.output)
    return found


def _groups(graph: onnx.GraphProto, layers: Sequence[Layer], fixed: set[int]) -> list[tuple[list[int], Layer | None]]:
    """Indices of nodes with the layer that stands for them, or with None for a node on its own.

    A layer has none that only moves data where the source has no node for it, or gives another view.
    """
    named = {name: i for i, node in enumerate(graph.node) for name in (*node.output[:1], node.name) if name}
    taken: set[int] = set()
    found: list[tuple[list[int], Layer | None]] = []
    for layer in layers:
        members = [named[name] for name in layer.fused_from if name in named and named[name] not in taken]
        taken |= set(members)
        works = any(i not in fixed and graph.node[i].op_type not in VIEWS for i in members)
        found.append((members if works else [], layer))
    told = any(members for members, _ in found)
    for i, node in enumerate(graph.node):
        counts = products(node, {}) is None if told else node.op_type not in VIEWS
        if i not in taken and i not in fixed and counts:
            found.append(([i], None))
    return found


def _work(graph: onnx.GraphProto, known: Mapping[str, Tensor], members: Sequence[int], layer: Layer | None) -> Work:
    nodes = [graph.node[i] for i in members]
    done = [product for node in nodes for product in products(node, known) or ()]
    size = _bytes(graph, known, set(members))
    macs = sum(product.multiply_adds for product in done)
    if layer is not None:
        return Work(layer.name, layer.kind, layer.precision, macs, size, tuple(done))
    types = [known[name].kind for name in nodes[0].input if name in known]
    precision = next((PRECISIONS[kind] for kind in types if kind in PRECISIONS), "unknown")
    return Work(nodes[0].name or nodes[0].output[0], nodes[0].op_type, precision, macs, size, tuple(done))


def _bytes(graph: onnx.GraphProto, known: Mapping[str, Tensor], members: set[int]) -> int:
    """Bytes that a group of nodes reads from outside and that it writes for others, each tensor once."""
    views = {node.output[0]: node.input[0] for node in graph.node if node.op_type in VIEWS}

    def root(name: str) -> str:
        while name in views:
            name = views[name]
        return name

    inside = {name for i in members for name in graph.node[i].output} - {""}
    read: dict[str, int] = {}
    for node in (graph.node[i] for i in sorted(members)):
        if node.op_type in SHAPES:
            continue
        for position, name in enumerate(node.input):
            place = root(name)
            if name in known and place not in inside:
                size = known[name].bytes
                if node.op_type in PARTS and position == 0 and node.output[0] in known:
                    size = min(size, Tensor(known[node.output[0]].shape, known[name].kind).bytes)
                read[place] = max(size, read.get(place, 0))
    others = [n for i, n in enumerate(graph.node) if i not in members and n.op_type not in VIEWS | SHAPES]
    outside = {root(name) for node in others for name in node.input} | {root(output.name) for output in graph.output}
    written = sum(known[name].bytes for name in inside & outside if name in known)
    return sum(read.values()) + written

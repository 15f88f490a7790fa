"""What the layers of an engine made from ONNX have to do: products and bytes, by the source's shapes.

Shapes are those at one batch and length. A layer stands for the nodes of the source that its
backend says it was fused from: it reads what comes from outside of them, weights included, and writes what others read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from tasks.manifest import Layer
from tasks.onnx_products import products
from tasks.onnx_shapes import Tensor, tensors
from tasks.systolic import Product

# They give another view of their first input, or nothing that is computed.
VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"}
# Their results follow from shapes alone, which are fixed here.
SHAPES = {"Constant", "Shape", "Size"}
# They read no more of their first input than they give.
PARTS = {"Gather", "GatherElements", "GatherND", "Slice"}
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


def of_model(
    model: onnx.ModelProto, layers: Sequence[Layer], batch: int, lengths: Mapping[str, int]
) -> tuple[list[Work], list[str]]:
    """The work of each layer in the order that it runs, and the names of products that couldn't be counted.

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
    return found, lost


def _fixed(graph: onnx.GraphProto) -> set[int]:
    """Indices of nodes that depend on weights and shapes alone: they are computed before the first call."""
    constant = {i.name for i in graph.initializer} | {""}
    found = set()
    for index, node in enumerate(graph.node):
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            continue  # Its branches may read anything.
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

"""The nodes of an ONNX file for a quantiser: named, free of names that it will make up, and some left alone."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx
from onnx import helper

from tasks import onnx_file
from tasks.errors import Fault

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
QDQ = ("QuantizeLinear", "DequantizeLinear")
# What a dynamically quantised product or layer becomes.
INTEGER = ("MatMulInteger", "DynamicQuantizeLSTM")
# What ONNX Runtime's quantiser, and ModelOpt's, which is built on it, append to a tensor's name.
SUFFIXES = (
    *(f"_{kind}_{end}" for kind in QDQ for end in ("Input", "Output")),
    *("_scale", "_zero_point", "_quantized", "_QuantizeLinear", "_DequantizeLinear"),
)


@dataclass(frozen=True)
class Maker:
    """Makes one model in a format, as often as asked, from activation ranges that were found once.

    `make(exclude)` returns the model with the named nodes left in floating point. `nodes` are those that it
    would quantise, in the file's order; `kept` are those that settings or the format leave alone, and why.
    """

    nodes: list[str]
    make: Callable[[tuple[str, ...]], onnx.ModelProto]
    kept: dict[str, str] = field(default_factory=dict)


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes have names of their own, and whose tensors don't have a quantiser's generated ones.

    Raises Fault if an input or output of the model, which can't be renamed, has such a name.
    """
    model = copy.deepcopy(model)
    _name_nodes(model.graph)
    _free_names(model)
    return model


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node without a name one, and every later node of the same name another."""
    taken = {node.name for part in onnx_file.graphs(graph) for node in part.node}
    seen: set[str] = set()
    for part in onnx_file.graphs(graph):
        for node in part.node:
            if not node.name or node.name in seen:
                node.name = _free(node.name or node.op_type, taken)
                taken.add(node.name)
            seen.add(node.name)


def _free(name: str, taken: Iterable[str]) -> str:
    number = 1
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


def _free_names(model: onnx.ModelProto) -> None:
    """Rename inner tensors that are called as a quantiser would call its own for another tensor."""
    parts = list(onnx_file.graphs(model.graph))
    names = {name for part in parts for node in part.node for name in (*node.input, *node.output) if name}
    names |= {i.name for part in parts for i in part.initializer}
    outer = {value.name for value in (*model.graph.input, *model.graph.output)}
    clashes = {n for n in names for s in SUFFIXES if n.endswith(s) and n[: -len(s)] in names}
    if stuck := sorted(clashes & outer):
        raise Fault(
            "an input or output of the model has the name of a tensor that quantisation makes",
            got=", ".join(stuck),
            expected=f"a name that doesn't end in {SUFFIXES[4]}, {SUFFIXES[5]} or the like, after another tensor's",
            do="give it another name in the workload's INPUTS or OUTPUTS",
        )
    renamed: dict[str, str] = {}
    for name in sorted(clashes):
        renamed[name] = _free(f"{name}.own", names)
        names.add(renamed[name])
    for part in parts:
        for node in part.node:
            for names_of in (node.input, node.output):
                for index, name in enumerate(names_of):
                    names_of[index] = renamed.get(name, name)
        for value in (*part.initializer, *part.value_info):
            value.name = renamed.get(value.name, value.name)


def refuse_quantised(model: onnx.ModelProto) -> None:
    """Raise Fault if a file has Q/DQ nodes or integer products already."""
    found = [n for part in onnx_file.graphs(model.graph) for n in part.node if n.op_type in (*QDQ, *INTEGER)]
    if found:
        raise Fault(
            "the parent is quantised already",
            got=f"{len(found)} nodes such as {found[0].op_type} {found[0].name}",
            expected="a model in floating point",
            do="quantise the export of a model that qat didn't make",
        )


def kept(model: onnx.ModelProto, patterns: Iterable[str], operators: Iterable[str]) -> dict[str, str]:
    """Names of the nodes that `keep` and `keep_ops` leave in higher precision, and by which setting.

    Patterns are as of the shell (`*`, `?`, `[…]`), in upper and lower case. Raises Fault, with near names, for a
    pattern that no node has, and for a type of operator that isn't in the model.
    """
    nodes = list(model.graph.node)
    found: dict[str, str] = {}
    for pattern in patterns:
        matches = [node.name for node in nodes if fnmatchcase(node.name, pattern)]
        if not matches:
            raise _unknown("keep", pattern, [node.name for node in nodes], "a pattern of the name of a node")
        found.update(dict.fromkeys(matches, f"keep: {pattern}"))
    kinds = list(dict.fromkeys(node.op_type for node in nodes))
    for kind in operators:
        if kind not in kinds:
            raise _unknown("keep_ops", kind, kinds, "a type of operator that the model has")
        found.update({n.name: f"keep_ops: {kind}" for n in nodes if n.op_type == kind and n.name not in found})
    return found


def _unknown(key: str, got: str, names: list[str], expected: str) -> Fault:
    near = difflib.get_close_matches(got.strip("*"), names, 5, 0.3) or names[:5]
    return Fault(
        f"quantize.*.{key} names nothing of this model",
        got=repr(got),
        expected=expected,
        do=f"near ones are {', '.join(near)}" if near else "leave it out",
    )


def gemm_to_matmul(graph: onnx.GraphProto) -> None:
    """Turn every Gemm of a constant 2-D weight into MatMul and Add, in place; the product keeps the node's name.

    Scaled ones (alpha or beta other than 1) and those of a transposed input stay as they are.
    """
    weights = {i.name: i for i in graph.initializer}
    nodes = []
    for node in graph.node:
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
        if node.op_type != "Gemm" or not plain or node.input[1] not in weights:
            nodes.append(node)
            continue
        weight = node.input[1]
        if given.get("transB", 0):
            turned = f"{weight}.turned"
            if turned not in weights:
                value = onnx.numpy_helper.to_array(weights[weight])
                weights[turned] = onnx.numpy_helper.from_array(value.T.copy(), turned)
                graph.initializer.append(weights[turned])
            weight = turned
        bias = node.input[2] if len(node.input) > 2 else ""
        product = f"{node.output[0]}.product" if bias else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], node.name))
        if bias:
            nodes.append(helper.make_node("Add", [product, bias], list(node.output), f"{node.name}.bias"))
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused(graph)


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove initializers that nothing reads, in place."""
    used = {name for part in onnx_file.graphs(graph) for node in part.node for name in node.input}
    used |= {output.name for output in graph.output}
    for initializer in [i for i in graph.initializer if i.name not in used]:
        graph.initializer.remove(initializer)


def without(model: onnx.ModelProto, exclude: set[str], parent: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which the named nodes read what was there before Q/DQ, and pairs that nobody reads are gone.

    A weight that is only in the file as whole numbers, since another node reads it too, comes back from the parent.
    """
    model = copy.deepcopy(model)
    makers = {out: node for node in model.graph.node if node.op_type in QDQ for out in node.output}
    before = {node.name: list(node.input) for node in parent.graph.node}
    held = {i.name for i in model.graph.initializer}
    weights = {i.name: i for i in parent.graph.initializer}
    for node in model.graph.node:
        if node.name not in exclude or node.op_type in QDQ:
            continue
        for index, name in enumerate(node.input):
            if name not in makers:
                continue
            while name in makers:
                name = makers[name].input[0]
            if name in held and name not in weights:
                name = before[node.name][index]
                if name not in held:
                    model.graph.initializer.append(weights[name])
                    held.add(name)
            node.input[index] = name
    for kind in reversed(QDQ):
        used = {name for part in onnx_file.graphs(model.graph) for node in part.node for name in node.input}
        used |= {output.name for output in model.graph.output}
        for node in [n for n in model.graph.node if n.op_type == kind and not used & set(n.output)]:
            model.graph.node.remove(node)
    drop_unused(model.graph)
    return model

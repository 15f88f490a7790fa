"""What ONNX Runtime runs, node by node: from the profile of a run, and from the graph after its optimiser.

The profile tells operator, types and provider of each node. What a node was fused from ONNX Runtime doesn't
record: it is found by the names of tensors and nodes, which its optimiser keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from tasks import onnx_file
from tasks.engines.ort_start import CUDA
from tasks.manifest import Layer

# Products of integers of 8 bits.
INTEGER = {
    "QLinearConv",
    "QLinearMatMul",
    "QGemm",
    "ConvInteger",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "QAttention",
}
# Products with weights only in few bits, by the attribute `bits`.
WEIGHTS_ONLY = {"MatMulNBits", "GatherBlockQuantized"}
FLOAT = {
    "Conv",
    "FusedConv",
    "NhwcConv",
    "NhwcFusedConv",
    "ConvTranspose",
    "Gemm",
    "FusedGemm",
    "GemmFastGelu",
    "GemmFloat8",
    "MatMul",
    "FusedMatMul",
    "FusedMatMulActivation",
    "Einsum",
    "LSTM",
    "GRU",
    "RNN",
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
}
PRODUCTS = INTEGER | FLOAT | {"MatMulNBits"}
PRECISION = {
    "float": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "double": "fp64",
    "int8": "int8",
    "uint8": "int8",
    "int4": "int4",
    "uint4": "int4",
    "float8e4m3fn": "fp8",
    "float8e5m2": "fp8",
}
# What integer and blocked convolutions do in the same kernel, after the sum.
AFTER = {"Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Add", "Sum", "QuantizeLinear"}
# Moves of data that the optimiser puts in; they stand for no node of the source.
MOVES = ("Reorder", "Transpose", "Memcpy")


def read(profile: Path, optimised: onnx.ModelProto, source: onnx.ModelProto, tf32: bool) -> tuple[Layer, ...]:
    """The nodes that ran, in that order, each once; `tf32` says whether FP32 products of the CUDA provider are TF32."""
    fused, bits = fused_from(optimised.graph, source.graph), _bits(optimised)
    ran: dict[str, Layer] = {}
    for event in json.loads(profile.read_text()):
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        name, told = event["name"].removesuffix("_kernel_time"), event["args"]
        device = "cuda" if told["provider"] == CUDA else "cpu"
        kind = told["op_name"]
        found = f"int{bits[name]}" if name in bits else precision(kind, told, tf32 and device == "cuda")
        ran.setdefault(name, Layer(name, kind, found, kind in PRODUCTS, fused.get(name, ()), device))
    return tuple(ran.values())


def precision(kind: str, told: dict[str, Any], tf32: bool) -> str:
    """The precision of a node's arithmetic, by its operator and the types of its inputs.

    A product whose weights are dequantised before it is one of floating point.
    """
    if kind in INTEGER:
        return "int8"
    types = [next(iter(entry), "") for entry in told.get("input_type_shape", [])]
    found = next((PRECISION[name] for name in types if name in PRECISION), "unknown")
    return "tf32" if tf32 and found == "fp32" and kind in PRODUCTS else found


def _bits(model: onnx.ModelProto) -> dict[str, int]:
    """Bits of the weights of products that have only those in integers, by the node's name."""
    return {
        node.name: next((a.i for a in node.attribute if a.name == "bits"), 4)
        for graph in onnx_file.graphs(model.graph)
        for node in graph.node
        if node.op_type in WEIGHTS_ONLY
    }


def fused_from(optimised: onnx.GraphProto, source: onnx.GraphProto) -> dict[str, tuple[str, ...]]:
    """For each optimised node, the nodes of the source that it stands for, as far as names tell.

    A node that gives a tensor of the source stands for what computed it, back to the tensors that other nodes give.
    One that is only named like a node of the source, or like what that gives, as integer and blocked
    convolutions are, stands also for the activation, sum and requantisation after it that no other node stands for.
    """
    giver = {output: index for index, node in enumerate(source.node) for output in node.output if output}
    named = {node.name: index for index, node in enumerate(source.node) if node.name}
    owner: dict[int, str] = {}
    backward, loose = [], set[str]()
    # A blocked convolution adds its fourth input to its result.
    sums = {node.name for node in optimised.node if node.domain.endswith("nchwc") and len(node.input) > 3}
    for node in optimised.node:
        if node.op_type.startswith(MOVES):
            continue
        plain = re.sub(r"(_nchwc)?(_token_\d+)?$", "", node.name)
        exact = [giver[output] for output in node.output if output in giver]
        at = exact or [index for index in (giver.get(plain), named.get(plain)) if index is not None][:1]
        owner |= dict.fromkeys(at, node.name)
        backward += [(index, node.name) for index in at if exact or plain in giver]
        loose |= set() if exact else {node.name}
    for index, node in enumerate(source.node):
        above = [giver[i] for i in node.input if giver.get(i) in owner]
        if node.op_type in ("Add", "Sum"):
            above = [i for i in above if owner[i] in sums] or above
        if index not in owner and above and node.op_type in AFTER and owner[max(above)] in loose:
            owner[index] = owner[max(above)]
    for index, name in backward:
        _claim(source, giver, owner, index, name)
    for index, name in list(owner.items()):
        _claim(source, giver, owner, index, name, ("DequantizeLinear", "QuantizeLinear"))
    found: dict[str, list[str]] = {}
    for index in sorted(owner):
        node = source.node[index]
        if node.op_type != "Constant":
            found.setdefault(owner[index], []).append(node.name or node.output[0])
    return {name: tuple(nodes) for name, nodes in found.items()}


def _claim(
    source: onnx.GraphProto,
    giver: dict[str, int],
    owner: dict[int, str],
    index: int,
    name: str,
    only: Iterable[str] | None = None,
) -> None:
    """Give the nodes above one to `name`, up to those that have an owner, or to those that aren't of `only`."""
    todo = list(_above(source, giver, index))
    while todo:
        at = todo.pop()
        if at not in owner and (only is None or source.node[at].op_type in only):
            owner[at] = name
            todo += _above(source, giver, at)


def _above(source: onnx.GraphProto, giver: dict[str, int], index: int) -> Iterator[int]:
    return (giver[i] for i in source.node[index].input if i in giver)

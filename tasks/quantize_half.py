"""FP16 and BF16 by NVIDIA ModelOpt AutoCast: casts around what stays in FP32; inputs and outputs keep their types.

What is too large for a half float is found on the calibration samples: a node that reads or writes values above
`data_max`, or that has a constant above `init_max`, stays (Micikevicius et al. 2018, arXiv:1710.03740, for why).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tasks import onnx_file
from tasks.calibration_ranges import observe
from tasks.errors import Fault
from tasks.modelopt_child import autocast
from tasks.quantize_nodes import Maker, kept, prepared
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import Arrays

HALF = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
BF16 = TensorProto.BFLOAT16


def maker(model: onnx.ModelProto, scratch: Path, inputs: Arrays, params: QuantizeParams) -> Maker:
    """A maker of files in `params.format` fp16 or bf16."""
    ready = prepared(model)
    alone = kept(ready, params.keep, params.keep_ops)
    names = [n for node in ready.graph.node for n in (*node.input, *node.output) if n]
    values = observe(ready, names, inputs, params.batch, "minmax")
    # Written so that NaN counts as too large.
    large = {n: v.largest for n, v in values.items() if not v.largest <= params.data_max}
    constants = onnx_file.constants(ready.graph)
    reasons = dict(alone)
    for node in ready.graph.node:
        held = [large[n] for n in (*node.input, *node.output) if n in large]
        weights = [constants[n] for n in node.input if n in constants and constants[n].dtype == np.float32]
        biggest = max((float(np.abs(w).max()) for w in weights if w.size), default=0.0)
        if held:
            reasons.setdefault(node.name, f"data_max: its values reach {max(held):.4g}")
        elif biggest > params.init_max:
            reasons.setdefault(node.name, f"init_max: a constant of it reaches {biggest:.4g}")

    def make(exclude: tuple[str, ...]) -> onnx.ModelProto:
        return autocast(ready, params.format, scratch, [*alone, *exclude], list(large), params.init_max)

    return Maker([node.name for node in ready.graph.node if node.name not in reasons], make, reasons)


def converted(model: onnx.ModelProto, kind: str) -> int:
    """How many nodes of a file compute in fp16 or bf16 (`kind`), casts aside; Fault if none does."""
    halves = _typed(model, HALF[kind])
    count = sum(n.op_type not in ("Cast", "Constant") and bool(halves & set(n.output)) for n in model.graph.node)
    if not count:
        raise Fault(
            "nothing was converted",
            got=f"no node in {kind}",
            expected="at least one",
            do="raise quantize.*.data_max and init_max, or take patterns out of keep and keep_ops",
        )
    return count


def _typed(model: onnx.ModelProto, kind: int) -> set[str]:
    """Names of the values of an element type, as ONNX infers them."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    return {v.name for v in values if v.type.tensor_type.elem_type == kind}


def rounded_to_bf16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A BF16 file as one in FP32 whose values are rounded to BF16 wherever the file's are.

    For runtimes whose CPU provider has no BF16 arithmetic: each operator sums in FP32, as tensor cores do, and
    its result is rounded. It says what a file computes, and nothing of its speed.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    halves = _typed(made, BF16)
    graph = made.graph
    for initializer in graph.initializer:
        _widen(initializer)
    nodes = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t)
        target = helper.get_node_attr_value(node, "to") if node.op_type == "Cast" else None
        rounds = [n for n in node.output if n in halves]
        for index, name in enumerate(node.output):
            if name in rounds and target is None:
                node.output[index] = f"{name}.wide"
        if target == BF16:
            name = node.output[0]
            node.output[0] = f"{name}.narrow"
            nodes += [node, helper.make_node("Cast", [f"{name}.narrow"], [name], to=TensorProto.FLOAT)]
            continue
        nodes.append(node)
        for name in rounds:
            nodes.append(helper.make_node("Cast", [f"{name}.wide"], [f"{name}.narrow"], to=BF16))
            nodes.append(helper.make_node("Cast", [f"{name}.narrow"], [name], to=TensorProto.FLOAT))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return made


def _widen(tensor: TensorProto) -> None:
    """Make a BF16 constant one in FP32, in place; no value changes."""
    if tensor.data_type == BF16:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))

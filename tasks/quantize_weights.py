"""INT4 weights only: blocks of a product's weight share a scale, activations stay in floating point.

Round to nearest, symmetric, blocks along the inputs (as in Frantar et al. 2023, arXiv:2210.17323, for its baseline),
held as ONNX DequantizeLinear with `block_size` (opset 21), which TensorRT reads and ONNX Runtime fuses with the
product.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
from ml_dtypes import int4
from onnx import helper, numpy_helper, version_converter

from tasks import onnx_file
from tasks.errors import Fault
from tasks.quantize_nodes import Maker, drop_unused, gemm_to_matmul, kept, prepared
from tasks.settings import QuantizeParams

OPSET = 21
IR = 10
LEVEL = 7


def maker(model: onnx.ModelProto, params: QuantizeParams) -> Maker:
    """A maker of files whose products have weights in blocks of `params.block` 4-bit integers.

    Products of two computed values, and those whose inputs aren't a multiple of the block, are left alone and
    told. Gemm becomes MatMul and Add, so that blocks lie along axis 0. Raises Fault if no product is left.
    """
    ready = _upgraded(prepared(model))
    onnx_file.fold_transposes(ready.graph)
    alone = kept(ready, params.keep, params.keep_ops)
    gemm_to_matmul(ready.graph)
    shapes = {i.name: tuple(i.dims) for i in ready.graph.initializer}
    fits: dict[str, str] = {}
    for node in ready.graph.node:
        if node.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU") and node.name not in alone:
            if reason := _unfit(node, shapes, params.block):
                alone[node.name] = reason
            else:
                fits[node.name] = node.input[1]
    if not fits:
        raise Fault(
            "nothing was quantised",
            got="; ".join(f"{name}: {why}" for name, why in list(alone.items())[:5]) or "no matrix product",
            expected=f"a matrix product with a constant weight whose inputs are a multiple of {params.block}",
            do="lower quantize.*.block (16, 32, 64 or 128)",
        )

    def make(exclude: tuple[str, ...]) -> onnx.ModelProto:
        return _quantised(ready, {n: w for n, w in fits.items() if n not in exclude}, params.block)

    return Maker(list(fits), make, alone)


def _upgraded(model: onnx.ModelProto) -> onnx.ModelProto:
    if onnx_file.opset(model) >= OPSET:
        return model
    try:
        return version_converter.convert_version(model, OPSET)
    except Exception as error:
        raise Fault(
            f"the model can't be brought to opset {OPSET}",
            got=" ".join(str(error).split())[:300],
            expected="operators that ONNX's converter knows",
            do=f"export it with opset: {OPSET}",
        ) from error


def _unfit(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]], block: int) -> str | None:
    """Why a product's weight can't be held in blocks, or None."""
    if node.op_type != "MatMul":
        return f"{node.op_type} has no form with blocks of 4 bits"
    shape = shapes.get(node.input[1])
    if shape is None or len(shape) != 2:
        return "it has no constant weight of two axes"
    return f"it has {shape[0]} inputs: not a multiple of {block}" if shape[0] % block else None


def _quantised(model: onnx.ModelProto, weights: dict[str, str], block: int) -> onnx.ModelProto:
    """The model with each weight of `weights` (by node) as 4-bit blocks and a DequantizeLinear."""
    made = copy.deepcopy(model)
    made.ir_version = max(made.ir_version, IR)
    arrays = {i.name: numpy_helper.to_array(i) for i in made.graph.initializer if i.name in weights.values()}
    heads = []
    for name, weight in arrays.items():
        whole, scale = blocks(weight, block)
        made.graph.initializer.append(numpy_helper.from_array(whole.astype(int4), f"{name}.int4"))
        made.graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scales"))
        heads.append(
            helper.make_node(
                "DequantizeLinear",
                [f"{name}.int4", f"{name}.scales"],
                [f"{name}.dequantized"],
                f"{name}.dequantize",
                axis=0,
                block_size=block,
            )
        )
    for node in made.graph.node:
        if node.name in weights:
            node.input[1] = f"{weights[node.name]}.dequantized"
    nodes = [*heads, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    drop_unused(made.graph)
    return made


def blocks(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers -7 … 7 [inputs, outputs] of a weight, and scales [inputs / block, outputs], 1 where all is 0."""
    inputs, outputs = weight.shape
    parts = weight.reshape(inputs // block, block, outputs)
    scale = np.abs(parts).max(axis=1) / LEVEL
    scale = np.where(scale > 0, scale, 1).astype(weight.dtype)
    whole = np.clip(np.round(parts / scale[:, None]), -LEVEL, LEVEL)
    return whole.reshape(inputs, outputs).astype(np.int8), scale

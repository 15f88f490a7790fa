"""INT8 for ONNX Runtime: static, with Q/DQ nodes, or dynamic, with integer products.

Static: unsigned activations, signed per-channel weights of reduced range (7 bits), which do not saturate on CPUs
without VNNI. Both inputs of a residual add have Q/DQ: they are outputs or inputs of quantised layers.
Dynamic: the runtime finds each batch's own ranges, and the results depend on the batch.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path

import numpy as np
import onnx

from tasks import onnx_file
from tasks.calibration import check_ranges
from tasks.calibration_ranges import Grid, choose, observe
from tasks.quantize_nodes import QDQ, Maker, gemm_to_matmul, kept, prepared, without
from tasks.quiet import quiet
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import Arrays

DYNAMIC = ("MatMul", "Gemm", "LSTM", "Gather")
# These move values or cut them off; whether they are quantised makes no difference of their own.
MOVING = (
    *("Clip", "Gather", "GatherElements", "MaxPool", "Pad", "Relu", "Reshape", "Resize", "Slice", "Split"),
    *("Squeeze", "TopK", "Transpose", "Unsqueeze", "Where"),
)


def static(model: onnx.ModelProto, scratch: Path, inputs: Arrays, params: QuantizeParams) -> Maker:
    """A maker of files in ONNX Runtime's style; Fault if a range that is used is not finite, naming its tensor."""
    from onnxruntime.quantization.registry import QDQRegistry

    ready = _preprocessed(prepared(model), scratch)
    alone = kept(ready, params.keep, params.keep_ops)
    values = observe(ready, _tensors(ready, set(QDQRegistry)), inputs, params.batch, params.calibration)
    ranges = {n: choose(v, params.calibration, Grid("uint8"), params.percentile) for n, v in values.items()}

    def make(exclude: tuple[str, ...]) -> onnx.ModelProto:
        left = {*alone, *exclude}
        # The quantiser gives a tensor's pair to all its readers, also to those that are left alone.
        made = without(_quantised(ready, ranges, list(left), list(QDQRegistry)), left, ready)
        read = {node.input[0] for node in made.graph.node if node.op_type == "QuantizeLinear"}
        check_ranges({name: found for name, found in ranges.items() if name in read})
        return made

    whole = make(())
    quantised = {out for node in whole.graph.node if node.op_type == "DequantizeLinear" for out in node.output}
    nodes = [
        node.name
        for node in whole.graph.node
        if node.op_type not in (*MOVING, *QDQ) and quantised & set(node.input) and node.op_type in QDQRegistry
    ]
    return Maker([n for n in nodes if n not in alone], make, alone)


def dynamic(model: onnx.ModelProto, params: QuantizeParams) -> Maker:
    """A maker of files whose products with constant weights are integer ones, weights signed, per channel, of 7 bits.

    Tables that are only looked up have 8 bits.
    """
    ready = prepared(model)
    # What the exporter noted of shapes doesn't hold once Gemm is MatMul.
    del ready.graph.value_info[:]
    onnx_file.fold_transposes(ready.graph)
    alone = kept(ready, params.keep, params.keep_ops)
    gemm_to_matmul(ready.graph)
    constants = {i.name for i in ready.graph.initializer}
    nodes = [
        n.name for n in ready.graph.node if n.op_type in DYNAMIC and constants & set(n.input) and n.name not in alone
    ]
    return Maker(nodes, lambda exclude: _dynamically(ready, [*alone, *exclude]), alone)


def _dynamically(model: onnx.ModelProto, exclude: list[str]) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as scratch, quiet():
        path = Path(scratch) / onnx_file.FILE
        quantize_dynamic(
            copy.deepcopy(model),
            path,
            op_types_to_quantize=list(DYNAMIC),
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=exclude,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(path)


def _preprocessed(model: onnx.ModelProto, scratch: Path) -> onnx.ModelProto:
    """The model with its constants folded, for the quantiser; a product that took its bias in keeps its name."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    before, after = scratch / "named.onnx", scratch / "preprocessed.onnx"
    before.write_bytes(onnx_file.serialized(model, "the model"))
    with quiet():
        quant_pre_process(before, after, skip_symbolic_shape=True)
    ready = prepared(onnx.load(after))
    taken = {node.name for node in ready.graph.node}
    for node in ready.graph.node:
        own = re.sub(r"/\w+Fusion\w*/?$", "", node.name)
        if own not in taken:
            node.name = own
            taken.add(own)
    return ready


def _tensors(model: onnx.ModelProto, kinds: set[str]) -> list[str]:
    """Tensors that quantisable nodes read or write, without constants."""
    constants = onnx_file.constants(model.graph)
    names = [n for node in model.graph.node if node.op_type in kinds for n in (*node.input, *node.output)]
    return [n for n in dict.fromkeys(names) if n and n not in constants]


def _quantised(
    model: onnx.ModelProto, ranges: dict[str, tuple[float, float]], exclude: list[str], kinds: list[str]
) -> onnx.ModelProto:
    """The model with Q/DQ nodes; a range that is not finite stands as [0, 1], and must not be used."""
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    usable = {n: r if np.isfinite(r).all() else (0.0, 1.0) for n, r in ranges.items()}
    data = {n: (np.array(low, np.float32), np.array(high, np.float32)) for n, (low, high) in usable.items()}
    with quiet():
        quantizer = QDQQuantizer(
            copy.deepcopy(model),
            per_channel=True,
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, data),
            nodes_to_quantize=[],
            nodes_to_exclude=exclude,
            op_types_to_quantize=kinds,
            extra_options={},
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    made: onnx.ModelProto = quantizer.model.model
    return made

"""ONNX with Q/DQ nodes from a model with fake quantisers.

Weights are stored as the INT8 numbers they are; activations pass a QuantizeLinear and a
DequantizeLinear each. Style `tensorrt` keeps everything signed and symmetric, and the bias in
floating point, as TensorRT wants and ONNX Runtime takes. Style `onnxruntime` says the same
numbers in the words that its CPU kernels are fast at: unsigned activations, an INT32 bias.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import torch
from torch import nn

from tasks import fake_quant, fit, onnx_file
from tasks.errors import Fault
from tasks.settings import ExportParams
from tasks.workloads.protocol import Workload, example

MAX_OPSET = 20
MIDDLE = 128


def to_qdq(
    model: nn.Module, task: Workload, path: Path, params: ExportParams, style: str, notes: dict[str, str] | None = None
) -> None:
    """Export a fake-quantised model in eval mode, with a free batch and the workload's dynamic axis.

    The model stays as it is, and equal models give equal bytes. Raises Fault above opset 20, which
    the exporter that knows ModelOpt's quantisers doesn't write.
    """
    if params.opset > MAX_OPSET:
        raise Fault(
            "no such opset for a model of qat", got=params.opset, expected="18 to 20", do="lower export.*.opset"
        )
    inputs = fit.tensors(example(task, 2))
    free: dict[str, dict[int, str]] = {name: {0: "batch"} for name in task.OUTPUTS}
    for name, (_, shape) in task.INPUTS.items():
        free[name] = {0: "batch", **{i: e for i, e in enumerate(shape, 1) if isinstance(e, str)}}
    twin = copy.deepcopy(model).eval()
    fake_quant.bound_biases(twin)  # Training may have moved biases far from where calibration saw them.
    _as_8_bit(twin)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # ModelOpt's checks of ranges are no part of the graph.
        torch.onnx.export(
            twin,
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=list(task.OUTPUTS),
            dynamic_axes=free,
            opset_version=params.opset,
            dynamo=False,
        )
    proto = rewrite(onnx.load(path), style)
    for node in proto.graph.node:
        node.doc_string = ""
    onnx_file.annotate(proto, notes or {})
    onnx_file.save(proto, path, params.external_data)


@torch.no_grad()
def _as_8_bit(model: nn.Module) -> None:
    """Cut weights off where their quantiser does, and write a quantiser of fewer bits as one of 8 with its step."""
    for name, quantizer in fake_quant.quantizers(model).items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight_quantizer":
            bound = quantizer.maxbound
            weight = model.get_submodule(layer)._parameters["weight"]
            assert weight is not None
            weight.copy_(torch.clamp(weight, -quantizer.amax * (bound + 1) / bound, quantizer.amax))
            quantizer.num_bits = 8
            quantizer.amax = quantizer.amax * (quantizer.maxbound / bound)


def rewrite(proto: onnx.ModelProto, style: str) -> onnx.ModelProto:
    """Weights as integers, one Q/DQ pair for each tensor and scale, and the style's types."""
    graph = gs.import_onnx(proto)
    for node in reversed(graph.nodes):
        if node.op == "Constant":
            node.outputs[0].to_constant(node.attrs["value"].values)
            node.outputs.clear()
        elif node.op == "Cast" and "_quantizer/" in node.name:
            # ModelOpt casts to float what is float already, where tracing hides its type.
            _take_over(node.outputs[0], node.inputs[0])
            node.inputs.clear()
    graph.cleanup().toposort()
    _integer_weights(graph)
    _merge_pairs(graph)
    if style == "onnxruntime":
        _unsigned_activations(graph)
        _integer_biases(graph)
    return gs.export_onnx(graph.cleanup().toposort())


def _integer_weights(graph: gs.Graph) -> None:
    """Replace QuantizeLinear of a constant by its result; a transposed copy is stored transposed."""
    stored: dict[tuple[str, bytes, bool], gs.Constant] = {}
    for node in [n for n in graph.nodes if n.op == "DequantizeLinear"]:
        source = node.i().inputs[0]
        if not isinstance(source, gs.Constant):
            continue
        scale, axis = node.inputs[1].values, int(node.attrs.get("axis", 1))
        spread = scale.reshape([-1 if i == axis else 1 for i in range(source.values.ndim)])
        readers = node.outputs[0].outputs
        turned = len(readers) == 1 and readers[0].op == "Transpose" and source.values.ndim == 2
        key = (source.name, scale.tobytes(), turned)
        if key not in stored:
            numbers = np.clip(np.rint(source.values / spread), -MIDDLE, MIDDLE - 1).astype(np.int8)
            name = f"{source.name}_int8{'_transposed' if turned else ''}"
            stored[key] = gs.Constant(name, np.ascontiguousarray(numbers.T if turned else numbers))
        node.inputs[0] = stored[key]
        if turned:
            node.attrs["axis"] = 1 - axis
            _take_over(readers[0].outputs[0], node.outputs[0])


def _merge_pairs(graph: gs.Graph) -> None:
    """Keep one of several Q/DQ pairs that make the same of the same tensor."""
    first: dict[tuple[str, bytes, str], gs.Node] = {}
    for node in [n for n in graph.nodes if n.op == "QuantizeLinear"]:
        key = (node.inputs[0].name, node.inputs[1].values.tobytes(), str(node.inputs[2].values.dtype))
        kept = first.setdefault(key, node)
        if kept is not node:
            for reader in list(node.outputs[0].outputs):
                _take_over(reader.outputs[0], kept.outputs[0].outputs[0].outputs[0])


def _take_over(old: gs.Tensor, new: gs.Tensor) -> None:
    """All that read `old` read `new`."""
    for reader in list(old.outputs):
        reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]


def _unsigned_activations(graph: gs.Graph) -> None:
    """A signed number plus 128 is an unsigned one whose zero is 128: the same scale, the same value."""
    for node in graph.nodes:
        if node.op == "QuantizeLinear" and node.inputs[2].values.dtype == np.int8:
            middle = gs.Constant(f"{node.inputs[2].name}_unsigned", np.array(MIDDLE, np.uint8))
            for other in (node, *node.outputs[0].outputs):
                other.inputs[2] = middle
            node.outputs[0].dtype = np.uint8


def _integer_biases(graph: gs.Graph) -> None:
    """Biases in INT32, in units of input scale times weight scale, which integer kernels add as they are.

    Raises Fault if one doesn't fit.
    """
    for node in [n for n in graph.nodes if n.op in ("Conv", "ConvTranspose", "Gemm")]:
        if len(node.inputs) < 3 or not isinstance(node.inputs[2], gs.Constant):
            continue
        makers = [tensor.inputs[0] for tensor in node.inputs[:2] if tensor.inputs]
        if [maker.op for maker in makers] != ["DequantizeLinear"] * 2:
            continue
        bias: gs.Constant = node.inputs[2]
        scale = (makers[0].inputs[1].values * makers[1].inputs[1].values).astype(np.float32).reshape(-1)
        scale = np.broadcast_to(scale, bias.values.shape).copy()
        numbers = np.rint(bias.values.astype(np.float64) / scale)
        if not (np.abs(numbers) <= np.iinfo(np.int32).max).all():
            raise Fault(
                f"bias {bias.name} doesn't fit 32 bits",
                got=f"{np.abs(numbers).max():.3g} steps of input times weight",
                expected=f"at most {np.iinfo(np.int32).max}",
                do="calibrate on more samples, or use style: tensorrt, whose biases are floating point",
            )
        output = gs.Variable(f"{bias.name}_dequantized", np.float32, bias.values.shape)
        inputs: list[Any] = [gs.Constant(f"{bias.name}_{node.name}_int32", numbers.astype(np.int32))]
        inputs += [gs.Constant(f"{bias.name}_{node.name}_scale", scale)]
        inputs += [gs.Constant(f"{bias.name}_{node.name}_zero", np.zeros(scale.shape, np.int32))]
        graph.nodes.append(gs.Node("DequantizeLinear", f"{node.name}_bias", {"axis": 0}, inputs, [output]))
        node.inputs[2] = output

"""INT8 and FP8 for TensorRT: symmetric, signed, per-channel weights, no quantised bias.

NVIDIA ModelOpt places the Q/DQ nodes so that TensorRT can fuse: the shortcut of a residual add has them, the
branch that ends in a convolution fuses without. The scales of activations are set from our own ranges of the
parent's tensors, so that every calibration is there, and is one pass over the samples however often a model is made.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tasks import onnx_file
from tasks.calibration import check_ranges
from tasks.calibration_ranges import Grid, Range, choose, observe
from tasks.errors import Fault
from tasks.modelopt_child import place
from tasks.quantize_nodes import QDQ, Maker, kept, prepared, without
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import Arrays

LARGEST = {"int8": 127.0, "fp8": 448.0}


def maker(model: onnx.ModelProto, scratch: Path, inputs: Arrays, params: QuantizeParams) -> Maker:
    """A maker of files in TensorRT's style, of `params.format` int8 or fp8.

    Raises Fault if ModelOpt quantises nothing or reads a tensor that the parent doesn't have, or a range that is used
    isn't finite.
    """
    ready = prepared(model)
    onnx_file.fold_transposes(ready.graph)
    alone = kept(ready, params.keep, params.keep_ops)
    batch = {name: np.resize(value, (params.batch, *value.shape[1:])) for name, value in inputs.items()}
    try:
        placed = place(ready, params.format, scratch, batch)
    except Fault:
        # A range without end makes ModelOpt fail without the tensor's name.
        every = [name for node in ready.graph.node for name in node.output]
        check_ranges({n: (v.low, v.high) for n, v in observe(ready, every, batch, params.batch, "minmax").items()})
        raise
    names = list(_scales(placed))
    _check_known(names, ready)
    used = _scales(without(placed, set(alone), ready)) if alone else names
    values = observe(ready, names, inputs, params.batch, params.calibration)
    grid = Grid(params.format)
    ranges = {n: choose(v, params.calibration, grid, params.percentile) for n, v in values.items()}
    check_ranges({n: r for n, r in ranges.items() if n in used})
    ranges = {n: r if np.isfinite(r).all() else (0.0, 0.0) for n, r in ranges.items()}
    set_scales(placed, ranges, LARGEST[params.format])
    made = {out for n in placed.graph.node if n.op_type == "DequantizeLinear" for out in n.output}
    nodes = [n.name for n in placed.graph.node if n.op_type not in QDQ and made & set(n.input)]

    def make(exclude: tuple[str, ...]) -> onnx.ModelProto:
        return without(placed, {*alone, *exclude}, ready)

    return Maker([n for n in nodes if n not in alone], make, alone)


def _scales(model: onnx.ModelProto) -> dict[str, str]:
    """Names of the activations that are quantised, and of their scales."""
    constants = onnx_file.constants(model.graph)
    pairs = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in constants]
    return {node.input[0]: node.input[1] for node in pairs}


def _check_known(names: list[str], parent: onnx.ModelProto) -> None:
    known = {out for node in parent.graph.node for out in node.output} | {i.name for i in parent.graph.input}
    if not names:
        raise Fault(
            "nothing was quantised",
            got="ModelOpt placed no Q/DQ nodes",
            expected="at least one pair",
            do="check that the model has convolutions or matrix products of at least 16 channels: smaller ones "
            "it leaves alone, since they don't get faster",
        )
    if strange := sorted(set(names) - known):
        raise Fault(
            "ModelOpt quantises a tensor that the parent doesn't have",
            got=", ".join(strange[:5]),
            expected="tensors of the file that it was given",
            do="name the operator that it rewrote in quantize.*.keep_ops",
        )


def set_scales(model: onnx.ModelProto, ranges: dict[str, Range], largest: float) -> None:
    """Set the scale of every quantised activation to its range [-t, t] over `largest`, in place.

    Tensors that share a scale share the largest range; so do the parts of a Concat whose scales were equal,
    which TensorRT moves through it. A tensor of zeros has a scale of 1.
    """
    scales = _scales(model)
    constants = onnx_file.constants(model.graph)
    groups = {name: {name} for name in scales}

    def join(names: list[str]) -> None:
        whole = set().union(*(groups[n] for n in names))
        groups.update(dict.fromkeys(whole, whole))

    by_scale: dict[str, list[str]] = {}
    for name, scale in scales.items():
        by_scale.setdefault(scale, []).append(name)
    for names in by_scale.values():
        join(names)
    for node in model.graph.node:
        if node.op_type == "Concat":
            parts = [_origin(model, name) for name in (*node.input, *node.output)]
            equal: dict[float, list[str]] = {}
            for part in dict.fromkeys(p for p in parts if p in scales):
                equal.setdefault(float(constants[scales[part]]), []).append(part)
            for same in equal.values():
                join(same)
    new = {}
    for name, scale in scales.items():
        top = max(max(abs(end) for end in ranges[member]) for member in groups[name])
        new[scale] = np.array(top / largest if top > 0 else 1.0, constants[scale].dtype).reshape(constants[scale].shape)
    for initializer in model.graph.initializer:
        if initializer.name in new:
            initializer.CopyFrom(numpy_helper.from_array(new[initializer.name], initializer.name))
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] in new:
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(new[node.output[0]], node.output[0]))


def _origin(model: onnx.ModelProto, name: str) -> str:
    """The tensor that a dequantised one was."""
    makers = {out: node for node in model.graph.node if node.op_type in QDQ for out in node.output}
    while name in makers:
        name = makers[name].input[0]
    return name

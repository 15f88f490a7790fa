"""Which layers a TensorRT engine really runs, in which precision, fused from what.

Three sources, the best that is to be had: the engine inspector's JSON (needs the GPU), the same in the builder's own
log (one line a layer; ahead-of-time builds have it without a GPU), or the network before any fusion.
Manual: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/advanced.html, engine inspector.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

from tasks.errors import Fault
from tasks.manifest import Layer

INSPECTOR, LOG, NETWORK = "the engine inspector", "the builder's log", "the network before fusion"
# No work of their own: sizes, and the order between streams.
NOT_KERNELS = {"shape_call", "signal", "wait", "NoOp"}
PRODUCT = re.compile(r"conv|correlation|gemm|matrix_?mul|matmul|einsum|mha|attention", re.I)
# Generated kernels are named by what they compute, in order: __myl_MulFcAdd_….
GENERATED = re.compile(r"__myl_[A-Za-z]*?(Fc|Gemm|Conv|Corr|Mha|Dot|BatchMm|Mm)(?=[A-Z_])")
# Longer words first: BFloat16 holds Float, E4M3 is FP8's.
TYPES = (
    ("bf16", r"bf16|bfloat16"),
    ("fp8", r"fp8|float8|e4m3"),
    ("int8", r"int8"),
    ("int4", r"int4|fp4"),
    ("fp16", r"fp16|half|float16"),
    ("fp32", r"fp32|float"),
)
# A list of tensors is empty or ends with a brace; other lists stand inside.
ONE_LINE = re.compile(
    r"Name: (?P<Name>.*?), LayerType: (?P<LayerType>[^,]*), Inputs: \[(?P<Inputs>|.*?\})\]"
    r"(?:, Constants: \[(?P<Constants>|.*?\})\])?, Outputs: \[(?P<Outputs>|.*?\})\](?=,|$)(?P<rest>.*)"
)
TENSOR = re.compile(r"Dimensions: \[(?P<Dimensions>[-\d,]*)\].*?(?P<key>(?:Format/)?Datatype): (?P<Datatype>[^,}]+)")


def of_json(text: str) -> tuple[Layer, ...]:
    """The layers of `EngineInspector.get_engine_information(LayerInformationFormat.JSON)`.

    An engine built without detailed verbosity tells names only. Raises Fault for what isn't the inspector's JSON.
    """
    try:
        found = json.loads(text)["Layers"]
        plain = [{"Name": layer} if isinstance(layer, str) else dict(layer) for layer in found]
        return tuple(_layer(layer) for layer in plain if layer.get("LayerType") not in NOT_KERNELS)
    except (ValueError, KeyError, TypeError) as error:
        raise Fault(
            "not what TensorRT's engine inspector writes",
            got=f"{type(error).__name__}: {error}; {text[:80]!r}",
            expected='JSON with a list of "Layers"',
            do="report the version of TensorRT",
        ) from None


def of_log(text: str, tf32: bool = False) -> tuple[Layer, ...]:
    """The layers of the message "Layers:" that the builder logs at the end; none if there was none.

    With `tf32`, where the builder may choose it, a product in FP32 whose kernel isn't chosen yet is of unknown
    precision.
    """
    layers = []
    for line in text.splitlines():
        match = ONE_LINE.match(line)
        if match and match["LayerType"] not in NOT_KERNELS:
            rest = match["rest"]
            layer: dict[str, Any] = {"Name": match["Name"], "LayerType": match["LayerType"]}
            for key in ("Inputs", "Constants", "Outputs"):
                layer[key] = [
                    {"Dimensions": [int(d) for d in t["Dimensions"].split(",") if d], "Datatype": t["Datatype"].strip()}
                    for t in TENSOR.finditer(match[key] or "")
                ]
            for key in ("ParameterType", "TacticName", "HasSparseWeights"):
                if found := re.search(rf"\b{key}: ([^,]*)", rest):
                    layer[key] = found[1]
            if found := re.search(r'Weights: \{"Type": "(\w+)"', rest):
                layer["Weights"] = {"Type": found[1]}
            layer["Metadata"] = rest.partition("Metadata: ")[2]
            told = _layer(layer)
            open_ = tf32 and told.product and told.precision == "fp32" and not _named(layer.get("TacticName", ""))
            layers.append(dataclasses.replace(told, precision="unknown") if open_ else told)
    return tuple(layers)


def of_network(trt: Any, network: Any) -> tuple[Layer, ...]:
    """The layers of a strongly typed network, each with the precision that its types ask for, before any fusion."""
    made_by = {}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        for i in range(layer.num_outputs):
            if (output := layer.get_output(i)) is not None:
                made_by[output.name] = layer
    return tuple(_of_network(trt, layer, made_by) for layer in layers)


def _of_network(trt: Any, layer: Any, made_by: dict[str, Any]) -> Layer:
    kind = layer.type.name
    product = bool(PRODUCT.search(kind))
    operands = [t for i in range(layer.num_inputs) if (t := layer.get_input(i)) is not None]
    types = [_stored(trt, t, made_by) for t in operands[:2]]
    output = layer.get_output(0)
    if product and types:
        precision = _product(types[0], types[-1])
    else:
        precision = precision_of(output.dtype.name) if output is not None else "unknown"
    return Layer(layer.name, kind, precision, product, _onnx_nodes(layer.metadata) or ())


def _stored(trt: Any, tensor: Any, made_by: dict[str, Any]) -> str:
    """The precision in which an operand is stored: that before its DequantizeLinear, if it has one."""
    layer = made_by.get(tensor.name)
    while layer is not None and layer.type == trt.LayerType.SHUFFLE and layer.get_input(0) is not None:
        layer = made_by.get(layer.get_input(0).name)
    if layer is not None and layer.type == trt.LayerType.DEQUANTIZE:
        return precision_of(layer.get_input(0).dtype.name)
    return precision_of(tensor.dtype.name)


def precision_of(words: str) -> str:
    """The precision that TensorRT's words for a type or format name, "unknown" for one of none (indices, conditions).

    The words differ by version: "Half", "FP16", "Row major linear FP16 format", "Four wide channel … Int8 format".
    """
    low = words.lower()
    return next((name for name, pattern in TYPES if re.search(pattern, low)), "unknown")


def _layer(raw: dict[str, Any]) -> Layer:
    name, kind, tactic = raw["Name"], raw.get("LayerType", "unknown"), raw.get("TacticName") or ""
    words = " ".join((kind, str(raw.get("ParameterType", "")), tactic if "__myl_" not in tactic else ""))
    product = bool(PRODUCT.search(words) or GENERATED.search(name) or GENERATED.search(tactic) or "_mha" in name)
    precision = _precision(raw, tactic) if product else _first([*raw.get("Outputs", ()), *raw.get("Inputs", ())])
    nodes = _onnx_nodes(raw.get("Metadata") or "") or (tuple(name.split(" + ")) if " + " in name else ())
    sparse = bool(re.search(r"spars|sptensor|spmma", tactic.lower())) if product and _named(tactic) else None
    return Layer(name, kind, precision, product, nodes, "cuda", sparse)


def _precision(raw: dict[str, Any], tactic: str) -> str:
    """Of a product: by what it multiplies, its first input and its weight; TF32 is told by the kernel's name only."""
    inputs = [precision_of(_words(t)) for t in raw.get("Inputs", ())]
    constants = sorted(raw.get("Constants", ()), key=lambda t: math.prod(t.get("Dimensions", [0])), reverse=True)
    activation = next((p for p in inputs if p != "unknown"), "unknown")
    if isinstance(raw.get("Weights"), dict):
        weight = precision_of(str(raw["Weights"].get("Type", "")))
    elif constants:
        weight = precision_of(_words(constants[0]))
    else:
        weight = next((p for p in inputs[1:] if p != "unknown"), activation)
    found = _product(activation, weight)
    return "tf32" if found == "fp32" and "tf32" in tactic.lower() else found


def _product(activation: str, weight: str) -> str:
    """Equal types, or weights only in four bits; else the activations' arithmetic, to which the weights are brought."""
    return "int4" if weight == "int4" else activation if activation != "unknown" else weight


def _first(tensors: list[dict[str, Any]]) -> str:
    return next((p for t in tensors if (p := precision_of(_words(t))) != "unknown"), "unknown")


def _words(tensor: dict[str, Any]) -> str:
    return str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "")


def _named(tactic: str) -> bool:
    """Whether a kernel is chosen already: one compiled at run time has a placeholder."""
    return bool(tactic) and not tactic.endswith("_STUB")


def _onnx_nodes(metadata: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"\[ONNX Layer: (.*?)\]", metadata)))

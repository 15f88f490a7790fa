"""What TensorRT says of its engines: the inspector's JSON of its versions, the builder's log, and the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks import layers as told
from tasks.engines import trt_layers
from tasks.errors import Fault


def tensor(words: str, *dimensions: int, key: str = "Format/Datatype") -> dict[str, Any]:
    return {"Name": "t", "Location": "Device", "Dimensions": list(dimensions), key: words}


def written(*layers: Any) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": ["image", "logits"]})


# As TensorRT 8.6 to 10 write it: one field for format and type, fusions joined by " + " and in the metadata.
CONVOLUTION = {
    "Name": "conv1.weight + QuantizeLinear_7 + Conv_9 + Relu_10",
    "LayerType": "CaskConvolution",
    "Inputs": [tensor("Four wide channel vectorized row major Int8 format", 32, 3, 224, 224)],
    "Outputs": [tensor("Thirty-two wide channel vectorized row major FP16 format", 32, 64, 112, 112)],
    "ParameterType": "Convolution",
    "Kernel": [7, 7],
    "Weights": {"Type": "Int8", "Count": 9408},
    "Bias": {"Type": "Float", "Count": 64},
    "HasSparseWeights": 0,
    "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8f16_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32",
    "TacticValue": "0xb29abdd00304c881",
    "StreamId": 0,
    "Metadata": "[ONNX Layer: conv1/Conv]\x1e[ONNX Layer: relu/Relu]",
}
POOLING = {
    "Name": "MaxPool_12",
    "LayerType": "TiledPooling",
    "Inputs": [tensor("Row major linear FP32", 32, 64, 112, 112)],
    "Outputs": [tensor("Row major linear FP32", 32, 64, 56, 56)],
    "ParameterType": "Pooling",
    "TacticValue": "0x0000000000270101",
}
# As TensorRT 10 writes what its graph compiler made.
GEMM = {
    "Name": "/classifier/Gemm_myl9_4",
    "LayerType": "gemm",
    "Inputs": [tensor("Half", 1, 4096), tensor("Half", 4096, 1000), tensor("Float", 1), tensor("Float", 1)],
    "Outputs": [tensor("Half", 1, 1000)],
    "TacticName": "sm50_xmma_cublas_gemvx_f16f16_f32_f32_tn_n",
    "Metadata": "[ONNX Layer: /classifier/Gemm]",
}


def only(layer: Any) -> Any:
    (found,) = trt_layers.of_json(written(layer))
    return found


def test_a_fused_int8_convolution() -> None:
    found = only(CONVOLUTION)
    assert (found.kind, found.precision, found.product) == ("CaskConvolution", "int8", True)
    assert found.fused_from == ("conv1/Conv", "relu/Relu")
    assert (found.sparse, found.device) == (False, "cuda")


def test_what_it_is_fused_from_is_in_the_name_where_there_is_no_metadata() -> None:
    found = only({key: value for key, value in CONVOLUTION.items() if key != "Metadata"})
    assert found.fused_from == ("conv1.weight", "QuantizeLinear_7", "Conv_9", "Relu_10")


def test_what_is_no_product_has_the_precision_of_what_it_gives() -> None:
    found = only(POOLING)
    assert (found.precision, found.product, found.sparse) == ("fp32", False, None)


def test_a_matrix_product_takes_its_precision_from_its_operands_not_from_scales() -> None:
    assert (only(GEMM).precision, only(GEMM).product) == ("fp16", True)


def test_int8_weights_under_half_precision_activations_are_no_int8_product() -> None:
    layer = {**GEMM, "Inputs": [tensor("Half", 1, 4096)], "Constants": [tensor("Int8", 4096, 1000)]}
    assert only(layer).precision == "fp16"
    assert only({**layer, "Constants": [tensor("Int4", 4096, 1000), tensor("Half", 64, 1000)]}).precision == "int4"


def test_tf32_is_told_from_fp32_by_the_kernel() -> None:
    layer = {**CONVOLUTION, "Inputs": [tensor("Float", 1, 3, 8, 8)], "Weights": {"Type": "Float", "Count": 9}}
    assert only({**layer, "TacticName": "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc"}).precision == "fp32"
    tf32 = only({**layer, "TacticName": "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc"})
    assert tf32.precision == "tf32"
    assert told.not_as_asked("fp32", [tf32]) == "asked for fp32, found in 0 of 1 products (1 tf32)"


def test_a_sparse_kernel_is_told_by_its_name_and_eligible_weights_are_not_enough() -> None:
    assert only({**CONVOLUTION, "HasSparseWeights": 1}).sparse is False
    sparse = only({**CONVOLUTION, "TacticName": "sm80_xmma_fprop_sparse_conv_interleaved_i8i8_i8i32_f32"})
    assert sparse.sparse is True
    assert told.not_as_asked("int8", [sparse], sparse=True) is None
    assert told.not_as_asked("int8", [only(CONVOLUTION)], sparse=True) == "asked for 2:4 kernels, found none"


def test_a_kernel_that_the_gpu_compiles_later_says_nothing_of_sparsity() -> None:
    assert only({**CONVOLUTION, "TacticName": "__myelin_CASK_STUB"}).sparse is None


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("__myl_MulFcAddRelu_myl0_3", True),
        ("_gemm_mha_v2_myl0_4", True),
        ("__myl_ConvMulAdd_myl0_1", True),
        ("__myl_MulMinMaxRounCast_myl0_1", False),
        ("__myl_ConcTranResh_myl0_2", False),
        ("__myl_SumMulMax_myl0_2", False),
    ],
)
def test_generated_kernels_are_products_by_what_they_compute(name: str, product: bool) -> None:
    layer = {"Name": name, "LayerType": "kgen", "Inputs": [tensor("Half", 1, 8)], "Outputs": [tensor("Half", 1, 8)]}
    assert only({**layer, "TacticName": f"{name}_0x1ba516", "Metadata": "[ONNX Layer: /a/Conv]"}).product is product


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("Row major linear FP32", "fp32"),
        ("Float", "fp32"),
        ("Half", "fp16"),
        ("FP16", "fp16"),
        ("HALF", "fp16"),
        ("BFloat16", "bf16"),
        ("BF16", "bf16"),
        ("FP8", "fp8"),
        ("Channel major FP8 format", "fp8"),
        ("Int8", "int8"),
        ("Int4", "int4"),
        ("INT64", "unknown"),
        ("Bool", "unknown"),
        ("", "unknown"),
    ],
)
def test_types_by_the_words_of_all_versions(words: str, precision: str) -> None:
    assert trt_layers.precision_of(words) == precision


def test_type_and_format_are_apart_since_tensorrt_11() -> None:
    apart = {**tensor("Half", 1, 8, key="Datatype"), "Format": "(Linear) Row major linear format"}
    assert only({**GEMM, "Inputs": [apart, apart]}).precision == "fp16"


def test_what_runs_nothing_is_left_out() -> None:
    kinds = ("shape_call", "signal", "wait", "NoOp")
    layers = [{"Name": kind, "LayerType": kind, "Inputs": [], "Outputs": []} for kind in kinds]
    assert trt_layers.of_json(written(*layers, POOLING)) == (only(POOLING),)


def test_an_engine_that_tells_only_names_is_of_unknown_precision() -> None:
    found = only("Conv_9 + Relu_10")
    assert (found.name, found.precision, found.product) == ("Conv_9 + Relu_10", "unknown", False)
    assert told.not_as_asked("int8", [found]) is None


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"Layers": [{}]}', '{"Layers": 3}', '{"Layers": [{"Name": '])
def test_what_is_not_the_inspectors_is_a_fault(text: str) -> None:
    with pytest.raises(Fault, match="not what TensorRT's engine inspector writes"):
        trt_layers.of_json(text)


LOG = """Layers:
Name: __mye503_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, \
Metadata:
Name: node_Conv_137_myl0_4, LayerType: correlation, Inputs: [ { Name: relu_2, Dimensions: [-1,16,28,28], Strides: \
[12544,1,448,16], StrideOrder: [3,0,2,1], Datatype: Int8, Format: (NHWC) Channel major format }, { Name: relu_1, \
Dimensions: [-1,16,28,28], Datatype: Float, Format: (NHWC) Channel major format }], Constants: [ { Name: c0, \
Dimensions: [1,16,1,1], Datatype: Float, Format: (Linear) Row major linear format }, { Name: c1, Dimensions: \
[16,16,3,3], Datatype: Int8, Format: (NHWC) Channel major format }], Outputs: [ { Name: relu_3, Dimensions: \
[-1,16,28,28], Datatype: Float, Format: (NHWC) Channel major format }], TacticName: __myelin_CASK_STUB, StreamId: 0, \
Metadata: [ONNX Layer: node_Conv_137][ONNX Layer: node_relu_2][ONNX Layer: node_add_40]
Name: /features/0/Conv + /features/1/Relu, LayerType: CaskConvolution, Inputs: [ { Name: x, Location: Device, \
Dimensions: [1,3,224,224], Format/Datatype: Half }], Outputs: [ { Name: y, Location: Device, Dimensions: [1,64,55,55], \
Format/Datatype: Half }], ParameterType: Convolution, Kernel: [11,11], Weights: {"Type": "Half", "Count": 23232}, \
HasSparseWeights: 0, TacticName: sm80_xmma_fprop_implicit_gemm_indexed_f16f16_f16f16_f16, TacticValue: 0x280b, \
StreamId: 0, Metadata: [ONNX Layer: /features/0/Conv][ONNX Layer: /features/1/Relu]
Name: __mye7321_myl0_8, LayerType: signal, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, EventId: \
1, Metadata:

I/O Tensors:
  Name: image, IOMode: Input, DataType: Float, Dimensions: [-1,1,28,28], Location: Device
"""


def test_the_builders_log_says_the_same_in_a_line_a_layer() -> None:
    first, second = trt_layers.of_log(LOG)
    assert (first.kind, first.precision, first.product, first.sparse) == ("correlation", "int8", True, None)
    assert first.fused_from == ("node_Conv_137", "node_relu_2", "node_add_40")
    assert (second.precision, second.product, second.sparse) == ("fp16", True, False)
    assert second.fused_from == ("/features/0/Conv", "/features/1/Relu")
    assert trt_layers.of_log("") == ()


def test_where_tf32_is_allowed_a_kernel_chosen_later_may_be_either() -> None:
    text = LOG.replace("Datatype: Int8", "Datatype: Float")
    assert trt_layers.of_log(text)[0].precision == "fp32"
    assert trt_layers.of_log(text, tf32=True)[0].precision == "unknown"


def test_the_network_tells_what_its_types_ask_for(artifact: Any) -> None:
    import tensorrt_rtx as trt

    from tasks import onnx_file
    from tasks.engines import trt_build, trt_callbacks

    log = trt_callbacks.logger(trt)
    builder = trt.Builder(log)
    source: Path = artifact("base-onnx")
    network = trt_build.parse(trt, builder, log, source, onnx_file.load(source))
    layers = trt_layers.of_network(trt, network)
    assert told.found(layers) == {"fp32": 4}
    assert {layer.kind for layer in layers if layer.product} == {"CONVOLUTION", "MATRIX_MULTIPLY"}
    assert all(layer.fused_from for layer in layers if layer.kind == "CONVOLUTION")

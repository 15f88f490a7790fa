"""ONNX Runtime: what it makes of a graph, what it says that it runs, and that CUDA is never the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from tasks import checkpoint, layers, manifest, onnx_file, proof, target
from tasks.check import faults
from tasks.data import data
from tasks.engines import onnxruntime as backend
from tasks.engines import ort_layers, ort_start
from tasks.engines.protocol import Built, open_engine
from tasks.errors import Fault, Unavailable
from tasks.export import export
from tasks.files import sha256
from tasks.quantize import quantize
from tasks.settings import BuildParams, DataParams, ExportParams, QuantizeParams

ROOT = Path(__file__).resolve().parents[3]
EP = (ort_start.CUDA, ort_start.CPU)
GPU = {"name": "NVIDIA L4", "compute_capability": "8.9", "driver": "580.1"}


def spec(**settings: Any) -> BuildParams:
    return BuildParams.model_validate({"from": "source", "backend": "onnxruntime", "max_batch": 9, **settings})


def built(source: Path, folder: Path, **settings: Any) -> Built:
    folder.mkdir()
    made = backend.build(source, folder, spec(**settings))
    manifest.write(folder, made.manifest)
    return made


@pytest.fixture(scope="module")
def sources(tiny: Any, workload_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model, untrained, as `fp32` and as `int8`."""
    root = tmp_path_factory.mktemp("sources")
    data(workload_path, root / "data", DataParams(train=32, calibration=16, validation=16, test=16))
    torch.manual_seed(0)
    checkpoint.save(checkpoint.Checkpoint(tiny.model(), str(workload_path), {}), root / "model")
    export(root / "model", root / "data", root / "fp32", ExportParams.model_validate({"from": "model"}))
    params = {"from": "fp32", "calibration": "minmax", "samples": 16, "batch": 16}
    quantize(root / "fp32", workload_path, root / "data", root / "int8", QuantizeParams.model_validate(params))
    return {name: root / name for name in ("fp32", "int8")}


def one_node(
    op: str, domain: str = "", kind: int = TensorProto.FLOAT, name: str = "strange", **attributes: Any
) -> onnx.ModelProto:
    """A model [n, 4] → [n, 4] of one node."""
    node = helper.make_node(op, ["x"], ["y"], name=name, domain=domain, **attributes)
    values = [helper.make_tensor_value_info(v, kind, ["n", 4]) for v in ("x", "y")]
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "one", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / onnx_file.FILE)
    return folder


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_level_of_optimisation_computes_what_pytorch_does(
    sources: dict[str, Path], tmp_path: Path, precision: str, level: str
) -> None:
    made = built(sources[precision], tmp_path / "engine", optimization=level)
    assert made.manifest.settings["optimization"] == level
    with backend.open(tmp_path / "engine", made.manifest) as session:
        assert session.device == made.manifest.device == "cpu"
        (parity,) = proof.check(session, sources[precision], precision, 9)
    assert parity.difference <= parity.tolerance
    assert [f.name for f in sorted((tmp_path / "engine").iterdir())] == [backend.FILE, manifest.FILE]


def test_optimisation_makes_fewer_kernels_of_the_nodes(sources: dict[str, Path], tmp_path: Path) -> None:
    nodes = len(onnx_file.load(sources["fp32"]).graph.node)
    made = {level: built(sources["fp32"], tmp_path / level, optimization=level) for level in ("disabled", "all")}
    assert len(made["disabled"].layers) == nodes
    assert len(made["all"].layers) < nodes


def test_a_layer_says_what_it_was_fused_from(sources: dict[str, Path], tmp_path: Path) -> None:
    source = onnx_file.load(sources["fp32"]).graph
    kinds = {node.name: node.op_type for node in source.node}
    for level in ("extended", "all"):
        ran = built(sources["fp32"], tmp_path / level, optimization=level).layers
        claimed = [name for layer in ran for name in layer.fused_from]
        assert sorted(claimed) == sorted(kinds), level
        convolutions = [[kinds[n] for n in x.fused_from] for x in ran if x.product and "Conv" in x.kind]
        assert ["Conv", "Relu"] in convolutions


def test_an_int8_layer_stands_for_its_scales_and_its_activation(sources: dict[str, Path], tmp_path: Path) -> None:
    source = onnx_file.load(sources["int8"]).graph
    kinds = {node.name: node.op_type for node in source.node}
    ran = built(sources["int8"], tmp_path / "engine").layers
    first = next(layer for layer in ran if layer.kind == "QLinearConv")
    of = [kinds[n] for n in first.fused_from]
    assert of.count("Conv") == of.count("QuantizeLinear") == 1 and of.count("DequantizeLinear") >= 2, of
    claimed = [name for layer in ran for name in layer.fused_from]
    assert len(claimed) == len(set(claimed))


def test_quantised_products_run_in_int8_and_others_in_fp32(sources: dict[str, Path], tmp_path: Path) -> None:
    for precision in ("fp32", "int8"):
        made = built(sources[precision], tmp_path / precision)
        products = [layer for layer in made.layers if layer.product]
        assert {layer.precision for layer in products} == {precision}
        assert made.manifest.precision_found == {precision: 4}
        assert {layer.device for layer in made.layers} == {"cpu"}
        assert layers.not_as_asked(made.manifest.precision_asked, made.layers) is None


def test_int8_that_stayed_in_floating_point_is_told(sources: dict[str, Path], tmp_path: Path) -> None:
    made = built(sources["int8"], tmp_path / "engine", optimization="disabled")
    assert made.manifest.precision_found == {"fp32": 4}
    assert any(layer.kind == "DequantizeLinear" for layer in made.layers)
    assert layers.not_as_asked("int8", made.layers) == "asked for int8, found in 0 of 4 products (4 fp32)"


def test_a_rebuild_is_the_same_byte_for_byte(sources: dict[str, Path], tmp_path: Path) -> None:
    for precision in ("fp32", "int8"):
        digests = {built(sources[precision], tmp_path / f"{precision}{i}").manifest.engine_sha256 for i in range(2)}
        assert len(digests) == 1


def test_building_leaves_the_source_alone(sources: dict[str, Path], tmp_path: Path) -> None:
    before = {f.name: sha256(f) for f in sources["int8"].iterdir()}
    built(sources["int8"], tmp_path / "engine")
    assert {f.name: sha256(f) for f in sources["int8"].iterdir()} == before


@pytest.mark.parametrize(
    ("op", "found", "expected"),
    [
        ("MatMul", "float", "fp32"),
        ("MatMul", "float16", "fp16"),
        ("FusedMatMul", "bfloat16", "bf16"),
        ("Conv", "double", "fp64"),
        ("GemmFloat8", "float8e4m3fn", "fp8"),
        ("Gather", "int64", "unknown"),
        ("QLinearConv", "uint8", "int8"),
        ("DynamicQuantizeMatMul", "float", "int8"),
        ("DynamicQuantizeLSTM", "float", "int8"),
    ],
)
def test_the_precision_is_that_of_the_arithmetic(op: str, found: str, expected: str) -> None:
    told = {"input_type_shape": [{found: [2, 3]}, {"float": [3]}]}
    if expected == "unknown":
        told = {"input_type_shape": [{found: [2, 3]}]}
    assert ort_layers.precision(op, told, tf32=False) == expected
    tf32 = ort_layers.precision(op, told, tf32=True)
    assert tf32 == ("tf32" if expected == "fp32" else expected)


def test_weights_of_few_bits_are_told_by_their_bits(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], "four", domain="com.microsoft", K=64, N=8, bits=4),
        helper.make_node("Relu", ["y"], ["z"], "after"),
    ]
    graph = helper.make_graph(nodes, "weights", [], [])
    events = [
        {"cat": "Node", "name": f"{node.name}_kernel_time", "args": {**told, "op_name": node.op_type}}
        for node, told in zip(nodes, [{"provider": p, "input_type_shape": [{"float": [1]}]} for p in EP], strict=True)
    ]
    (tmp_path / "profile").write_text(json.dumps([{"cat": "Session", "name": "run"}, *events, *events]))
    model = helper.make_model(graph)
    first, second = ort_layers.read(tmp_path / "profile", model, model, tf32=True)
    assert (first.precision, first.product, first.device) == ("int4", True, "cuda")
    assert (second.precision, second.product, second.device, second.fused_from) == ("fp32", False, "cpu", ("after",))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (one_node("Wibble"), "node strange (Wibble)"),
        (one_node("Wibble", name=""), "node the nameless one that gives y (Wibble)"),
        (one_node("Wibble", "com.acme"), "node strange (com.acme:Wibble)"),
        (one_node("Erf", kind=TensorProto.BFLOAT16), "node strange (Erf)"),
        (one_node("Erf", kind=TensorProto.INT32), "node strange (Erf)"),
    ],
)
def test_an_operator_that_it_does_not_know_is_named_with_its_node(
    tmp_path: Path, model: onnx.ModelProto, named: str
) -> None:
    with pytest.raises(Fault, match="ONNX Runtime can't build source") as caught:
        built(saved(model, tmp_path / "source"), tmp_path / "engine")
    assert caught.value.what.endswith(f": {named}")
    assert "CPU provider" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TensorProto.FLOAT, "float32"),
        (TensorProto.DOUBLE, "float64"),
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.INT8, "int8"),
        (TensorProto.UINT8, "uint8"),
        (TensorProto.INT32, "int32"),
        (TensorProto.INT64, "int64"),
        (TensorProto.BOOL, "bool"),
    ],
)
def test_every_type_goes_in_and_out(tmp_path: Path, kind: int, name: str) -> None:
    source = saved(one_node("Transpose", kind=kind, perm=[0, 1]), tmp_path / "source")
    made = built(source, tmp_path / "engine")
    assert [(t.dtype, t.shape) for t in (*made.manifest.inputs, *made.manifest.outputs)] == [(name, (None, 4))] * 2
    value = np.array([[0, 1, 1, 0], [1, 1, 0, 0]]).astype(name)
    with backend.open(tmp_path / "engine", made.manifest) as session:
        assert np.array_equal(session.run({"x": value})["y"], value)


def test_bfloat16_is_a_type_of_the_manifest(tmp_path: Path) -> None:
    source = saved(one_node("Identity", kind=TensorProto.BFLOAT16), tmp_path / "source")
    session = ort_start.start(str(source / onnx_file.FILE), "cpu", 1, "disabled")
    assert backend._spec(session.get_inputs()[0], {}).dtype == "bfloat16"


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"precision": "tf32"}, {"precision": "bf16"}])
def test_a_precision_that_the_file_does_not_have_is_refused(
    sources: dict[str, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(Fault, match="the precision of an engine of the ONNX file"):
        built(sources["fp32"], tmp_path / "engine", **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "bf16"}, "precision: got 'bf16', expected fp32 or tf32"),
        ({"precision": "tf32"}, "precision: got 'tf32' on the CPU"),
        ({"channels_last": True}, "channels_last: got True on the CPU, expected device: cuda"),
        ({"cuda_graph": True}, "cuda_graph: got True on the CPU, expected device: cuda"),
        ({"level": 3}, "level: got 3, expected nothing: onnxruntime has no such setting"),
        ({"device": "cuda", "precision": "tf32", "channels_last": True, "cuda_graph": True}, None),
    ],
)
def test_settings_that_mean_nothing_here_are_refused_before_any_work(
    tiny_params: dict[str, Any], settings: dict[str, Any], said: str | None
) -> None:
    engines = {**tiny_params["build"], "own": {"from": "base-onnx", "backend": "onnxruntime", **settings}}
    found = [fault for fault in faults({**tiny_params, "build": engines}, models=False) if "build.own" in fault]
    assert (len(found) == 0) if said is None else any(fault.startswith(f"build.own.{said}") for fault in found), found


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_gpu", lambda: None)


@pytest.fixture
def some_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is seen, as where only the CPU's ONNX Runtime is installed."""
    monkeypatch.setattr(target, "_gpu", lambda: GPU)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [ort_start.CPU])


def test_cuda_without_a_gpu_is_not_built_and_not_opened(sources: dict[str, Path], tmp_path: Path, no_gpu: None) -> None:
    with pytest.raises(Unavailable, match="no NVIDIA GPU") as caught:
        built(sources["fp32"], tmp_path / "engine", device="cuda")
    assert "\n" not in str(caught.value)
    made = built(sources["fp32"], tmp_path / "cpu").manifest
    elsewhere = replace(made, device="cuda", built_for={"device": "cuda", "gpu_name": "NVIDIA L4", **GPU})
    with pytest.raises(Unavailable, match="built, not run here: no NVIDIA GPU") as caught:
        backend.open(tmp_path / "cpu", elsewhere)
    assert "NVIDIA L4" in str(caught.value) and "\n" not in str(caught.value)


def test_cuda_with_the_cpu_package_of_onnxruntime_is_refused(
    sources: dict[str, Path], tmp_path: Path, some_gpu: None
) -> None:
    with pytest.raises(Unavailable, match="has no CUDA provider: install onnxruntime-gpu in its place"):
        built(sources["fp32"], tmp_path / "engine", device="cuda")
    made = built(sources["fp32"], tmp_path / "cpu").manifest
    here = replace(made, device="cuda", built_for={"device": "cuda", **manifest.gpu_here()})
    with pytest.raises(Unavailable, match="has no CUDA provider"):
        backend.open(tmp_path / "cpu", here)
    other = replace(here, built_for={**here.built_for, "gpu_name": "NVIDIA H200"})
    with pytest.raises(Fault, match="built for another GPU") as caught:
        backend.open(tmp_path / "cpu", other)
    assert "NVIDIA H200" in str(caught.value.expected) and "NVIDIA L4" in str(caught.value.got)
    assert caught.value.do == "rebuild: dvc repro build@cpu"


def test_onnxruntime_that_goes_on_without_cuda_is_found_out(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ort_start.CUDA in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has a CUDA provider")
    # As where the provider is listed, but its libraries don't load: the library warns, and would use the CPU.
    monkeypatch.setattr(ort_start, "need_cuda", lambda: None)
    for strict in (True, False):
        with pytest.raises(Unavailable, match="took CPUExecutionProvider where cuda was asked for"):
            ort_start.start(str(sources["fp32"] / onnx_file.FILE), "cuda", 1, "all", strict=strict)


def test_fp32_on_cuda_is_fp32() -> None:
    assert ort_start.cuda_options({}, None)["use_tf32"] == "0"
    asked = ort_start.cuda_options({"tf32": True, "cuda_graph": True, "channels_last": True}, 4711)
    assert {asked[k] for k in ("use_tf32", "enable_cuda_graph", "prefer_nhwc")} == {"1"}
    assert asked["user_compute_stream"] == "4711"


def convolution(kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A model [n, 8, 16, 16] → [n, 6]: a convolution, an activation, a mean and a product, in one type."""
    rng, numpy_type = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(kind)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.normal(0, 0.2, shape).astype(numpy_type), name)

    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "v"], ["y"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "convolution",
        [helper.make_tensor_value_info("x", kind, ["n", 8, 16, 16])],
        [helper.make_tensor_value_info("y", kind, ["n", 6])],
        [weight("w", 16, 8, 3, 3), weight("b", 16), weight("v", 16, 6)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx_file.annotate(model, {"precision": {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16"}[kind]})
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "settings", "precision", "tolerance"),
    [
        (TensorProto.FLOAT, {}, "fp32", 1e-5),
        (TensorProto.FLOAT, {"precision": "tf32"}, "tf32", 1e-2),
        (TensorProto.FLOAT, {"cuda_graph": True}, "fp32", 1e-5),
        (TensorProto.FLOAT, {"optimization": "disabled"}, "fp32", 1e-5),
        (TensorProto.FLOAT16, {}, "fp16", 2e-2),
        (TensorProto.FLOAT16, {"cuda_graph": True, "channels_last": True}, "fp16", 2e-2),
    ],
)
def test_cuda_computes_what_the_cpu_does(
    tmp_path: Path, kind: int, settings: dict[str, Any], precision: str, tolerance: float
) -> None:
    reference = saved(convolution(), tmp_path / "reference")
    cpu = built(reference, tmp_path / "cpu").manifest
    source = saved(convolution(kind), tmp_path / "source")
    made = built(source, tmp_path / "engine", device="cuda", **settings)
    assert made.manifest.precision_asked == precision
    assert made.manifest.precision_found == {precision: 2}
    assert {layer.device for layer in made.layers} == {"cuda"}
    assert made.manifest.settings["cpu_nodes"] == 0
    rng = np.random.default_rng(1)
    with backend.open(tmp_path / "cpu", cpu) as slow, backend.open(tmp_path / "engine", made.manifest) as fast:
        assert (slow.device, fast.device) == ("cpu", "cuda")
        for batch in (1, 3, 9, 1):
            value = rng.normal(size=(batch, 8, 16, 16)).astype(np.float32)
            expected = slow.run({"x": value})["y"]
            got = fast.run({"x": value.astype(made.manifest.inputs[0].dtype)})["y"]
            assert got.shape == expected.shape
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())
        assert 0 < fast.device_ms(10) < 100
        assert fast.memory_bytes > 0


@pytest.mark.gpu
def test_a_product_that_cuda_has_no_kernel_for_is_refused_by_name(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((2, 1, 3, 3), np.uint8), "w")
    graph = helper.make_graph(
        [helper.make_node("ConvInteger", ["x", "w"], ["y"], "stray"), helper.make_node("Abs", ["y"], ["z"], "kept")],
        "integer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("z", TensorProto.INT32, ["n", 2, 6, 6])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(Fault, match="CUDA provider can't run all of source") as caught:
        built(saved(model, tmp_path / "source"), tmp_path / "engine", device="cuda")
    assert caught.value.got == "on the CPU: stray (ConvInteger)"


@pytest.mark.gpu
def test_int8_for_a_cpu_runs_in_floating_point_on_cuda_and_is_told(tmp_path: Path) -> None:
    model = convolution()
    pair = ("scale", "zero")
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(np.float32(0.05), "scale"), onnx.numpy_helper.from_array(np.uint8(128), "zero")]
    )
    model.graph.node[0].input[0] = "d"
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["q", *pair], ["d"], "dequantize"))
    model.graph.node.insert(0, helper.make_node("QuantizeLinear", ["x", *pair], ["q"], "quantize"))
    onnx_file.annotate(model, {"precision": "int8"})
    made = built(saved(model, tmp_path / "source"), tmp_path / "engine", device="cuda")
    assert made.manifest.precision_found == {"fp32": 2}
    assert layers.not_as_asked("int8", made.layers) == "asked for int8, found in 0 of 2 products (2 fp32)"


@pytest.mark.gpu
def test_shapes_may_be_reckoned_on_the_cpu_beside_cuda(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    constants = {"zero": np.array([0]), "one": np.array([1]), "four": np.array([2, 2])}
    weights = [onnx.numpy_helper.from_array(value.astype(np.int64), name) for name, value in constants.items()]
    weights.append(onnx.numpy_helper.from_array(rng.normal(size=(2, 5)).astype(np.float32), "w"))
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], "shape"),
        helper.make_node("Slice", ["shape", "zero", "one"], ["batch"], "slice"),
        helper.make_node("Concat", ["batch", "four"], ["wanted"], "concat", axis=0),
        helper.make_node("Reshape", ["x", "wanted"], ["r"], "reshape"),
        helper.make_node("MatMul", ["r", "w"], ["y"], "product"),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape])
        for name, shape in {"x": (4,), "y": (2, 5)}.items()
    ]
    graph = helper.make_graph(nodes, "shapes", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    source = saved(model, tmp_path / "source")
    for name, settings in {"plain": {}, "raw": {"optimization": "disabled"}}.items():
        made = built(source, tmp_path / name, device="cuda", **settings)
        assert {layer.device for layer in made.layers if layer.product} == {"cuda"}
        with backend.open(tmp_path / name, made.manifest) as session:
            for batch in (2, 9):
                value = rng.normal(size=(batch, 4)).astype(np.float32)
                expected = value.reshape(batch, 2, 2) @ onnx.numpy_helper.to_array(weights[-1])
                np.testing.assert_allclose(session.run({"x": value})["y"], expected, atol=1e-5)


@pytest.mark.gpu
def test_an_engine_for_cuda_that_is_edited_to_another_gpu_is_refused(tmp_path: Path) -> None:
    made = built(saved(convolution(), tmp_path / "source"), tmp_path / "engine", device="cuda").manifest
    with pytest.raises(Fault, match="built for another GPU"):
        backend.open(tmp_path / "engine", replace(made, built_for={**made.built_for, "compute_capability": "1.0"}))


@pytest.fixture
def recurrent(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """An engine of an LSTM for CUDA, whose kernels take pinned memory at each launch, and a batch for it."""
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 32, 4), "r": (1, 32, 8), "b": (1, 64)}
    weights = [onnx.numpy_helper.from_array(rng.normal(size=s).astype(np.float32), k) for k, s in shapes.items()]
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["steps", "w", "r", "b"], ["", "last"], hidden_size=8),
        helper.make_node("Transpose", ["last"], ["y"], perm=[1, 0, 2]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape])
        for name, shape in {"x": (5, 4), "y": (1, 8)}.items()
    ]
    graph = helper.make_graph(nodes, "recurrent", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    manifest.write(
        tmp_path / "engine", built(saved(model, tmp_path / "s"), tmp_path / "engine", device="cuda").manifest
    )
    return tmp_path / "engine", {"x": rng.normal(size=(3, 5, 4)).astype(np.float32)}


@pytest.mark.gpu
def test_a_recurrent_session_closes_beside_another_after_any_number_of_launches(recurrent: Any) -> None:
    from tasks.engines.ort_cuda import DRAIN_EVERY

    folder, batch = recurrent
    with open_engine(folder) as kept:
        expected = kept.run(batch)["y"]
        for launches in (1, DRAIN_EVERY, DRAIN_EVERY + 1):
            with open_engine(folder) as session:
                for _ in range(2):
                    session.load(batch)
                    for _ in range(launches):
                        session.launch()
                    np.testing.assert_array_equal(session.fetch()["y"], expected)
        np.testing.assert_array_equal(kept.run(batch)["y"], expected)


@pytest.mark.gpu
def test_a_session_that_is_left_open_ends_with_its_process(recurrent: Any) -> None:
    folder, _ = recurrent
    script = """
import sys, pathlib, numpy as np
from tasks.engines.protocol import open_engine
session = open_engine(pathlib.Path(sys.argv[1]))
print(session.run({"x": np.ones((3, 5, 4), np.float32)})["y"].shape)
"""
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "(3, 1, 8)\n"), done.stderr

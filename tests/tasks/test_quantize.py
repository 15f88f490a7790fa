"""Quantisation: scales by hand, nothing infinite in a file, outputs near the parent's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tasks import onnx_file, proof, quantize_int8, quantize_trt
from tasks.data import read, write
from tasks.errors import Fault
from tasks.export import to_onnx
from tasks.files import read_json, sha256, size_bytes
from tasks.quantize import check_made, check_scales, quantize
from tasks.quantize_nodes import refuse_quantised
from tasks.settings import QuantizeParams

ATTENTION = """
NAME = PREPROCESSING = "attention"
INPUTS, OUTPUTS, METRICS = {"x": ("float32", (4, 16))}, ("logits",), {}
samples = model = loss = None
"""


def params(**changes: Any) -> QuantizeParams:
    return QuantizeParams(**{"from": "base-onnx", "calibration": "minmax", "samples": 64, "batch": 16, **changes})


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def nodes(model: onnx.ModelProto, kind: str) -> list[Any]:
    return [n for n in model.graph.node if n.op_type == kind]


@pytest.fixture(scope="module")
def int8(artifact: Any) -> onnx.ModelProto:
    return onnx_file.load(artifact("base-int8"))


def input_scale(folder: Path) -> float:
    model = onnx_file.load(folder)
    (node,) = [n for n in nodes(model, "QuantizeLinear") if n.input[0] == "image"]
    return float(constants(model)[node.input[1]])


def minmax_scale(images: np.ndarray) -> float:
    """Eight bits over the range of the samples with zero."""
    return (max(0.0, float(images.max())) - min(0.0, float(images.min()))) / 255


def test_the_inputs_scale_is_the_range_of_the_calibration_samples(artifact: Any, data_folder: Path) -> None:
    images = read(data_folder / "calibration.npz")["image"]
    assert input_scale(artifact("base-int8")) == pytest.approx(minmax_scale(images), rel=1e-6)


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile", "mse"])
def test_a_last_partial_batch_is_used(
    artifact: Any, data_folder: Path, workload_path: Path, tmp_path: Path, method: str
) -> None:
    calibration = {k: v[:35].copy() for k, v in read(data_folder / "calibration.npz").items()}
    without = minmax_scale(calibration["image"])
    calibration["image"][34] *= 10
    write(tmp_path / "data/calibration.npz", calibration)
    settings = params(calibration=method, samples=35, percentile=100.0)
    report = quantize(artifact("base-onnx"), workload_path, tmp_path / "data", tmp_path / "out", settings)
    assert report.calibration_samples == 35
    assert input_scale(tmp_path / "out") > 1.3 * without
    if method == "minmax":
        assert input_scale(tmp_path / "out") == pytest.approx(minmax_scale(calibration["image"]), rel=1e-6)


def test_only_the_samples_asked_for_are_used(
    artifact: Any, data_folder: Path, workload_path: Path, tmp_path: Path
) -> None:
    quantize(artifact("base-onnx"), workload_path, data_folder, tmp_path / "out", params(samples=16))
    images = read(data_folder / "calibration.npz")["image"][:16]
    assert input_scale(tmp_path / "out") == pytest.approx(minmax_scale(images), rel=1e-6)


def test_activations_are_unsigned_and_weights_signed_per_channel_in_seven_bits(int8: onnx.ModelProto) -> None:
    known = constants(int8)
    assert {known[n.input[2]].dtype.name for n in nodes(int8, "QuantizeLinear")} == {"uint8"}
    made = {n.output[0]: n for n in nodes(int8, "DequantizeLinear")}
    convs = nodes(int8, "Conv")
    assert len(convs) == 3
    for conv in convs:
        dequantize = made[conv.input[1]]
        weight, scale = known[dequantize.input[0]], known[dequantize.input[1]]
        assert (weight.dtype.name, scale.shape) == ("int8", (len(weight),))
        widest = np.abs(weight.astype(int)).reshape(len(weight), -1).max(axis=1)
        assert widest.max() <= 64
        assert widest.min() >= 63


def test_every_scale_in_the_file_is_finite_and_positive(int8: onnx.ModelProto) -> None:
    known = constants(int8)
    scales = [known[n.input[1]] for n in int8.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(scales) > 10
    assert all(np.isfinite(s).all() and (s > 0).all() for s in scales)


def test_outputs_stay_near_the_parents(artifact: Any, line: Path, data_folder: Path) -> None:
    images = read(data_folder / "calibration.npz")["image"]
    want, got = (
        ort.InferenceSession(str(artifact(n) / "model.onnx"), providers=["CPUExecutionProvider"]).run(
            None, {"image": images}
        )[0]
        for n in ("base-onnx", "base-int8")
    )
    report = read_json(line / "results/quantize/base-int8.json")
    snr = 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum())
    assert snr > 15
    assert report["snr_db"]["logits"] == pytest.approx(snr, abs=1)
    assert report["cosine"]["logits"] > 0.99


def test_the_report_and_the_notes_are_of_the_file(
    artifact: Any, line: Path, data_folder: Path, int8: onnx.ModelProto
) -> None:
    report, folder = read_json(line / "results/quantize/base-int8.json"), artifact("base-int8")
    assert report["quantize_nodes"] == len(nodes(int8, "QuantizeLinear")) > 0
    file = folder / "model.onnx"
    assert (report["size_bytes"], report["sha256"]) == (size_bytes(file), sha256(file))
    notes = onnx_file.notes(int8)
    assert notes["precision"] == "int8"
    assert notes["calibration_sha256"] == sha256(data_folder / "calibration.npz")
    assert notes["model_sha256"] == sha256(artifact("base") / "model.pt")


def test_a_parent_with_a_sidecar_is_quantised(
    artifact: Any, data_folder: Path, workload_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(artifact("base-onnx"), tmp_path / "parent")
    model = onnx_file.load(artifact("base-onnx"))
    onnx.save(model, tmp_path / "parent/model.onnx", save_as_external_data=True, location="w", size_threshold=1024)
    quantize(tmp_path / "parent", workload_path, data_folder, tmp_path / "out", params())
    assert constants(onnx_file.load(tmp_path / "out")).keys() == constants(onnx_file.load(artifact("base-int8"))).keys()
    (tmp_path / "parent/w").unlink()
    with pytest.raises(Fault, match="lost its external data"):
        quantize(tmp_path / "parent", workload_path, data_folder, tmp_path / "out2", params())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda v: v.__setitem__((5, 0, 1, 1), np.nan), "sample 5 of input image is unusable"),
        (lambda v: v.__setitem__(5, 0), "sample 5 of input image is unusable"),
    ],
)
def test_unusable_samples_are_refused_and_what_was_made_stays(
    artifact: Any, data_folder: Path, workload_path: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    shutil.copytree(artifact("base-int8"), tmp_path / "out")
    before = sha256(tmp_path / "out")
    calibration = read(data_folder / "calibration.npz")
    spoil(calibration["image"])
    write(tmp_path / "data/calibration.npz", calibration)
    with pytest.raises(Fault, match=message):
        quantize(artifact("base-onnx"), workload_path, tmp_path / "data", tmp_path / "out", params())
    assert sha256(tmp_path / "out") == before


class Attention(nn.Module):
    """One causal head whose mask is added or put in."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.q, self.k, self.out, self.form = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8), form
        self.register_buffer("keep", torch.ones(4, 4).tril().bool())
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores + self.mask if self.form == "add" else torch.where(self.keep, scores, -torch.inf)
        return self.out(scores.softmax(-1) @ x).mean(1)


@pytest.fixture(scope="module")
def attention_files(make_workload: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each form of the mask, with the exported model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("attention")
    for form in ("add", "where"):
        (folder / form).mkdir()
        to_onnx(Attention(form), make_workload(None, {"x": ("float32", (4, 16))}), folder / form / "model.onnx", 18)
        proof.save(folder / form, {"x": np.zeros((1, 4, 16), np.float32)}, {"logits": np.zeros((1, 8), np.float32)})
    return folder


@pytest.fixture
def attention(tmp_path: Path, write_workload: Any, attention_files: Path) -> Any:
    """`attention(form, method, …)`: the report of quantising a masked attention."""
    rng = np.random.default_rng(0)
    write(
        tmp_path / "data/calibration.npz",
        {"x": rng.normal(size=(32, 4, 16)).astype(np.float32), "label": np.zeros(32, np.int64)},
    )

    def run(form: str, method: str, **others: Any) -> Any:
        path = write_workload(ATTENTION)
        settings = params(calibration=method, samples=32, **others)
        return quantize(attention_files / form, path, tmp_path / "data", tmp_path / "out", settings)

    return run


@pytest.mark.parametrize(("form", "style"), [("add", "onnxruntime"), ("where", "onnxruntime"), ("add", "tensorrt")])
def test_an_infinite_mask_gives_finite_scales_and_close_outputs(
    attention: Any, tmp_path: Path, form: str, style: str
) -> None:
    report = attention(form, "mse", style=style)
    check_scales(onnx_file.load(tmp_path / "out"))
    assert report.snr_db["logits"] > 15


def masked(width: int = 2) -> onnx.ModelProto:
    """A product of what a mask has made infinite, and another."""
    constants = {
        "keep": np.array([True, False] * (width // 2)),
        "mask": np.array(-np.inf, np.float32),
        "v": np.ones((width, width), np.float32),
        "w": np.random.default_rng(0).normal(size=(width, width)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Where", ["keep", "x", "mask"], ["masked"], "where"),
        helper.make_node("MatMul", ["masked", "v"], ["m"], "product"),
        helper.make_node("MatMul", ["x", "w"], ["n"], "other"),
        helper.make_node("Add", ["m", "n"], ["y"], "sum"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile", "mse"])
def test_an_infinite_range_that_is_used_is_refused_by_the_name_of_its_tensor(tmp_path: Path, method: str) -> None:
    x = {"x": np.ones((8, 2), np.float32)}
    with pytest.raises(Fault, match="tensor masked has no finite range") as caught:
        quantize_int8.static(masked(), tmp_path, x, params(calibration=method))
    assert "[-inf, " in str(caught.value)
    assert "attention mask" in str(caught.value)


def test_an_infinite_range_of_what_stays_is_not_used(tmp_path: Path) -> None:
    x = {"x": np.ones((8, 2), np.float32)}
    maker = quantize_int8.static(masked(), tmp_path, x, params(keep=("where", "product")))
    check_scales(maker.make(()))


def test_an_infinite_range_of_what_stays_is_not_used_in_tensorrts_style_either(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    x = {"x": np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)}
    with pytest.raises(Fault, match="tensor masked has no finite range"):
        quantize_trt.maker(masked(32), tmp_path, x, params(style="tensorrt"))
    maker = quantize_trt.maker(masked(32), tmp_path, x, params(style="tensorrt", keep=("where", "product")))
    assert maker.nodes == ["other"]
    check_scales(maker.make(()))


def test_an_lstm_alone_is_something_quantised_dynamically() -> None:
    w, r = (np.random.default_rng(i).normal(size=(1, 32, size)).astype(np.float32) for i, size in ((0, 4), (1, 8)))
    weights = [numpy_helper.from_array(value, name) for value, name in ((w, "w"), (r, "r"))]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], "lstm", hidden_size=8)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", "n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["t", 1, "n", 8])
    graph = helper.make_graph([node], "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    settings = QuantizeParams(**{"from": "base-onnx", "activations": "dynamic"})
    made = quantize_int8.dynamic(model, settings).make(())
    assert nodes(made, "DynamicQuantizeLSTM")
    check_made(made, settings)
    with pytest.raises(Fault, match="quantised already"):
        refuse_quantised(made)
    with pytest.raises(Fault, match="nothing was quantised"):
        check_made(model, settings)


def scaled(scale: Any, constant: bool) -> onnx.ModelProto:
    """One Q/DQ pair with the given scale, as an initializer or a Constant node."""
    value = numpy_helper.from_array(np.array(scale, np.float32), "scale")
    zero = numpy_helper.from_array(np.array(0, np.uint8), "zero")
    made = [helper.make_node("Constant", [], ["scale"], value=value)] if constant else []
    graph = helper.make_graph(
        [
            *made,
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [zero] if constant else [value, zero],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, -1.0, [0.1, np.inf]])
def test_a_scale_that_is_not_finite_and_positive_is_refused(scale: Any, constant: bool) -> None:
    check_scales(scaled(0.1, constant))
    with pytest.raises(Fault, match="scale of x is unusable"):
        check_scales(scaled(scale, constant))


@pytest.mark.parametrize("form", [{"value_float": 0.0}, {"value_floats": [0.1, -1.0]}])
def test_a_constant_of_another_form_is_checked_too(form: dict[str, Any]) -> None:
    model = scaled(0.1, True)
    model.graph.node[0].CopyFrom(helper.make_node("Constant", [], ["scale"], **form))
    with pytest.raises(Fault, match="scale of x is unusable"):
        check_scales(model)


def test_a_scale_that_is_no_constant_is_refused() -> None:
    model = scaled(0.1, True)
    model.graph.node[0].CopyFrom(helper.make_node("ReduceMax", ["x"], ["scale"], keepdims=0))
    with pytest.raises(Fault, match="scale of x is computed by the model"):
        check_scales(model)


def test_a_scale_inside_a_branch_is_checked() -> None:
    inner = scaled(np.nan, False).graph
    del inner.input[:]
    outer = scaled(0.1, False)
    outer.graph.node.append(helper.make_node("If", ["b"], ["z"], then_branch=inner, else_branch=inner))
    with pytest.raises(Fault, match="scale of x is unusable"):
        check_scales(outer)


def test_a_file_without_quantised_nodes_is_refused(artifact: Any) -> None:
    with pytest.raises(Fault, match="nothing was quantised"):
        check_scales(onnx_file.load(artifact("base-onnx")))

"""QAT: what is quantised and how, training from the PTQ start, reload, and a file that both runtimes take."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from tasks import checkpoint, fake_quant, fit, onnx_file, qat
from tasks.data import read, write
from tasks.errors import Fault
from tasks.export import export
from tasks.export_qdq import to_qdq
from tasks.files import sha256
from tasks.settings import BuildParams, ExportParams, QatParams
from tasks.structure import FakeQuantized

STYLES = ("tensorrt", "onnxruntime")
EXPORT = ExportParams.model_validate({"from": "x"})
SPLITS = {"train": slice(0, 400), "calibration": slice(400, 500), "validation": slice(500, 700)}


def params(**given: Any) -> QatParams:
    return QatParams.model_validate({"from": "x", "samples": 64, "epochs": 1, "lr": 1e-3, "batch": 32, **given})


def run(folder: Path, inputs: dict[str, np.ndarray], optimise: bool = False) -> np.ndarray:
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return ort.InferenceSession(str(folder / "model.onnx"), options).run(None, inputs)[0]


def noise(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


@pytest.fixture(scope="module")
def data(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, (arrays, _) = tmp_path_factory.mktemp("data"), tiny.samples(0)
    for split, rows in SPLITS.items():
        write(folder / f"{split}.npz", {name: values[rows] for name, values in arrays.items()})
    return folder


@pytest.fixture(scope="module")
def base(tiny: Any, workload_path: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, half of the weights of one of its convolutions masked."""
    folder = tmp_path_factory.mktemp("made") / "base"
    torch.manual_seed(0)
    model = tiny.model(width=8)
    masks = {"block.conv1.weight": torch.rand(8, 8, 3, 3) > 0.5}
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    fit.fine_tune(model, tiny, train, validation, params(epochs=3, lr=1e-2), masks=masks)
    checkpoint.save(checkpoint.Checkpoint(model, str(workload_path), {"width": 8}, masks=masks), folder)
    return folder


@pytest.fixture(scope="module")
def made(base: Path, data: Path) -> dict[str, Any]:
    """For each style: the report, the artifact's folder and that of its ONNX file."""
    found = {}
    for style in STYLES:
        artifact, file = base.with_name(style), base.with_name(f"{style}-onnx")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(base.parent)
            report = qat.qat(base, data, artifact, params(style=style))
        found[style] = report, artifact, file, export(artifact, data, file, EXPORT)
    return found


def quantised(model: nn.Module, task: Any, arrays: dict[str, np.ndarray], **given: Any) -> fake_quant.Plan:
    return qat.quantize_model(model.eval(), task, arrays, params(**given), "test")[0]


def arrays(*shape: int, n: int = 48) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(n, *shape)).astype(np.float32), "label": np.zeros(n, np.int64)}


@pytest.mark.parametrize("style", STYLES)
def test_every_layer_is_quantised_and_the_scores_are_of_what_is_saved(
    made: Any, data: Path, tiny: Any, style: str
) -> None:
    report, artifact, _, _ = made[style]
    validation = read(data / "validation.npz")
    assert [layer.name for layer in report.layers] == ["stem.0", "block.conv1", "block.conv2", "head"]
    assert {layer.weight_bits for layer in report.layers} == {8 if style == "tensorrt" else 7}
    assert [layer.weight_scales for layer in report.layers] == [8, 8, 8, 4]
    assert report.folded == {"stem.1": "stem.0", "block.bn1": "block.conv1", "block.bn2": "block.conv2"}
    assert report.validation == max(report.validation_ptq, report.validation_trained) > 0.9
    assert report.validation == fit.score(checkpoint.load(artifact).model, tiny, validation)
    assert report.calibration_sha256 == sha256(data / "calibration.npz")
    assert report.cost.multiply_adds_before == report.cost.multiply_adds_after
    assert report.cost.bytes_after < 0.4 * report.cost.bytes_before


def test_a_weight_is_rounded_channel_by_channel_and_an_input_as_a_whole() -> None:
    torch.manual_seed(0)
    layer, samples = nn.Conv2d(3, 4, 3), arrays(3, 6, 6)
    task = task_of(nn.Sequential(layer), {"x": ("float32", (3, 6, 6))})
    kernel, x = layer.weight.detach().clone().numpy(), samples["x"]
    model = nn.Sequential(layer)
    quantised(model, task, samples)
    got = model(torch.from_numpy(x)).detach().numpy()
    step = np.abs(x).max() / 127
    rounded = np.clip(np.round(x / step), -128, 127) * step
    for channel in range(4):
        step = np.abs(kernel[channel]).max() / 127
        kernel[channel] = np.round(kernel[channel] / step) * step
    expected = nn.functional.conv2d(torch.from_numpy(rounded), torch.from_numpy(kernel), layer.bias).detach().numpy()
    assert np.abs(got - expected).max() < 1e-4


def task_of(model: nn.Module, inputs: dict[str, Any]) -> Any:
    from types import SimpleNamespace

    metric = {"accuracy": lambda out, y: np.ones(len(y))}
    return SimpleNamespace(INPUTS=inputs, OUTPUTS=("y",), METRICS=metric, PREPROCESSING="p", model=lambda: model)


@pytest.mark.parametrize(
    ("method", "low", "high"), [("max", 1.0, 1.0), ("percentile", 0.6, 0.99), ("entropy", 0.3, 0.95)]
)
def test_a_range_is_what_the_method_says(method: str, low: float, high: float) -> None:
    samples = arrays(40, n=256)
    samples["x"] = np.random.default_rng(0).laplace(size=(256, 40)).astype(np.float32)
    model = nn.Sequential(nn.Linear(40, 3))
    quantised(model, task_of(model, {"x": ("float32", (40,))}), samples, calibration=method)
    found = float(model[0].input_quantizer.amax) / np.abs(samples["x"]).max()
    assert low <= found <= high or found == pytest.approx(low)


@pytest.mark.parametrize("style", STYLES)
def test_a_reloaded_model_predicts_the_same(made: Any, base: Path, data: Path, tiny: Any, style: str) -> None:
    parent, samples = checkpoint.load(base), read(data / "calibration.npz")
    model = parent.model
    plan = quantised(model, tiny, samples, style=style)
    folder = base.with_name(f"again-{style}")
    checkpoint.save(replace(parent, structure=(FakeQuantized(plan.settings()),)), folder)
    loaded = checkpoint.load(folder)
    again = fit.predict(loaded.model, tiny, samples)["logits"]
    assert np.array_equal(fit.predict(model, tiny, samples)["logits"], again)
    checkpoint.save(loaded, base.with_name("twice"))
    assert (base.with_name("twice") / checkpoint.FILE).read_bytes() == (folder / checkpoint.FILE).read_bytes()


def test_loading_needs_nothing_of_the_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tasks.qat", None)
    assert fake_quant.quantizers(checkpoint.load(made["tensorrt"][1]).model)


def test_a_pruned_model_is_quantised_and_reloaded(tiny: Any, workload_path: Path, data: Path, tmp_path: Path) -> None:
    """Pruning leaves a model of other widths than its architecture says."""
    samples, model = read(data / "calibration.npz"), tiny.model(width=8)
    plan = quantised(model, tiny, samples)
    kept = (FakeQuantized(plan.settings()),)
    checkpoint.save(checkpoint.Checkpoint(model, str(workload_path), {"width": 16}, kept), tmp_path)
    expected = fit.predict(model, tiny, samples)["logits"]
    assert np.array_equal(fit.predict(checkpoint.load(tmp_path).model, tiny, samples)["logits"], expected)


@pytest.mark.parametrize("style", STYLES)
def test_the_file_holds_integer_weights_with_a_scale_for_each_channel(made: Any, style: str) -> None:
    _, artifact, folder, report = made[style]
    proto = onnx_file.load(folder)
    constants = onnx_file.constants(proto.graph)
    pairs = {n.output[0]: n for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    products = [n for n in proto.graph.node if n.op_type in ("Conv", "Gemm")]
    assert len(products) == 4
    for node in products:
        activation, weight = (pairs[name] for name in node.input[:2])
        assert constants[weight.input[0]].dtype == np.int8 and not constants[weight.input[2]].any()
        assert constants[weight.input[1]].shape == (len(constants[weight.input[0]]),)
        assert constants[activation.input[1]].shape == () and activation.input[0] not in constants
        assert constants[activation.input[2]].dtype == (np.int8 if style == "tensorrt" else np.uint8)
        assert (node.input[2] in constants) == (style == "tensorrt"), "TensorRT takes no quantised bias"
        assert np.abs(constants[weight.input[0]]).max() <= (127 if style == "tensorrt" else 64)
    assert not onnx_file.fixed_axes(proto) and onnx_file.opset(proto) == 18
    assert "Dropout" not in {n.op_type for n in proto.graph.node}
    notes = onnx_file.notes(proto)
    assert notes["precision"] == "int8" and notes["model_sha256"] == sha256(artifact / checkpoint.FILE)
    assert notes["calibration_sha256"] == checkpoint.load(artifact).structure[-1].settings["calibration_sha256"]
    assert report.largest_error < 0.03


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimise", [False, True])
def test_onnx_runtime_gives_what_pytorch_s_fake_quantisation_gives(
    made: Any, data: Path, tiny: Any, style: str, optimise: bool
) -> None:
    _, artifact, folder, _ = made[style]
    samples = read(data / "validation.npz")
    expected = fit.predict(checkpoint.load(artifact).model, tiny, samples)["logits"]
    got = run(folder, {"image": samples["image"]}, optimise)
    assert noise(got, expected) < 0.02
    assert (got.argmax(1) == expected.argmax(1)).mean() > 0.98


def test_no_sum_brings_floating_point_back(made: Any, tmp_path: Path) -> None:
    """The fault: a residual sum left unquantised makes INT8 slower than floating point."""
    for style, floating in (("tensorrt", 1), ("onnxruntime", 0)):
        report, _, folder, _ = made[style]
        proto = onnx_file.load(folder)
        makers = {name: node.op_type for node in proto.graph.node for name in node.output}
        (add,) = [node for node in proto.graph.node if node.op_type == "Add"]
        assert [makers[name] for name in add.input].count("DequantizeLinear") == 2 - floating
        assert len(report.sums) == 1 and "block.conv2" in report.sums[0]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(str(made["onnxruntime"][2] / "model.onnx"), options)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert kinds["QLinearConv"] == 3 and not kinds["Conv"] and not kinds["FusedConv"]


def test_tensorrt_rtx_builds_the_file(made: Any, tmp_path: Path) -> None:
    from tasks.engines import tensorrt_rtx

    spec = BuildParams.model_validate({"from": "x", "backend": "tensorrt_rtx", "compute_capabilities": ["8.6"]})
    manifest = tensorrt_rtx.build(made["tensorrt"][2], tmp_path, spec).manifest
    assert manifest.precision_asked == "int8" and (tmp_path / manifest.engine_file).stat().st_size > 0


@pytest.mark.parametrize("style", STYLES)
def test_masks_of_a_sparse_parent_hold(made: Any, base: Path, style: str) -> None:
    _, artifact, folder, _ = made[style]
    loaded, mask = checkpoint.load(artifact), checkpoint.load(base).masks["block.conv1.weight"]
    assert torch.equal(loaded.masks["block.conv1.weight"], mask)
    assert not loaded.model.state_dict()["block.conv1.weight"][~mask].any()
    stored = onnx_file.constants(onnx_file.load(folder).graph)["block.conv1.weight_int8"]
    assert not stored[~mask.numpy()].any() and stored[mask.numpy()].any()


def test_training_that_ends_below_its_start_keeps_the_start_and_says_so(
    base: Path, data: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    report = qat.qat(base, data, base.with_name("worse"), params(lr=0.5))
    assert report.worse_than_ptq and report.kept == "ptq"
    assert report.validation == report.validation_ptq > report.validation_trained
    saved = checkpoint.load(base.with_name("worse")).model
    assert fit.score(saved, tiny, read(data / "validation.npz")) == report.validation_ptq
    start = checkpoint.load(base).model
    quantised(start, tiny, {name: values[:64] for name, values in read(data / "calibration.npz").items()})
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in start.state_dict().items())


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda x: x[:0], "is empty"),
        (lambda x: np.where(np.arange(len(x))[:, None, None, None] == 3, np.nan, x), "sample 3"),
        (lambda x: x.astype(np.float64), "another type"),
    ],
)
def test_unusable_calibration_data_is_a_fault(base: Path, data: Path, tmp_path: Path, spoil: Any, what: str) -> None:
    samples = read(data / "calibration.npz")
    write(tmp_path / "calibration.npz", {**samples, "image": spoil(samples["image"])})
    with pytest.raises(Fault, match=what):
        qat.qat(base, tmp_path, tmp_path / "target", params())
    assert not (tmp_path / "target").exists()


def test_a_layer_called_twice_is_stored_once_and_a_norm_that_stays_is_listed(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(self.conv(x))).mean((2, 3)))

    torch.manual_seed(0)
    model, samples = Twice().eval(), arrays(2, 4, 4)
    task = task_of(model, {"x": ("float32", (2, 4, 4))})
    _, skipped, _ = qat.quantize_model(model, task, samples, params(), "test")
    assert skipped == {"norm": "not folded: it or conv is called more than once"}
    to_qdq(model, task, tmp_path / "model.onnx", EXPORT, "tensorrt")
    proto = onnx.load(tmp_path / "model.onnx")
    stored = [i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.INT8 and len(i.dims) > 1]
    assert len(stored) == 2, "the weights of a layer called twice stand once"
    assert noise(run(tmp_path, {"x": samples["x"]}), fit.predict(model, task, samples)["y"]) < 0.02


def test_nothing_to_quantise_is_a_fault() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Softmax(1))
    with pytest.raises(Fault, match="nothing to quantise in test"):
        quantised(model, task_of(model, {"x": ("float32", (4,))}), arrays(4))


def test_a_layer_whose_weight_another_module_uses_is_left_and_listed() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.net(x, x, x, need_weights=False)[0][:, 0])

    model, samples = Attention(), arrays(5, 8)
    plan, skipped, _ = qat.quantize_model(
        model.eval(), task_of(model, {"x": ("float32", (5, 8))}), samples, params(), ""
    )
    assert plan.layers == ("head",) and "never called" in skipped["net.out_proj"]


def test_a_dead_channel_s_bias_fits_32_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), arrays(2, 2, 2)
    with torch.no_grad():
        model[0].weight[1] = 1e-15
        model[0].bias[1] = 3.0
    task = task_of(model, {"x": ("float32", (2, 2, 2))})
    quantised(model, task, samples, style="onnxruntime")
    to_qdq(model, task, tmp_path / "model.onnx", EXPORT, "onnxruntime")
    expected = fit.predict(model, task, samples)["y"]
    assert noise(run(tmp_path, {"x": samples["x"]}), expected) < 0.02
    assert noise(run(tmp_path, {"x": samples["x"]}, optimise=True), expected) < 0.02


def test_a_bias_that_training_moved_fits_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten()), arrays(2, 2, 2)
    with torch.no_grad():
        model[0].weight[1] = 1e-9
        model[0].bias[1] = 0.0
    task = task_of(model, {"x": ("float32", (2, 2, 2))})
    quantised(model, task, samples, style="onnxruntime")
    with torch.no_grad():
        model[0].bias[1] = 3.0
    to_qdq(model, task, tmp_path / "model.onnx", EXPORT, "onnxruntime")
    expected = fit.predict(model, task, samples)["y"]
    assert noise(run(tmp_path, {"x": samples["x"]}), expected) < 0.02
    monkeypatch.setattr(fake_quant, "bound_biases", lambda _: None)
    with pytest.raises(Fault, match=r"bias 0\.bias doesn't fit 32 bits"):
        to_qdq(model, task, tmp_path / "model.onnx", EXPORT, "onnxruntime")


def test_a_layer_whose_input_is_always_zero_keeps_its_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), arrays(4)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    task = task_of(model, {"x": ("float32", (4,))})
    quantised(model, task, samples, style="onnxruntime")
    to_qdq(model, task, tmp_path / "model.onnx", EXPORT, "onnxruntime")
    assert np.allclose(run(tmp_path, {"x": samples["x"]}), model[2].bias.detach().numpy(), atol=0.01)


def test_a_quantiser_of_what_is_never_negative_cuts_off_once() -> None:
    model, samples = nn.Sequential(nn.Linear(4, 3)), arrays(4)
    positive = {**samples, "x": np.abs(samples["x"])}
    plan = quantised(model, task_of(model, {"x": ("float32", (4,))}), positive, style="onnxruntime")
    again = nn.Sequential(nn.Linear(4, 3))
    fake_quant.restore(again, plan.settings())
    for made in (model, again):
        assert len(made[0].input_quantizer._forward_pre_hooks) == 1


@pytest.mark.parametrize("method", ["max", "percentile"])
def test_padding_doesn_t_widen_the_ranges_of_a_dynamic_axis(make_workload: Any, method: str) -> None:
    """The fault: in one batch of short and long samples, most of what calibration sees is padding."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids)).mean(1)

    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        model.table.weight.clamp_(-1, 1)[0] = 100.0
    task = make_workload(model, {"ids": ("int64", ("tokens",))})
    task.AXES, task.lengths = {"tokens": 12}, lambda inputs: (inputs["ids"] > 0).sum(1)
    used = np.random.default_rng(0).permutation(np.repeat([3, 12, 7], 16))
    ids = np.where(np.arange(12) < used[:, None], np.random.default_rng(0).integers(1, 8, (48, 12)), 0)
    quantised(model, task, {"ids": ids, "label": np.zeros(48, np.int64)}, calibration=method)
    assert float(model.head.input_quantizer.amax) <= 1


def test_values_that_calibration_never_saw_are_cut_off(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Linear(4, 3)), arrays(4)
    task, positive = task_of(model, {"x": ("float32", (4,))}), {**samples, "x": np.abs(samples["x"])}
    assert quantised(model, task, positive, style="onnxruntime").unsigned == ("0",)
    to_qdq(model, task, tmp_path / "model.onnx", EXPORT, "onnxruntime")
    expected = fit.predict(model, task, {**samples, "x": samples["x"].clip(0)})["y"]
    assert np.array_equal(fit.predict(model, task, samples)["y"], expected)
    assert np.allclose(run(tmp_path, {"x": samples["x"]}), expected, atol=0.01)


def test_a_transformer_on_its_dynamic_axis(text: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = {name: values[:64] for name, values in text.samples(0)[0].items()}
    model = text.model(layers=1).eval()
    model.net.classifier.weight.data *= 20  # An untrained head's outputs are smaller than their rounding.
    plan = quantised(model, text, samples)
    assert len(plan.layers) == 8 and not plan.folded
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        to_qdq(model, text, tmp_path / name / "model.onnx", EXPORT, "tensorrt")
    assert (tmp_path / "a/model.onnx").read_bytes() == (tmp_path / "b/model.onnx").read_bytes()
    for length, batch in ((12, 3), (5, 1)):
        part = {name: values[:batch] for name, values in samples.items()}
        inputs = {name: part[name][:, :length] for name in text.INPUTS}
        expected = fit.predict(model, text, {**inputs, "label": part["label"]})["logits"]
        assert noise(run(tmp_path / "a", inputs), expected) < 0.03
    proto = onnx.load(tmp_path / "a/model.onnx")
    constants = onnx_file.constants(proto.graph)
    pairs = {n.output[0]: n for n in proto.graph.node if n.op_type == "DequantizeLinear"}
    weights = [pairs[n.input[1]] for n in proto.graph.node if n.op_type == "MatMul" and n.input[1] in pairs]
    rounded = Counter(n.input[0] for n in proto.graph.node if n.op_type == "QuantizeLinear")
    assert sum(rounded.values()) == 6 and set(rounded.values()) == {1}, "the projections read one tensor, rounded once"
    assert len(weights) == 6, "three projections and three dense layers, no transpose between scale and product"
    for node in weights:
        assert constants[node.input[1]].shape == (constants[node.input[0]].shape[1],)
        assert next(a.i for a in node.attribute if a.name == "axis") == 1


def test_an_opset_that_the_exporter_doesn_t_write_is_a_fault(tiny: Any, tmp_path: Path) -> None:
    opset = ExportParams.model_validate({"from": "x", "opset": 21})
    with pytest.raises(Fault, match="expected: 18 to 20"):
        to_qdq(nn.Identity(), tiny, tmp_path / "model.onnx", opset, "tensorrt")

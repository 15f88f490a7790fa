"""Every numeric format from one nasty little residual net: twice-used names, a dead channel, a clash of names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import modelopt_child, onnx_file, proof, quantize_int8, quantize_weights
from tasks.calibration_ranges import Grid, choose, observe
from tasks.data import write
from tasks.errors import Fault
from tasks.files import sha256
from tasks.quantize import QuantizeReport, made, maker_of, nodes, quantize
from tasks.quantize_nodes import prepared
from tasks.quantize_weights import blocks
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import load_workload

WIDTH = 32
WORKLOAD = """
NAME = PREPROCESSING = "net"
INPUTS, OUTPUTS = {"image": ("float32", (8, 6, 6))}, ("logits",)
METRICS = {"accuracy": lambda outputs, labels: (outputs["logits"].argmax(1) == labels).astype("float64")}
samples = model = loss = None
"""
FORMATS = {
    "int8": ({}, 18),
    "int8-dynamic": ({"activations": "dynamic"}, 25),
    "int8-trt": ({"style": "tensorrt", "calibration": "percentile", "percentile": 99.0}, 18),
    "fp8": ({"format": "fp8", "calibration": "mse"}, 18),
    "int4": ({"format": "int4", "block": 16}, 15),
    "fp16": ({"format": "fp16"}, 50),
    "bf16": ({"format": "bf16"}, 30),
}
MODELOPT = ("int8-trt", "fp8", "fp16", "bf16")


def params(name: str = "int8", **changes: Any) -> QuantizeParams:
    common = {"from": "net", "samples": 24, "batch": 8, "calibration": "minmax"}
    return QuantizeParams.model_validate({**common, **FORMATS[name][0], **changes})


def net() -> onnx.ModelProto:
    """Two convolutions, a residual block whose convolutions share a name, a branch of zeros, a linear head."""
    rng = np.random.default_rng(0)

    def conv(i: int, o: int) -> np.ndarray:
        return rng.normal(0, np.sqrt(2 / (9 * i)), (o, i, 3, 3)).astype(np.float32)

    weights = {
        "stem.w": conv(8, WIDTH),
        "one.w": conv(WIDTH, WIDTH),
        "two.w": conv(WIDTH, WIDTH),
        "dead.w": conv(WIDTH, WIDTH),
        "head.w": rng.normal(0, 0.2, (16, WIDTH)).astype(np.float32),
        "one.b": rng.normal(0, 0.1, WIDTH).astype(np.float32),
        "low": np.full((1, WIDTH, 1, 1), -1000, np.float32),
        "head.b": rng.normal(0, 0.1, 16).astype(np.float32),
    }
    pads = {"pads": [1, 1, 1, 1]}
    nodes_ = [
        helper.make_node("Conv", ["image", "stem.w"], ["stem"], "conv", **pads),
        helper.make_node("Relu", ["stem"], ["image_scale"], "relu"),
        helper.make_node("Conv", ["image_scale", "one.w", "one.b"], ["one"], "conv", **pads),
        helper.make_node("Relu", ["one"], ["inner"]),
        helper.make_node("Conv", ["inner", "two.w"], ["two"], "conv", **pads),
        helper.make_node("Add", ["two", "image_scale"], ["sum"], "residual"),
        helper.make_node("Relu", ["sum"], ["out"], "relu"),
        helper.make_node("Add", ["out", "low"], ["lowered"], "lower"),
        helper.make_node("Relu", ["lowered"], ["zeros"], "kill"),
        helper.make_node("Conv", ["zeros", "dead.w"], ["nothing"], "dead", **pads),
        helper.make_node("Add", ["out", "nothing"], ["both"], "join"),
        helper.make_node("GlobalAveragePool", ["both"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "head.w", "head.b"], ["logits"], "head", transB=1),
    ]
    graph = helper.make_graph(
        nodes_,
        "net",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 8, 6, 6])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 16])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


SERVER = """
import json, os, runpy, sys, traceback
say = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import modelopt.onnx.autocast, modelopt.onnx.quantization
for line in sys.stdin:
    job, log = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=say, flush=True)
        continue
    code = 1
    try:
        for end in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), end)
        os.chdir(os.path.dirname(job))
        sys.argv = ["modelopt_child", job]
        runpy.run_module("tasks.modelopt_child", run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush(), os._exit(code)
"""


class Forked:
    """A child process as `modelopt_child` starts them, forked from one that has imported ModelOpt already."""

    def __init__(self, server: subprocess.Popen[str], command: list[str], log: str) -> None:
        assert server.stdin and server.stdout
        print(json.dumps([command[-1], log]), file=server.stdin, flush=True)
        self._said, self._code = server.stdout, None

    def wait(self, timeout: float) -> int:
        self._code = int(self._said.readline())
        return self._code

    def poll(self) -> int | None:
        return self._code


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Importing ModelOpt takes seconds: each job still has a process of its own, but they share that."""
    command, ends = [sys.executable, "-c", SERVER], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(modelopt_child.ROOT)}
    with subprocess.Popen(command, text=True, env=environment, **ends) as server:
        forked = SimpleNamespace(
            Popen=lambda command, stdout, **_: Forked(server, command, str(stdout.name)),
            STDOUT=subprocess.STDOUT,
            TimeoutExpired=subprocess.TimeoutExpired,
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(modelopt_child, "subprocess", forked)
            yield


class Project:
    """The net as export would leave it, its data, and each format's artifact, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.data = folder, folder / "net", folder / "data"
        self.workload = folder / "workload.py"
        self.workload.write_text(WORKLOAD)
        self.source.mkdir()
        onnx.save(net(), self.source / onnx_file.FILE)
        rng = np.random.default_rng(1)
        self.images = rng.normal(size=(24, 8, 6, 6)).astype(np.float32)
        for split in ("calibration", "validation"):
            write(self.data / f"{split}.npz", {"image": self.images, "label": rng.integers(0, 16, 24)})
        proof.save(self.source, {"image": self.images[:8]}, {"logits": np.zeros((8, 16), np.float32)})
        self.digest = sha256(self.source)
        self.reports: dict[str, QuantizeReport] = {}

    def make(self, name: str, again: str = "", **changes: Any) -> Path:
        folder = self.folder / f"made-{name}{again}"
        if name not in self.reports or again:
            report = quantize(self.source, self.workload, self.data, folder, params(name, **changes))
            self.reports.setdefault(name, report)
        return folder

    @property
    def task(self) -> Any:
        return load_workload(self.workload)

    @property
    def samples(self) -> dict[str, np.ndarray]:
        return {"image": self.images, "label": np.zeros(24, np.int64)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("net"))


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return onnx_file.constants(model.graph)


def node(model: onnx.ModelProto, name: str) -> Any:
    return next(n for n in model.graph.node if n.name == name)


def maker_of_input(model: onnx.ModelProto, name: str) -> Any:
    return next((n for n in model.graph.node if name in n.output), None)


def dequantized(model: onnx.ModelProto, name: str) -> bool:
    made_by = maker_of_input(model, name)
    return made_by is not None and made_by.op_type == "DequantizeLinear"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_keeps_near_its_parent_and_says_what_it_is(project: Project, name: str) -> None:
    folder = project.make(name)
    report, model = project.reports[name], onnx_file.load(folder)
    settings = params(name)
    assert report.format == onnx_file.notes(model)["precision"] == settings.format
    assert report.snr_db["logits"] > FORMATS[name][1]
    assert report.cosine["logits"] > 0.95
    assert sha256(project.source) == project.digest
    assert sorted(f.name for f in folder.iterdir()) == ["model.onnx", "proof.npz"]
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert kinds == dict.fromkeys(("image", "logits"), TensorProto.FLOAT)
    assert not onnx_file.fixed_axes(model)
    onnx.checker.check_model(model)


@pytest.mark.parametrize("name", FORMATS)
def test_how_it_was_calibrated_is_part_of_the_file(project: Project, name: str) -> None:
    notes = onnx_file.notes(onnx_file.load(project.make(name)))
    report = project.reports[name]
    if name in ("int4", "int8-dynamic"):
        assert not {"calibration", "samples", "batch", "calibration_sha256"} & notes.keys()
        assert (report.calibration, report.calibration_samples, report.calibration_sha256) == (None, 0, None)
        return
    method = "minmax" if name in ("fp16", "bf16") else params(name).calibration
    assert (notes["calibration"], notes["samples"], notes["batch"]) == (method, "24", "8")
    assert notes["calibration_sha256"] == report.calibration_sha256 == sha256(project.data / "calibration.npz")
    assert (report.calibration, report.calibration_samples, report.calibration_batch) == (method, 24, 8)
    assert ("percentile" in notes) == (name == "int8-trt")


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4", "fp16"])
def test_an_identical_rebuild_is_identical(project: Project, name: str) -> None:
    first = project.make(name)
    assert sha256(first) == sha256(project.make(name, "-again"))


@pytest.mark.parametrize("change", [{"samples": 16}, {"batch": 4}, {"calibration": "mse"}])
def test_another_calibration_is_another_file(project: Project, change: dict[str, Any]) -> None:
    other = project.make("int8", f"-{'-'.join(change)}", **change)
    assert sha256(other / "model.onnx") != sha256(project.make("int8") / "model.onnx")


def test_modelopt_leaves_no_patch_behind(project: Project) -> None:
    for name in MODELOPT:
        project.make(name)
    from onnxruntime.quantization import calibrate
    from onnxruntime.quantization.registry import QDQRegistry

    assert "Relu" in QDQRegistry
    patched = (calibrate.create_calibrator, calibrate.HistogramCollector.collect_value)
    assert {f.__module__ for f in patched} == {"onnxruntime.quantization.calibrate"}
    assert "modelopt.onnx.quantization.ort_patching" not in sys.modules


def test_onnxruntimes_style_has_pairs_on_both_inputs_of_a_residual_add(project: Project) -> None:
    model = onnx_file.load(project.make("int8"))
    assert [dequantized(model, name) for name in node(model, "residual").input] == [True, True]


def test_tensorrts_style_has_a_pair_on_the_shortcut_and_lets_the_convolution_fuse(project: Project) -> None:
    for name in ("int8-trt", "fp8"):
        model = onnx_file.load(project.make(name))
        branch, shortcut = node(model, "residual").input
        assert maker_of_input(model, branch).op_type == "Conv"
        assert dequantized(model, shortcut)


@pytest.mark.parametrize(("name", "zero"), [("int8-trt", TensorProto.INT8), ("fp8", TensorProto.FLOAT8E4M3FN)])
def test_tensorrts_style_is_symmetric_per_channel_and_leaves_biases_alone(
    project: Project, name: str, zero: int
) -> None:
    model = onnx_file.load(project.make(name))
    known = constants(model)
    types = {i.name: i.data_type for i in model.graph.initializer}
    pairs = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert pairs
    assert {types[n.input[2]] for n in pairs} == {zero}
    assert not any(np.asarray(known[n.input[2]], np.float32).any() for n in pairs)
    convolutions = [n for n in model.graph.node if n.op_type == "Conv" and dequantized(model, n.input[1])]
    assert len(convolutions) >= 3
    for conv in convolutions:
        assert known[maker_of_input(model, conv.input[1]).input[1]].shape == (WIDTH,)
        assert not any(dequantized(model, bias) for bias in conv.input[2:])


@pytest.mark.parametrize(("name", "largest"), [("int8-trt", 127), ("fp8", 448)])
def test_activation_scales_are_our_ranges_of_the_parents_tensors(project: Project, name: str, largest: float) -> None:
    model, settings = onnx_file.load(project.make(name)), params(name)
    scales = {n.input[0]: n.input[1] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    image = {"image": project.images}
    seen = observe(prepared(net()), ["inner"], image, 8, settings.calibration)["inner"]
    top = choose(seen, settings.calibration, Grid(settings.format), settings.percentile)[1]
    assert float(constants(model)[scales["inner"]]) == pytest.approx(top / largest, rel=1e-5)
    if name == "int8-trt":
        assert top < seen.largest


@pytest.mark.parametrize("name", ["int8", "int8-trt"])
def test_a_tensor_of_zeros_has_a_usable_scale(project: Project, name: str) -> None:
    model = onnx_file.load(project.make(name))
    known = constants(model)
    scale = {n.input[0]: known[n.input[1]] for n in model.graph.node if n.op_type == "QuantizeLinear"}["zeros"]
    assert np.isfinite(scale)
    assert scale > 0


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4"])
def test_what_settings_keep_stays_and_is_told(project: Project, name: str) -> None:
    settings = params(name, keep=("dead",) if name == "int8" else ("head",))
    if name == "int8":
        maker = maker_of(project.source, project.folder, project.samples, project.task, settings)
        assert maker.kept == {"dead": "keep: dead"}
        assert "dead" not in maker.nodes
        model = maker.make(())
        assert not any(dequantized(model, n) for n in node(model, "dead").input)
        return
    # The head is the only product of constant weights that fits.
    with pytest.raises(Fault, match="nothing was quantised"):
        quantize(project.source, project.workload, project.data, project.folder / "kept", settings)


def test_a_pattern_that_names_nothing_is_refused_with_near_names(project: Project) -> None:
    with pytest.raises(Fault, match="keep names nothing") as caught:
        nodes(project.source, project.samples, project.task, params(keep=("residul",)))
    assert "residual" in caught.value.do


def test_a_node_is_left_alone_on_request_in_either_style(project: Project) -> None:
    for name in ("int8", "int8-trt"):
        maker = maker_of(project.source, project.folder, project.samples, project.task, params(name))
        assert {"conv", "conv.1", "conv.2"} <= set(maker.nodes)
        model = maker.make(("conv.1",))
        assert not any(dequantized(model, n) for n in node(model, "conv.1").input[1:])
        assert dequantized(model, node(model, "conv.2").input[1])
        alone = maker.make(tuple(n for n in maker.nodes if n != "conv.1"))
        assert dequantized(alone, node(alone, "conv.1").input[1])
        assert not dequantized(alone, node(alone, "conv.2").input[1])
        whole, first = maker.make(()), onnx_file.load(project.make(name))
        onnx_file.annotate(whole, onnx_file.notes(first))
        assert whole.SerializeToString() == first.SerializeToString()


def test_made_is_the_steps_file_without_its_notes(project: Project, tmp_path: Path) -> None:
    made(project.source, tmp_path, project.samples, project.task, params("int8"))
    got, want = onnx_file.load(tmp_path), onnx_file.load(project.make("int8"))
    assert "precision" not in onnx_file.notes(got)
    onnx_file.annotate(got, onnx_file.notes(want))
    assert got.SerializeToString() == want.SerializeToString()


def test_a_search_is_in_the_report_and_its_nodes_are_kept(project: Project) -> None:
    search = {"budget": 0.9, "samples": 8}
    report = quantize(project.source, project.workload, project.data, project.folder / "s", params(search=search))
    assert report.search is not None
    assert set(report.search.kept) <= report.kept.keys()
    assert report.search.within_budget
    assert json.dumps(report.kept) == json.dumps(dict.fromkeys(report.search.kept, "search"))


def test_int4_weights_are_whole_numbers_of_four_bits_with_a_scale_per_block() -> None:
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(32, 3)).astype(np.float32)
    weight[16:, 1] = 0
    whole, scale = blocks(weight, 16)
    assert scale.shape == (2, 3)
    assert scale[1, 1] == 1
    for column in range(3):
        for block in range(2):
            part = weight[16 * block : 16 * (block + 1), column]
            step = max(abs(part)) / 7 or 1.0
            assert scale[block, column] == pytest.approx(step)
            assert whole[16 * block : 16 * (block + 1), column].tolist() == [round(v / step) for v in part]


def test_int4_is_in_the_file_by_blocks_and_what_doesnt_fit_is_told(project: Project) -> None:
    model, report = onnx_file.load(project.make("int4")), project.reports["int4"]
    (pair,) = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
    attributes = {a.name: helper.get_attribute_value(a) for a in pair.attribute}
    assert (attributes["axis"], attributes["block_size"]) == (0, 16)
    assert {i.name: i.data_type for i in model.graph.initializer}[pair.input[0]] == TensorProto.INT4
    assert onnx_file.opset(model) == 21
    assert report.quantize_nodes == 0
    assert set(report.kept) == {"conv", "conv.1", "conv.2", "dead"}
    with pytest.raises(Fault, match="nothing was quantised") as caught:
        maker_of(project.source, project.folder, project.samples, project.task, params("int4", block=128))
    assert "32 inputs: not a multiple of 128" in str(caught.value.got)


def test_a_weight_used_twice_is_held_once_and_may_stay_for_one_of_its_readers(tmp_path: Path) -> None:
    weight = np.random.default_rng(3).normal(0, 0.3, (16, 16)).astype(np.float32)
    products = [helper.make_node("MatMul", [a, "w"], [b], f"product_{b}") for a, b in (("x", "m"), ("m", "y"))]
    shapes = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 16]) for n in ("x", "y")]
    graph = helper.make_graph(products, "g", shapes[:1], shapes[1:], [numpy_helper.from_array(weight, "w")])
    twice = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x = {"x": np.random.default_rng(4).normal(size=(24, 16)).astype(np.float32)}
    makers = {
        TensorProto.INT4: quantize_weights.maker(twice, params("int4")),
        TensorProto.INT8: quantize_int8.static(twice, tmp_path, x, params("int8")),
    }
    for kind, maker in makers.items():
        assert maker.nodes == ["product_m", "product_y"]
        held = [i for i in maker.make(()).graph.initializer if i.data_type == kind and i.dims]
        assert [list(i.dims) for i in held if len(i.dims) == 2] == [[16, 16]]
        model = maker.make(("product_m",))
        assert node(model, "product_m").input[1] == "w"
        assert dequantized(model, node(model, "product_y").input[1])


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_what_is_too_large_for_half_precision_stays_and_is_told(project: Project, name: str) -> None:
    folder = project.make(name)
    report, model = project.reports[name], onnx_file.load(folder)
    assert report.half_nodes >= 5
    assert {"lower", "kill"} <= {n for n, why in report.kept.items() if why.startswith("data_max: its values reach 1")}
    kinds = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    assert kinds[node(model, "kill").output[0]] == TensorProto.FLOAT
    half = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[name]
    assert kinds[node(model, "conv.1").output[0]] == half
    assert ("rounded to BF16" in report.compared_by) == (name == "bf16")


def test_modelopt_without_samples_is_refused(tmp_path: Path) -> None:
    for batch in ({}, {"image": np.zeros((0, 8, 6, 6), np.float32)}):
        with pytest.raises(Fault, match="no calibration samples") as caught:
            modelopt_child.place(net(), "int8", tmp_path, batch)
        assert "random data" in str(caught.value.expected)


NO_RANDOM = """
import json, sys
import modelopt.onnx.autocast.referencerunner as runner
import modelopt.onnx.quantization.calib_utils as utils
import modelopt.onnx.quantization.quantize
quantize = sys.modules["modelopt.onnx.quantization.quantize"]
def refused(*_, **__): raise SystemExit("random data")
runner.ReferenceRunner.run = utils.RandomDataProvider.__init__ = quantize.RandomDataProvider.__init__ = refused
from tasks import modelopt_child
for job in sys.argv[1:]:
    job = json.loads(job)
    (modelopt_child._autocast if job["kind"] == "fp16" else modelopt_child._place)(job)
"""


def test_modelopt_takes_no_random_data(tmp_path: Path) -> None:
    onnx.save(prepared(net()), tmp_path / "given.onnx")
    np.savez(tmp_path / "batch.npz", image=np.ones((4, 8, 6, 6), np.float32))
    common = {"source": str(tmp_path / "given.onnx"), "batch": str(tmp_path / "batch.npz")}
    half = {"exclude": [], "large": [], "init_max": 65504.0}
    jobs = [
        {**common, **half, "kind": "fp16", "target": str(tmp_path / "fp16.onnx")},
        {**common, "kind": "int8", "target": str(tmp_path / "int8.onnx")},
    ]
    command = [sys.executable, "-c", NO_RANDOM, *map(json.dumps, jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert (tmp_path / "fp16.onnx").is_file()
    assert (tmp_path / "int8.onnx").is_file()


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelopt_child, "subprocess", subprocess)
    with pytest.raises(Fault, match="ModelOpt made no int8 model") as caught:
        modelopt_child._run({"kind": "int8"}, net(), tmp_path)
    assert "exit status 1; KeyError: 'batch'" in str(caught.value.got)
    assert "killed by SIGKILL" in str(modelopt_child.died("fp8", -9, "").got)

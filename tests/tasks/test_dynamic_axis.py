"""A model on a dynamic axis, from export through quantisation to engines of every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tasks import checkpoint, manifest, measure, onnx_file
from tasks.data import data, read
from tasks.engines.protocol import backend as backend_of
from tasks.engines.protocol import open_engine
from tasks.errors import Fault
from tasks.evaluate import run
from tasks.export import export
from tasks.fit import predict
from tasks.quantize import quantize
from tasks.settings import BuildParams, DataParams, ExportParams, QuantizeParams
from tasks.structure import Tied
from tasks.workloads import protocol
from tasks.workloads.protocol import load_workload

TEXT = Path(__file__).resolve().parent.parent / "tiny/text.py"
ENGINES = ("eager", "ort", "dynamic")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, text: Any) -> Path:
    """A folder with a text model, its ONNX file, its dynamic INT8 file, and an engine of each backend."""
    root = tmp_path_factory.mktemp("text")
    data(TEXT, root / "data", DataParams(train=200, calibration=64, validation=60, test=80))
    torch.manual_seed(0)
    checkpoint.save(checkpoint.Checkpoint(text.model(layers=2), str(TEXT), {"layers": 2}), root / "model")
    export(root / "model", root / "data", root / "onnx", ExportParams.model_validate({"from": "model"}))
    settings = QuantizeParams.model_validate({"from": "onnx", "activations": "dynamic", "samples": 64})
    quantize(root / "onnx", TEXT, root / "data", root / "int8", settings)
    for name, source, backend in (
        ("eager", "model", "eager"),
        ("ort", "onnx", "onnxruntime"),
        ("dynamic", "int8", "onnxruntime"),
        ("rtx", "onnx", "tensorrt_rtx"),
    ):
        (root / name).mkdir()
        spec = BuildParams.model_validate({"from": source, "backend": backend})
        manifest.write(root / name, backend_of(backend).build(root / source, root / name, spec).manifest)
    return root


def test_both_axes_are_free_in_the_file(made: Path) -> None:
    model = onnx_file.load(made / "onnx")
    for value in model.graph.input:
        assert all(dim.dim_param for dim in value.type.tensor_type.shape.dim)
    assert onnx_file.axes(model) == {"tokens": 12}


@pytest.mark.parametrize("name", (*ENGINES, "rtx"))
def test_the_manifest_names_the_axis_and_its_largest_size(made: Path, name: str) -> None:
    described = manifest.read(made / name)
    assert described.axes == {"tokens": 12}
    assert {i.name: i.shape for i in described.inputs} == {
        "input_ids": (None, "tokens"),
        "attention_mask": (None, "tokens"),
    }
    assert described.outputs[0].shape == (None, 2)


@pytest.mark.parametrize(("name", "tolerance"), [("eager", 1e-6), ("ort", 1e-4), ("dynamic", 0.05)])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 12), (7, 5)])
def test_an_engine_takes_any_batch_and_length(
    made: Path, text: Any, name: str, tolerance: float, batch: int, length: int
) -> None:
    inputs = protocol.cut(text, {k: v[:batch] for k, v in read(made / "data/test.npz").items()}, length)
    inputs = {k: np.ascontiguousarray(inputs[k]) for k in text.INPUTS}
    with torch.inference_mode():
        want = checkpoint.load(made / "model").model(*(torch.from_numpy(inputs[k]) for k in text.INPUTS)).numpy()
    with open_engine(made / name) as session:
        got = session.run(inputs)["logits"]
    assert got.shape == (batch, 2)
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("length", [0, 13])
def test_a_length_out_of_range_is_refused(made: Path, text: Any, name: str, length: int) -> None:
    inputs = {k: np.ones((2, length), dtype=np.int64) for k in text.INPUTS}
    with open_engine(made / name) as session, pytest.raises(Fault, match="input input_ids doesn't fit") as caught:
        session.run(inputs)
    assert "tokens 1 to 12" in str(caught.value)


def test_evaluation_cuts_batches_of_like_lengths_and_gives_the_padded_answers(made: Path, text: Any) -> None:
    samples, seen = read(made / "data/test.npz"), []
    want = predict(checkpoint.load(made / "model").model, text, samples)["logits"]
    with open_engine(made / "ort") as session:
        inner = session.run
        session.run = lambda batch: (seen.append(batch["input_ids"].shape), inner(batch))[1]  # type: ignore[method-assign]
        got = run(session, text, samples, 4)["logits"]
    np.testing.assert_allclose(got, want, atol=1e-4)
    used = np.sort(text.lengths(samples))
    assert seen == [(4, int(used[i : i + 4].max())) for i in range(0, 80, 4)]


@pytest.mark.parametrize(("length", "width"), [(None, 12), (7, 7)])
def test_timing_is_of_one_length(made: Path, length: int | None, width: int) -> None:
    specs = manifest.read(made / "ort").inputs
    inputs = measure.inputs_of(specs, read(made / "data/validation.npz"), length)
    assert {v.shape for v in inputs.values()} == {(60, width)}
    assert all(v.flags.c_contiguous for v in inputs.values())


def test_dynamic_int8_holds_integers_and_needs_no_calibration(made: Path) -> None:
    model = onnx_file.load(made / "int8")
    kinds = [node.op_type for node in model.graph.node]
    # Six linear layers of each of two Transformer layers, the pooler and the head.
    assert kinds.count("MatMulInteger") == 14
    assert "calibration_sha256" not in onnx_file.notes(model)
    constants = onnx_file.constants(model.graph)
    weights = [constants[n.input[1]] for n in model.graph.node if n.op_type == "MatMulInteger"]
    assert all(w.dtype == np.int8 and np.abs(w.astype(int)).max() <= 64 for w in weights)
    scales = [a for name, a in constants.items() if name.endswith("_scale") and a.size > 1]
    assert len(scales) >= 14, "weights are quantised per channel"


def test_dynamic_int8_of_shared_layers_is_integers_once(made: Path, tmp_path: Path, text: Any) -> None:
    structure = (Tied("net.bert.encoder.layer.1", "net.bert.encoder.layer.0"),)
    model = text.model(layers=2)
    structure[0].apply(model)
    checkpoint.save(checkpoint.Checkpoint(model, str(TEXT), {"layers": 2}, structure), tmp_path / "model")
    export(tmp_path / "model", made / "data", tmp_path / "onnx", ExportParams.model_validate({"from": "model"}))
    settings = QuantizeParams.model_validate({"from": "onnx", "activations": "dynamic", "samples": 64})
    report = quantize(tmp_path / "onnx", TEXT, made / "data", tmp_path / "int8", settings)
    assert report.dynamic_nodes == 14
    assert report.snr_db["logits"] > 15
    held = {i.name for i in onnx_file.load(tmp_path / "int8").graph.initializer if i.data_type == onnx.TensorProto.INT8}
    assert len([name for name in held if name.endswith("_quantized")]) <= 8 + 3


def test_dynamic_int8_of_a_model_without_products_is_refused(tmp_path: Path, tiny: Any, artifact: Any) -> None:
    settings = QuantizeParams.model_validate({"from": "base-onnx", "activations": "dynamic"})
    path = tmp_path / "onnx"
    path.mkdir()
    model = onnx_file.load(artifact("base-onnx"))
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["image"], ["logits"])],
        "g",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 1, 8, 8])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 1, 8, 8])],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=model.opset_import), path / "model.onnx")
    source = artifact("base").parent.parent
    with pytest.raises(Fault, match="nothing was quantised"):
        quantize(path, TEXT.with_name("workload.py"), source / "data", tmp_path / "int8", settings)


def test_dynamic_needs_no_calibration_settings(tmp_path: Path, tiny_params: dict[str, Any]) -> None:
    from tasks.check import faults

    raw = {**tiny_params, "quantize": {**tiny_params["quantize"]}}
    raw["quantize"]["d"] = {"from": "base-onnx", "activations": "dynamic", "style": "tensorrt", "samples": 8}
    found = faults(raw, models=False)
    assert [line.split(":")[0] for line in found] == ["quantize.d.samples", "quantize.d.activations"]


@pytest.mark.parametrize(
    ("axes", "lengths"),
    [("{}", "lengths = None"), ("{'tokens': 4}", ""), ("{'tokens': 4, 'more': 2}", "lengths = len")],
)
def test_an_axis_that_is_not_described_is_a_fault(write_workload: Any, axes: str, lengths: str) -> None:
    path = write_workload(
        "NAME = PREPROCESSING = 'own'\nINPUTS = {'ids': ('int64', ('tokens',))}\nOUTPUTS, METRICS = ('y',), {}\n"
        f"samples = model = loss = None\nAXES = {axes}\n{lengths}\n"
    )
    with pytest.raises(Fault, match="dynamic axis that it doesn't describe"):
        load_workload(path)

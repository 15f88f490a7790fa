"""ONNX files: sidecars, shapes, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import onnx_file
from tasks.errors import Fault
from tasks.files import size_bytes


def model_of(batch: int | str | None, opset: int = 18) -> onnx.ModelProto:
    """y = x + w, with the given first axis."""
    shape = None if batch is None else [batch, 2]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [] if shape is None else shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.array([1.0, 2.0], np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("other", 3), helper.make_opsetid("", opset)])


@pytest.fixture
def with_sidecar(tmp_path: Path) -> Path:
    onnx.save(model_of("n"), tmp_path / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    return tmp_path


def test_weights_are_read_from_the_sidecar(with_sidecar: Path) -> None:
    model = onnx_file.load(with_sidecar)
    assert numpy_helper.to_array(model.graph.initializer[0]).tolist() == [1, 2]


def test_a_sidecar_counts_in_the_size(with_sidecar: Path) -> None:
    bare = (with_sidecar / "model.onnx").stat().st_size
    assert size_bytes(with_sidecar) == bare + (with_sidecar / "w.data").stat().st_size > bare


def test_a_missing_sidecar_is_named(with_sidecar: Path) -> None:
    assert onnx_file.sidecars(onnx.load(with_sidecar / "model.onnx", load_external_data=False)) == ["w.data"]
    (with_sidecar / "w.data").unlink()
    with pytest.raises(Fault, match="lost its external data") as caught:
        onnx_file.load(with_sidecar)
    assert f"no file {with_sidecar / 'w.data'}" in str(caught.value)


@pytest.mark.parametrize("content", [b"not a model", b"\xff" * 100])
def test_a_file_that_is_no_onnx_is_a_fault_with_its_size(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(Fault, match="is not an ONNX file") as caught:
        onnx_file.load(tmp_path)
    assert f"{len(content)} bytes" in str(caught.value)


def test_an_empty_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(Fault, match="is not an ONNX file"):
        onnx_file.load(tmp_path)


def test_a_missing_model_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no model"):
        onnx_file.load(tmp_path)


@pytest.mark.parametrize(
    ("batch", "faults"), [("n", []), (8, ["x axis 0 is 8"]), (1, ["x axis 0 is 1"]), (None, ["x has no batch axis"])]
)
def test_fixed_axes_are_named(batch: int | str | None, faults: list[str]) -> None:
    assert onnx_file.fixed_axes(model_of(batch)) == faults


def test_opset_is_that_of_the_default_domain() -> None:
    assert onnx_file.opset(model_of("n", 20)) == 20


def test_notes_replace_what_was_there() -> None:
    model = model_of("n")
    onnx_file.annotate(model, {"old": "1"})
    onnx_file.annotate(model, {"b": "2", "a": "1"})
    assert list(onnx_file.notes(model).items()) == [("a", "1"), ("b", "2")]


def test_a_sidecar_that_was_cut_off_is_a_fault(with_sidecar: Path) -> None:
    (with_sidecar / "w.data").write_bytes(b"1")
    with pytest.raises(Fault, match="doesn't fit its external data"):
        onnx_file.load(with_sidecar)


def branched() -> onnx.ModelProto:
    """y = x + w inside both branches of an If, and a Constant of each form beside it."""

    def branch(name: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("Add", ["x", f"w_{name}"], [f"y_{name}"])],
            name,
            [],
            [helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, ["n", 2])],
            [numpy_helper.from_array(np.array([1.0, 2.0], np.float32), f"w_{name}")],
        )

    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
            helper.make_node("Constant", [], ["half"], value_float=0.5),
            helper.make_node("Constant", [], ["both"], value_floats=[1.0, 2.0]),
            helper.make_node("If", ["yes"], ["y"], then_branch=branch("then"), else_branch=branch("else")),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_sidecars_of_inner_graphs_are_named(tmp_path: Path) -> None:
    assert {g.name for g in onnx_file.graphs(branched().graph)} == {"g", "then", "else"}
    onnx.save(branched(), tmp_path / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "w.data").unlink()
    with pytest.raises(Fault, match="lost its external data"):
        onnx_file.load(tmp_path)


def test_transposed_weights_are_folded_for_readers_in_branches_too() -> None:
    def branch(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("Transpose", ["w"], ["out"], perm=[1, 0]),
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            then_branch=branch("then", helper.make_node("MatMul", ["x", "t"], ["then"])),
            else_branch=branch("else", helper.make_node("Identity", ["x"], ["else"])),
        ),
    ]
    shapes = {"x": ["n", 3], "y": None, "out": [3, 2]}
    values = {k: helper.make_tensor_value_info(k, TensorProto.FLOAT, shape) for k, shape in shapes.items()}
    c = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    graph = helper.make_graph(nodes, "g", [values["x"], c], [values["y"], values["out"]], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    feed = {"x": np.ones((1, 3), np.float32), "c": np.array(True)}

    def run() -> list[Any]:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return list(session.run(None, feed))

    before = run()
    onnx_file.fold_transposes(model.graph)
    assert [n.op_type for n in model.graph.node] == ["Transpose", "If"], "an output stays"
    for one, other in zip(before, run(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_constants_are_found_in_every_form() -> None:
    found = onnx_file.constants(branched().graph)
    assert {name: value.tolist() for name, value in found.items()} == {"yes": True, "half": 0.5, "both": [1.0, 2.0]}
    assert onnx_file.constants(model_of("n").graph)["w"].tolist() == [1.0, 2.0]


def test_a_model_with_a_sidecar_is_serialised_whole(with_sidecar: Path) -> None:
    whole = onnx.load_from_string(onnx_file.serialized(onnx_file.load(with_sidecar), "name"))
    assert numpy_helper.to_array(whole.graph.initializer[0]).tolist() == [1, 2]


@pytest.mark.parametrize("limit", [7, 40])
def test_a_model_too_large_for_one_file_is_a_fault(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(onnx_file, "MAX_BYTES", limit)
    with pytest.raises(Fault, match="huge is too large for one ONNX file") as caught:
        onnx_file.serialized(model_of("n"), "huge")
    assert caught.value.got == "8 bytes of weights"

"""Outputs against the parent's: the noise of rounding, by hand; what can't run here says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import onnx_file
from tasks.errors import Fault
from tasks.fidelity import RUNTIME, fidelity
from tasks.quantize_half import rounded_to_bf16


def save(folder: Path, nodes: list[Any], notes: dict[str, str] | None = None, **weights: Any) -> Path:
    """x [n, 2] to y."""
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("x", "y")]
    constants = [v if isinstance(v, TensorProto) else numpy_helper.from_array(v, k) for k, v in weights.items()]
    graph = helper.make_graph(nodes, "g", shapes[:1], shapes[1:], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    onnx_file.annotate(made, notes or {})
    folder.mkdir()
    onnx.save(made, folder / "model.onnx")
    return folder


def test_it_is_the_noise_of_rounding_over_all_batches(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(0, 1, (9, 2)).astype(np.float32)
    fine = save(tmp_path / "fine", [helper.make_node("Identity", ["x"], ["y"])])
    scaled = {"s": np.array(0.25, np.float32), "z": np.array(0, np.uint8)}
    pair = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    coarse = save(tmp_path / "coarse", pair, **scaled)
    rounded = np.round(x / 0.25) * 0.25
    for batch in (2, 9):
        found = fidelity(fine, coarse, {"x": x}, batch)
        assert found.by == RUNTIME
        assert found.snr_db["y"] == pytest.approx(10 * np.log10((x**2).sum() / ((x - rounded) ** 2).sum()), abs=1e-3)
        cosine = (x * rounded).sum() / np.linalg.norm(x) / np.linalg.norm(rounded)
        assert found.cosine["y"] == pytest.approx(cosine, abs=1e-5)
    same = fidelity(fine, fine, {"x": x})
    assert (same.snr_db, same.cosine) == ({"y": 200.0}, {"y": pytest.approx(1.0)})


def test_outputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folders = [
        save(tmp_path / name, [helper.make_node("Mul", ["x", "w"], ["y"])], w=np.array([value], np.float32))
        for name, value in (("fine", 1.0), ("broken", np.nan))
    ]
    with pytest.raises(Fault, match="output y is not finite") as caught:
        fidelity(*folders, {"x": np.ones((4, 2), np.float32)})
    assert str(caught.value.got).startswith("8 of 8 values")


def test_a_parent_that_is_not_finite_is_named_as_such(tmp_path: Path) -> None:
    folders = [
        save(tmp_path / name, [helper.make_node("Mul", ["x", "w"], ["y"])], w=np.array([value], np.float32))
        for name, value in (("broken", np.nan), ("fine", 1.0))
    ]
    with pytest.raises(Fault, match="output y is not finite before quantisation"):
        fidelity(*folders, {"x": np.ones((4, 2), np.float32)})


def test_a_parent_that_is_no_valid_graph_is_named_as_such(tmp_path: Path) -> None:
    odd = save(tmp_path / "odd", [helper.make_node("Mul", ["x", "missing"], ["y"])])
    with pytest.raises(Fault, match="the parent is not valid"):
        fidelity(odd, odd, {"x": np.ones((4, 2), np.float32)})


def test_a_file_that_is_no_valid_graph_is_refused(tmp_path: Path) -> None:
    fine = save(tmp_path / "fine", [helper.make_node("Identity", ["x"], ["y"])])
    odd = save(tmp_path / "odd", [helper.make_node("Nonsense", ["x"], ["y"])])
    with pytest.raises(Fault, match="not valid") as caught:
        fidelity(fine, odd, {"x": np.ones((4, 2), np.float32)})
    assert "Nonsense" in str(caught.value.got)


def halves(tmp_path: Path, notes: dict[str, str]) -> tuple[Path, Path, np.ndarray]:
    """y = (x w) w in FP32 and in BF16, with a weight that BF16 can't hold."""
    w = np.array([[1.01, 0.3], [0.2, 1.7]], np.float32)
    products = [helper.make_node("MatMul", ["a", "w"], ["m"]), helper.make_node("MatMul", ["m", "w"], ["b"])]
    into = [helper.make_node("Identity", ["x"], ["a"])], [helper.make_node("Identity", ["b"], ["y"])]
    cast = (
        [helper.make_node("Cast", ["x"], ["a"], to=TensorProto.BFLOAT16)],
        [helper.make_node("Cast", ["b"], ["y"], to=TensorProto.FLOAT)],
    )
    fine = save(tmp_path / "fine", [*into[0], *products, *into[1]], w=w)
    narrow = helper.make_tensor("w", TensorProto.BFLOAT16, w.shape, w.ravel().tolist())
    half = save(tmp_path / "half", [*cast[0], *products, *cast[1]], notes, w=narrow)
    return fine, half, w


def bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even at 16 bits, by hand."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_bf16_is_compared_in_fp32_with_every_value_rounded(tmp_path: Path) -> None:
    fine, half, w = halves(tmp_path, {"precision": "bf16"})
    x = np.random.default_rng(1).normal(size=(40, 2)).astype(np.float32)
    found = fidelity(fine, half, {"x": x})
    assert "rounded to BF16" in found.by
    assert "MatMul" in found.by
    want = x @ w @ w
    got = bf16(bf16(bf16(x) @ bf16(w)) @ bf16(w))
    assert found.snr_db["y"] == pytest.approx(10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()), abs=0.1)


def test_what_the_provider_has_no_operator_for_is_told_and_not_judged(tmp_path: Path) -> None:
    fine, half, _ = halves(tmp_path, {"precision": "fp8"})
    found = fidelity(fine, half, {"x": np.ones((2, 2), np.float32)})
    assert (found.snr_db, found.cosine) == ({}, {})
    assert found.by.startswith("nothing: ")
    assert "MatMul" in found.by


def test_rounding_leaves_no_bf16_but_between_casts(tmp_path: Path) -> None:
    _, half, _ = halves(tmp_path, {})
    made = rounded_to_bf16(onnx_file.load(half))
    typed = {
        v.name
        for v in onnx.shape_inference.infer_shapes(made).graph.value_info
        if v.type.tensor_type.elem_type == TensorProto.BFLOAT16
    }
    assert typed
    assert all(n.op_type == "Cast" for n in made.graph.node if typed & {*n.input, *n.output})

"""Nodes get names of their own, tensors keep out of a quantiser's names, patterns name what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.errors import Fault
from tasks.quantize_nodes import gemm_to_matmul, kept, prepared, refuse_quantised


def model(nodes: list[Any], output: str = "y", **weights: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def test_every_node_gets_a_name_of_its_own_and_the_given_file_stays() -> None:
    nodes = [
        helper.make_node("Relu", [a], [b], name=n) for a, b, n in (("x", "a", "r"), ("a", "b", "r"), ("b", "y", ""))
    ]
    given = model(nodes)
    before = given.SerializeToString()
    assert [n.name for n in prepared(given).graph.node] == ["r", "r.1", "Relu.1"]
    assert given.SerializeToString() == before


def test_an_inner_tensor_with_a_generated_name_is_renamed() -> None:
    clash = "x_QuantizeLinear_Output"
    made = prepared(model([helper.make_node("Relu", ["x"], [clash]), helper.make_node("Neg", [clash], ["y"])]))
    names = {name for node in made.graph.node for name in (*node.input, *node.output)}
    assert clash not in names
    assert len(names) == 3
    x = np.ones((2, 4), np.float32)
    assert (run(made, x) == -1).all()


def test_a_weight_with_a_generated_name_is_renamed_with_its_readers() -> None:
    made = prepared(model([helper.make_node("Mul", ["x", "x_scale"], ["y"])], x_scale=np.full(4, 3, np.float32)))
    assert [i.name for i in made.graph.initializer] == list(made.graph.node[0].input[1:])
    assert made.graph.initializer[0].name != "x_scale"


def test_an_output_with_a_generated_name_is_refused() -> None:
    with pytest.raises(Fault, match="name of a tensor that quantisation makes") as caught:
        prepared(model([helper.make_node("Relu", ["x"], ["x_scale"])], "x_scale"))
    assert caught.value.got == "x_scale"


@pytest.fixture
def chain() -> onnx.ModelProto:
    names = ("block.0/relu", "block.1/relu", "head/neg")
    tensors = ("x", "a", "b", "y")
    kinds = ("Relu", "Relu", "Neg")
    nodes = [helper.make_node(kind, [tensors[i]], [tensors[i + 1]], name=names[i]) for i, kind in enumerate(kinds)]
    return model(nodes)


def test_patterns_and_types_say_which_nodes_stay_and_why(chain: onnx.ModelProto) -> None:
    assert kept(chain, ["block.*/relu"], []) == dict.fromkeys(("block.0/relu", "block.1/relu"), "keep: block.*/relu")
    assert kept(chain, ["block.1/*"], ["Relu"]) == {
        "block.0/relu": "keep_ops: Relu",
        "block.1/relu": "keep: block.1/*",
    }


@pytest.mark.parametrize(
    ("patterns", "operators", "what", "near"),
    [(["block.9/relu"], [], "keep names", "block.0/relu"), ([], ["Relo"], "keep_ops names", "Relu")],
)
def test_what_names_nothing_is_refused_with_near_names(
    chain: onnx.ModelProto, patterns: list[str], operators: list[str], what: str, near: str
) -> None:
    with pytest.raises(Fault, match=what) as caught:
        kept(chain, patterns, operators)
    assert near in caught.value.do


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_gemm_as_matmul_computes_the_same(turned: int, bias: bool) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(5, 4) if turned else (4, 5)).astype(np.float32)}
    if bias:
        weights["b"] = rng.normal(size=5).astype(np.float32)
    given = model([helper.make_node("Gemm", ["x", *weights], ["y"], name="head", transB=turned)], **weights)
    made = onnx.ModelProto()
    made.CopyFrom(given)
    gemm_to_matmul(made.graph)
    assert [n.op_type for n in made.graph.node] == ["MatMul", "Add"][: 1 + bias]
    assert made.graph.node[0].name == "head"
    assert len(made.graph.initializer) == 1 + bias
    x = rng.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_allclose(run(made, x), run(given, x), rtol=1e-5)


def test_a_scaled_gemm_stays() -> None:
    made = model([helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)], w=np.ones((4, 2), np.float32))
    gemm_to_matmul(made.graph)
    assert [n.op_type for n in made.graph.node] == ["Gemm"]


def test_a_quantised_parent_is_refused() -> None:
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="pair")]
    with pytest.raises(Fault, match="quantised already") as caught:
        refuse_quantised(model(nodes, "q", s=np.float32([1]).reshape(()), z=np.uint8([0]).reshape(())))
    assert "QuantizeLinear pair" in str(caught.value.got)

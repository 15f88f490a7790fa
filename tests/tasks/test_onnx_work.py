"""Operations and bytes of layers from ONNX, against numbers worked out by hand and PyTorch's own count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import account, checkpoint, layers, onnx_file, onnx_shapes
from tasks.manifest import Layer
from tasks.onnx_shapes import tensors
from tasks.onnx_work import Work, of_model


def model_of(
    nodes: list[onnx.NodeProto],
    shape: list[int | str],
    weights: dict[str, np.ndarray],
    kind: int = TensorProto.FLOAT,
    outputs: tuple[str, ...] = ("y",),
    domains: tuple[str, ...] = (),
) -> onnx.ModelProto:
    """A model with input x; the shapes of its outputs are for inference to find."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets)


def works(model: onnx.ModelProto, batch: int, told: tuple[Layer, ...] = (), **lengths: int) -> list[Work]:
    found, lost = of_model(model, told, batch, lengths)
    assert not lost
    return found


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def linear() -> onnx.ModelProto:
    return model_of(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "fc", transB=1)],
        ["batch", 64],
        {"w": zeros(128, 64), "b": zeros(128)},
    )


def test_a_linear_layer_of_64_by_128_at_batch_8() -> None:
    (found,) = works(linear(), 8)
    assert found.multiply_adds == 8 * 64 * 128
    # Input 8 × 64, weight 64 × 128, bias 128, output 8 × 128, of four bytes each.
    assert found.bytes == 4 * (512 + 8192 + 128 + 1024)
    assert found.precision == "fp32"
    (product,) = found.products
    assert (product.m, product.k, product.n) == (8, 64, 128)


def test_a_convolution() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1], strides=[2, 2])
    (found,) = works(model_of([node], ["n", 3, 32, 32], {"w": zeros(16, 3, 3, 3)}), 4)
    assert found.multiply_adds == 4 * 16 * 16 * 16 * 27
    assert found.bytes == 4 * (4 * 3 * 32 * 32 + 16 * 27 + 4 * 16 * 16 * 16)
    assert found.products[0].unrolled_bytes == 4 * (4 * 16 * 16) * 27


def test_a_pointwise_convolution_unrolls_nothing_unless_it_strides() -> None:
    for stride, unrolled in ((1, 0), (2, 4 * 16 * 8)):
        node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", strides=[stride, stride])
        (found,) = works(model_of([node], ["n", 8, 8, 8], {"w": zeros(4, 8, 1, 1)}), 1)
        assert found.products[0].unrolled_bytes == unrolled


@pytest.mark.parametrize(
    ("op", "left", "right", "settings", "expected"),
    [
        ("MatMul", ["n", 7, 8], (8, 5), {}, (14, 8, 5, 1)),
        ("MatMul", ["n", 3, 7, 8], (1, 3, 8, 5), {}, (7, 8, 5, 6)),
        ("Einsum", ["n", 7, 8], (8, 5), {"equation": "btk,kn->btn"}, (14, 8, 5, 1)),
        ("Einsum", ["n", 7, 8], (2, 5, 8), {"equation": "btk,bsk->bts"}, (7, 8, 5, 2)),
        ("ConvTranspose", ["n", 3, 4, 4], (3, 5, 2, 2), {"strides": [2, 2]}, (32, 3, 20, 1)),
    ],
)
def test_products_by_operator(
    op: str, left: list[Any], right: tuple[int, ...], settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (found,) = works(
        model_of([helper.make_node(op, ["x", "w"], ["y"], "p", **settings)], left, {"w": zeros(*right)}), 2
    )
    assert [(p.m, p.k, p.n, p.count) for p in found.products] == [expected]


def test_an_lstm_multiplies_inputs_at_once_and_states_in_turn() -> None:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], "lstm", hidden_size=6, direction="bidirectional")
    model = model_of([node], [9, "n", 5], {"w": zeros(2, 24, 5), "r": zeros(2, 24, 6)})
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "n"
        value.type.tensor_type.shape.dim[1].dim_value = 3
    (found,) = works(model, 9)
    assert found.multiply_adds == 9 * 3 * 2 * (24 * 5 + 24 * 6)
    assert [(p.m, p.k, p.n, p.count) for p in found.products] == [(27, 5, 24, 2), (3, 6, 24, 18)]


def test_a_dynamically_quantised_lstm_has_its_weights_the_other_way_round() -> None:
    weights = {"w": zeros(1, 5, 24, dtype=np.int8), "r": zeros(1, 6, 24, dtype=np.int8), "one": np.float32(1)}
    node = helper.make_node(
        "DynamicQuantizeLSTM",
        ["x", "w", "r", "", "", "", "", "", "one", "", "one", ""],
        ["h"],
        "lstm",
        domain="com.microsoft",
        hidden_size=6,
    )
    after = helper.make_node("Relu", ["h"], ["y"], "relu")
    found = works(model_of([node, after], [9, 2, 5], {k: np.asarray(v) for k, v in weights.items()}), 9)
    assert found[0].multiply_adds == 9 * 2 * (24 * 5 + 24 * 6)
    assert found[1].bytes == 2 * 4 * 9 * 2 * 6, "what comes after it has a shape"


def test_a_fused_layer_reads_from_outside_and_writes_for_others() -> None:
    model = model_of(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], "conv", pads=[1, 1, 1, 1]),
            helper.make_node("Add", ["a", "x"], ["b"], "add"),
            helper.make_node("Relu", ["b"], ["c"], "relu"),
            helper.make_node("Reshape", ["c", "flat"], ["y"], "flatten"),
        ],
        ["n", 8, 4, 4],
        {"w": zeros(8, 8, 3, 3), "flat": np.array([0, -1], np.int64)},
    )
    alone = works(model, 2)
    assert [work.kind for work in alone] == ["Conv", "Add", "Relu"], "a view moves nothing"
    size = 4 * 2 * 8 * 16
    assert [work.bytes for work in alone] == [2 * size + 4 * 576, 3 * size, 2 * size]
    (fused,) = works(model, 2, (Layer("k", "FusedConv", "fp32", True, ("conv", "add", "relu")),))
    assert (fused.name, fused.kind) == ("k", "FusedConv")
    assert fused.bytes == 2 * size + 4 * 576, "x once, and only what is read after it"


def quantised() -> onnx.ModelProto:
    scale = {"s": np.float32(0.1), "z": np.uint8(0), "t": np.float32(0.1), "o": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], "q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "dq"),
        helper.make_node("DequantizeLinear", ["wq", "t", "o"], ["wd"], "dqw"),
        helper.make_node("MatMul", ["xd", "wd"], ["m"], "mm"),
        helper.make_node("QuantizeLinear", ["m", "s", "z"], ["mq"], "qm"),
        helper.make_node("DequantizeLinear", ["mq", "s", "z"], ["y"], "dqm"),
    ]
    weights = {name: np.asarray(value) for name, value in scale.items()}
    return model_of(nodes, ["n", 32], {**weights, "wq": zeros(32, 16, dtype=np.int8)})


def test_an_integer_layer_moves_bytes_of_integers() -> None:
    told = (
        Layer("first", "QuantizeLinear", "fp32", False, ("q",)),
        Layer("mm", "QLinearMatMul", "int8", True, ("dq", "dqw", "mm", "qm")),
        Layer("last", "DequantizeLinear", "int8", False, ("dqm",)),
    )
    first, product, last = works(quantised(), 4, told)
    scales = (4 + 1) + (4 + 1)
    assert product.precision == "int8" and product.multiply_adds == 4 * 32 * 16
    assert product.bytes == 4 * 32 + 32 * 16 + 4 * 16 + scales
    assert (first.bytes, last.bytes) == (4 * 32 * 5 + 5, 4 * 16 * 5 + 5)


def test_four_bits_are_half_a_byte() -> None:
    packed = helper.make_tensor("w", TensorProto.INT4, [64, 32], np.zeros(64 * 32, np.int8).tolist())
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], "dq"),
        helper.make_node("MatMul", ["x", "wd"], ["y"], "mm"),
    ]
    model = model_of(nodes, ["n", 64], {"s": np.asarray(np.float32(1))})
    model.graph.initializer.append(packed)
    (found,) = works(model, 1, (Layer("mm", "MatMulNBits", "int4", True, ("dq", "mm")),))
    assert found.bytes == 4 * 64 + 64 * 32 // 2 + 4 + 4 * 32


def test_an_embedding_reads_the_rows_that_it_gives() -> None:
    node = helper.make_node("Gather", ["table", "x"], ["y"], "embed")
    (found,) = works(model_of([node], ["n", "t"], {"table": zeros(5000, 16)}, TensorProto.INT64), 2, t=3)
    assert found.bytes == 2 * (2 * 3 * 16 * 4) + 2 * 3 * 8


def test_a_product_that_no_layer_tells_of_counts_and_one_of_unknown_size_is_said() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "w"], ["y"], "second"),
    ]
    model = model_of(nodes, ["n", 8], {"w": zeros(8, 8)})
    found = works(model, 2, (Layer("k", "MatMul", "fp32", True, ("first",)),))
    assert [(work.name, work.multiply_adds) for work in found] == [("k", 128), ("second", 128)]
    lost = model_of(
        [
            helper.make_node("Strange", ["x"], ["a"], "strange", domain="own"),
            helper.make_node("MatMul", ["a", "w"], ["y"], "mm"),
        ],
        ["n", 8],
        {"w": zeros(8, 8)},
        domains=("own",),
    )
    assert of_model(lost, (), 2, {})[1] == ["mm"]


def test_a_slice_whose_end_is_computed_from_a_shape_has_the_size_it_gives() -> None:
    """As exporters write position embeddings: places are cut to the length of the input, which is known here."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], "shape", start=1, end=2),
        helper.make_node("Slice", ["places", "zero", "length", "one"], ["used"], "slice"),
        helper.make_node("Gather", ["table", "used"], ["rows"], "gather"),
        helper.make_node("Add", ["x", "rows"], ["sum"], "add"),
        helper.make_node("MatMul", ["sum", "w"], ["y"], "mm"),
    ]
    weights = {"places": np.arange(512)[None], "table": zeros(512, 8), "w": zeros(8, 4)}
    weights |= {"zero": np.array([0]), "one": np.array([1])}
    for length in (3, 48):
        model = model_of(nodes, ["n", "tokens", 8], weights)
        found = {work.name: work for work in works(model, 2, tokens=length)}
        assert found["mm"].multiply_adds == 2 * length * 8 * 4
        assert tensors(model, 2, {"tokens": length})["rows"].shape == (1, length, 8)
    assert [node.name for node in model.graph.node] == ["shape", "slice", "gather", "add", "mm"], "left as it was"


def test_no_large_tensor_is_computed_to_know_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the size of the input's, and a large constant in the graph: shapes say all that is needed of them."""
    large = helper.make_node("Constant", [], ["table"], "constant", value=numpy_helper.from_array(zeros(2048, 8)))
    nodes = [
        large,
        helper.make_node("Shape", ["x"], ["size"], "shape"),
        helper.make_node("Expand", ["one", "size"], ["mask"], "expand"),
        helper.make_node("Add", ["x", "mask"], ["sum"], "add"),
        helper.make_node("Gather", ["table", "rows"], ["some"], "gather"),
        helper.make_node("MatMul", ["sum", "some"], ["y"], "mm"),
    ]
    weights = {"one": np.ones(1, np.float32), "rows": np.arange(64)}
    computed = []
    real = onnx_shapes.ReferenceEvaluator
    monkeypatch.setattr(
        onnx_shapes, "ReferenceEvaluator", lambda node, **more: computed.append(node.op_type) or real(node, **more)
    )
    found = tensors(model_of(nodes, ["n", 4096, 64], weights), 2, {})
    assert (found["mask"].shape, found["table"].shape, found["some"].shape) == ((2, 4096, 64), (2048, 8), (64, 8))
    assert found["y"].shape == (2, 4096, 8) and set(computed) == {"Shape"}


def test_a_branch_still_knows_the_size_that_was_computed_outside_of_it() -> None:
    branch = helper.make_graph(
        [helper.make_node("Reshape", ["x", "size"], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], "shape"),
        helper.make_node("If", ["yes"], ["z"], "if", then_branch=branch, else_branch=branch),
        helper.make_node("MatMul", ["z", "w"], ["y"], "mm"),
    ]
    model = model_of(nodes, ["n", 4], {"yes": np.array(True), "w": zeros(4, 8)})
    assert tensors(model, 2, {})["z"].shape == (2, 4)
    assert [work.multiply_adds for work in works(model, 2) if work.name == "mm"] == [2 * 4 * 8]


def test_a_size_that_does_not_fit_what_is_declared_leaves_what_was_known_before() -> None:
    model = model_of([helper.make_node("Shape", ["x"], ["y"], "shape")], ["n", 4], {})
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT32
    assert tensors(model, 2, {})["x"].shape == (2, 4)


def test_lengths_and_shapes_computed_inside_follow_the_batch() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("Concat", ["s", "two"], ["t"], "concat", axis=0),
        helper.make_node("Unsqueeze", ["x", "last"], ["u"], "unsqueeze"),
        helper.make_node("Expand", ["u", "t"], ["y"], "expand"),
    ]
    weights = {"two": np.array([6], np.int64), "last": np.array([-1], np.int64)}
    known = tensors(model_of(nodes, ["n", "t"], weights), 4, {"t": 5})
    assert known["y"].shape == (4, 5, 6)


@pytest.mark.parametrize("batch", [1, 32])
def test_the_tiny_net_counts_what_pytorch_counts(artifact: Any, batch: int) -> None:
    model = onnx_file.load(artifact("base-onnx"))
    loaded = checkpoint.load(artifact("base"))
    expected = account.count(loaded.model, loaded.workload).multiply_adds
    # Three convolutions of 3 × 3 on 8 × 8 values, and the head.
    assert expected == 64 * 9 * 16 + 2 * 64 * 9 * 16 * 16 + 64 * 4
    for name in ("base-ort", "base-int8-ort", "base-rtx"):
        source = artifact("base-int8" if "int8" in name else "base-onnx")
        found, notes = of_model(onnx_file.load(source), layers.read(artifact(name)), batch, {})
        assert sum(work.multiply_adds for work in found) == batch * expected and not notes
        assert found and all(work.bytes for work in found if work.products)
    assert sum(work.multiply_adds for work in works(model, batch)) == batch * expected


def test_the_models_own_noted_shapes_are_not_believed(artifact: Any) -> None:
    known = tensors(onnx_file.load(artifact("base-onnx")), 5, {})
    assert known["logits"].shape == (5, 4)


def test_a_bert_counts_what_pytorch_counts(text: Any, tmp_path: Path) -> None:
    from tasks.export import to_onnx

    model = text.model(layers=2).eval()
    to_onnx(model, text, tmp_path / onnx_file.FILE, 18)
    expected = account.count(model, text).multiply_adds
    found = works(onnx_file.load(tmp_path), 3, **text.AXES)
    assert sum(work.multiply_adds for work in found) == 3 * expected

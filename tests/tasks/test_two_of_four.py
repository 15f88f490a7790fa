from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import onnx_file, two_of_four
from tasks.errors import Fault

OUT, IN = 8, 16
FLOAT = TensorProto.FLOAT


def weight(*kernel: int, bad: int = 0, seed: int = 0) -> np.ndarray:
    """[8, 16, …], 2:4 along axis 1 but for `bad` groups of 4."""
    rng = np.random.default_rng(seed)
    made = rng.normal(1, 0.1, (OUT, IN, *kernel)).astype(np.float32)
    made[:, 0::4] = made[:, 3::4] = 0
    for i in range(bad):
        made[i, 0] = 1
    return made


def model(nodes: list[onnx.NodeProto], **constants: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, None)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph)


def node(kind: str, inputs: str, output: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=kind, **attributes)


def quantized(w: np.ndarray, point: int, kind: type = np.uint8) -> np.ndarray:
    return (np.where(w != 0, 7, 0) + point).astype(kind)


def per_channel(w: np.ndarray) -> onnx.ModelProto:
    points = np.arange(OUT).astype(np.int8)
    q = (np.where(w != 0, 7, 0) + points[:, None]).astype(np.int8)
    nodes = [node("DequantizeLinear", "w s z", "d", axis=0), node("Gemm", "x d", transB=1)]
    return model(nodes, w=q, s=np.ones(OUT, np.float32), z=points)


def blocked(w: np.ndarray) -> onnx.ModelProto:
    points = np.arange(OUT * 2).reshape(OUT, 2).astype(np.uint8)
    q = (np.where(w != 0, 7, 0) + points.repeat(8, 1)).astype(np.uint8)
    nodes = [node("DequantizeLinear", "w s z", "d", axis=1, block_size=8), node("Gemm", "x d", transB=1)]
    return model(nodes, w=q, s=np.ones((OUT, 2), np.float32), z=points)


def trained(w: np.ndarray) -> onnx.ModelProto:
    """Fake quantisation of a float weight, as quantisation-aware training leaves it."""
    nodes = [
        node("QuantizeLinear", "w s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("Transpose", "d", "t", perm=[1, 0]),
        node("MatMul", "x t"),
    ]
    return model(nodes, w=w, s=np.float32(0.1), z=np.int8(0))


def constant(w: np.ndarray) -> onnx.ModelProto:
    made = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w))
    return model([made, node("Gemm", "x w", transB=1)])


def nested(w: np.ndarray) -> onnx.ModelProto:
    """The product stands in a branch, its weight outside."""
    branch = helper.make_graph(
        [node("Gemm", "x w", "b", transB=1)], "b", [], [helper.make_tensor_value_info("b", FLOAT, None)]
    )
    return model([node("If", "c", then_branch=branch, else_branch=branch)], w=w, c=np.array(True))


FORMS: dict[str, Callable[[np.ndarray], onnx.ModelProto]] = {
    "matmul": lambda w: model([node("MatMul", "x w")], w=np.ascontiguousarray(w.T)),
    "matmul from the left": lambda w: model([node("MatMul", "w x")], w=w),
    "gemm": lambda w: model([node("Gemm", "x w")], w=np.ascontiguousarray(w.T)),
    "gemm transB": lambda w: model([node("Gemm", "x w", transB=1)], w=w),
    "gemm from the left, transA": lambda w: model([node("Gemm", "w x", transA=1)], w=np.ascontiguousarray(w.T)),
    "transpose": lambda w: model([node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "x t")], w=w),
    "transpose, by default": lambda w: model([node("Transpose", "w", "t"), node("MatMul", "x t")], w=w),
    "identity": lambda w: model([node("Identity", "w", "t"), node("Gemm", "x t", transB=1)], w=w),
    "zero point": lambda w: model(
        [node("DequantizeLinear", "w s z", "d"), node("Gemm", "x d", transB=1)],
        w=quantized(w, 128),
        s=np.float32(1),
        z=np.uint8(128),
    ),
    "no zero point": lambda w: model(
        [node("DequantizeLinear", "w s", "d"), node("Gemm", "x d", transB=1)],
        w=quantized(w, 0, np.int8),
        s=np.float32(1),
    ),
    "dynamic": lambda w: model([node("MatMulInteger", "x w p z")], w=quantized(w.T, 9), z=np.uint8(9)),
    "per channel": per_channel,
    "blocked": blocked,
    "trained": trained,
    "constant": constant,
    "branch": nested,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_seen_in_every_form_and_one_bad_group_in_it(form: str) -> None:
    good, bad = (two_of_four.proof(FORMS[form](weight(bad=n))) for n in (0, 3))
    assert [(g.outputs, g.inputs, g.two_of_four, g.reason) for g in good] == [(OUT, IN, True, None)]
    assert [(b.two_of_four, b.reason) for b in bad] == [(False, "3 of 32 groups of 4 have more than 2 non-zero")]


@pytest.mark.parametrize("form", ["conv", "conv integer", "conv behind Q/DQ"])
def test_a_convolution_is_judged_along_its_input_channels(form: str) -> None:
    def made(w: np.ndarray) -> onnx.ModelProto:
        if form == "conv":
            return model([node("Conv", "x w")], w=w)
        if form == "conv integer":
            return model([node("ConvInteger", "x w p z")], w=quantized(w, 3), z=np.uint8(3))
        nodes = [node("DequantizeLinear", "w s z", "d", axis=0), node("Conv", "x d")]
        return model(nodes, w=quantized(w, 5, np.int8), s=np.ones(OUT, np.float32), z=np.full(OUT, 5, np.int8))

    (good,) = two_of_four.proof(made(weight(3, 2)))
    (bad,) = two_of_four.proof(made(weight(3, 2, bad=1)))
    assert good.two_of_four and (good.outputs, good.inputs) == (OUT, IN)
    assert bad.reason == "6 of 192 groups of 4 have more than 2 non-zero"


def test_zeros_along_the_outputs_or_the_kernel_prove_nothing() -> None:
    square = np.ones((16, 16), np.float32)
    square[0::2] = 0
    flat = np.ones((OUT, IN, 2, 2), np.float32)
    flat[..., 0] = 0
    flat[:, 3::4, :, 0] = 1
    assert not two_of_four.proof(model([node("Gemm", "x w", transB=1)], w=square))[0].two_of_four
    assert not two_of_four.proof(model([node("Conv", "x w")], w=flat))[0].two_of_four


def test_the_rest_says_why_and_a_weight_used_twice_stands_once() -> None:
    nodes = [
        node("MatMul", "x x", "a"),
        node("Gemm", "a narrow", "b", transB=1),
        node("Gemm", "b w", "c", transB=1),
        node("Gemm", "c w", transB=1),
    ]
    found = two_of_four.proof(model(nodes, narrow=np.ones((10, 16), np.float32), w=weight()))
    assert [(f.name, f.reason) for f in found] == [
        ("MatMul", "it has no constant weight"),
        ("narrow", "it has 16 inputs and 10 outputs: not multiples of 16 and 8"),
        ("w", None),
    ]


@pytest.mark.parametrize("shape", [(4, 8), (3, 12, 2, 2), (5, 8, 3)])
def test_violations_are_those_of_a_slow_count(shape: tuple[int, ...]) -> None:
    used = np.random.default_rng(0).random(shape) < 0.5
    slow = 0
    for index in np.ndindex(shape[0], *shape[2:]):
        row = used[(index[0], slice(None), *index[1:])]
        slow += sum(sum(row[i : i + 4]) > 2 for i in range(0, len(row), 4))
    assert two_of_four.violations(used) == slow > 0


@pytest.mark.parametrize("shape", [(4, 6), (8,), (0, 4)])
def test_what_has_no_groups_of_four_is_never_proven(shape: tuple[int, ...]) -> None:
    assert two_of_four.violations(np.zeros(shape, bool)) is None


def test_made_layers_are_found_by_their_zeros_whatever_their_names() -> None:
    one, two = weight(), np.roll(weight(seed=1), 1, axis=1)
    made = {"two": two != 0, "one": one != 0}
    nodes = [node("MatMul", "x a", "h"), node("Gemm", "h b", transB=1)]
    found = two_of_four.check(model(nodes, a=np.ascontiguousarray(one.T), b=two), made)
    assert [(f.name, f.layer) for f in found] == [("a", "one"), ("b", "two")]


@pytest.mark.parametrize(
    ("file", "got"), [(weight(bad=2), "2 non-zero values"), (weight(3, 3), r"no weight of shape \[8, 16\]")]
)
def test_a_made_layer_that_lost_its_zeros_is_a_fault(file: np.ndarray, got: str) -> None:
    kind = node("Conv", "x w") if file.ndim == 4 else node("Gemm", "x w", transB=1)
    with pytest.raises(Fault, match=rf"layer was made 2:4 sparse, and isn't in the file\n  got: +{got}"):
        two_of_four.check(model([kind], w=file), {"layer": weight() != 0})


def test_a_file_that_says_nothing_of_sparsity_was_not_made_so() -> None:
    proto = model([node("Gemm", "x w", transB=1)], w=weight())
    assert two_of_four.made_in(proto) == {} == two_of_four.notes({})
    onnx_file.annotate(proto, two_of_four.notes({"layer": weight() != 0}))
    assert onnx_file.notes(proto) == {"sparsity": "2:4", "sparse_layers": '["layer"]'}
    assert list(two_of_four.made_in(proto)) == ["w"]

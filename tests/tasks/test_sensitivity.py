"""The search for mixed precision: a planted sensitive layer is the one kept, the budget holds on validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import onnx_file, proof, sensitivity_runs
from tasks.data import read, write
from tasks.errors import Fault
from tasks.quantize import quantize
from tasks.sensitivity import SearchReport, fewest, search
from tasks.sensitivity_runs import noise
from tasks.settings import QuantizeParams

WIDTH, CLASSES = 8, 4
OUTLIER = 1000.0
Chain = Callable[..., "Planted"]
WORKLOAD = """
NAME = PREPROCESSING = "chain"
INPUTS, OUTPUTS = {"x": ("float32", (8,))}, ("logits",)
METRICS = {"accuracy": lambda out, labels: (out["logits"].argmax(1) == labels) * 1.0}
samples = model = loss = None
"""


class Planted:
    """A chain of matrix products in a folder, with its data; `outliers` names the products whose input has one.

    The outlier is a channel of a constant value, to which the product gives no weight: floating point doesn't mind
    it, but a range that takes it in has no steps left for the other channels.
    """

    def __init__(self, folder: Path, task: ModuleType, depth: int, outliers: set[int], outlier: float) -> None:
        rng = np.random.default_rng(7)
        self.source, self.data, self.task = folder / "parent", folder / "data", task
        self.source.mkdir(parents=True)
        nodes, weights, value = [], [], "x"
        for layer in range(depth):
            weight = rng.normal(0, 0.5, (WIDTH, CLASSES if layer == depth - 1 else WIDTH)).astype(np.float32)
            weight[0] = 0
            bias = np.zeros(weight.shape[1], np.float32)
            bias[0] = outlier if layer + 1 in outliers else 0
            weights += [numpy_helper.from_array(weight, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
            last = layer == depth - 1
            nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"], name=f"product{layer}"))
            added = "logits" if last else f"a{layer}"
            nodes.append(helper.make_node("Add", [f"m{layer}", f"b{layer}"], [added], name=f"bias{layer}"))
            if not last:
                nodes.append(helper.make_node("LeakyRelu", [added], [f"h{layer}"], name=f"relu{layer}", alpha=0.3))
            value = f"h{layer}"
        shapes = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
            for name, size in (("x", WIDTH), ("logits", CLASSES))
        ]
        graph = helper.make_graph(nodes, "chain", shapes[:1], shapes[1:], weights)
        self.model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(self.model, self.source / onnx_file.FILE)
        self.nodes = [f"product{layer}" for layer in range(depth)]
        for split, n in (("calibration", 96), ("validation", 200)):
            x = rng.normal(0, 1, (n, WIDTH)).astype(np.float32)
            if 0 in outliers:
                x[:, 0] = outlier
            labels = self.run(x)["logits"].argmax(axis=1)
            write(self.data / f"{split}.npz", {"x": x, "label": labels})
            if split == "calibration":
                self.ranges = {n: (float(v.min()), float(v.max())) for n, v in self.run(x).items()}
                self.ranges["x"] = (float(x.min()), float(x.max()))
        self.made: list[tuple[str, ...]] = []

    def run(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Every tensor between the products, and the output."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        names = [o for n in self.model.graph.node for o in n.output]
        model.graph.output.extend(
            helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names if n != "logits"
        )
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return dict(zip(names, session.run(names, {"x": x}), strict=True))

    def eight_bits(self, folder: Path, exclude: tuple[str, ...]) -> None:
        """Every product but the excluded ones gets Q/DQ of unsigned 8 bits on its input, by its range."""

        def pair(name: str, layer: int) -> tuple[list[Any], list[Any]]:
            low, high = min(0.0, self.ranges[name][0]), max(0.0, self.ranges[name][1])
            scale = np.float32((high - low) / 255)
            zero = np.array(round(-low / float(scale)), np.uint8)
            constants = [
                numpy_helper.from_array(np.array(scale), f"s{layer}"),
                numpy_helper.from_array(zero, f"z{layer}"),
            ]
            scaled = [f"s{layer}", f"z{layer}"]
            return [
                helper.make_node("QuantizeLinear", [name, *scaled], [f"q{layer}"]),
                helper.make_node("DequantizeLinear", [f"q{layer}", *scaled], [f"d{layer}"]),
            ], constants

        self._rewrite(folder, exclude, pair)

    def half(self, folder: Path, exclude: tuple[str, ...]) -> None:
        """Every product but the excluded ones reads its input through FP16, where 65504 is the largest number."""

        def pair(name: str, layer: int) -> tuple[list[Any], list[Any]]:
            return [
                helper.make_node("Cast", [name], [f"q{layer}"], to=TensorProto.FLOAT16),
                helper.make_node("Cast", [f"q{layer}"], [f"d{layer}"], to=TensorProto.FLOAT),
            ], []

        self._rewrite(folder, exclude, pair)

    def _rewrite(self, folder: Path, exclude: tuple[str, ...], pair: Any) -> None:
        self.made.append(exclude)
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        nodes = list(model.graph.node)
        del model.graph.node[:]
        for node in nodes:
            if node.op_type == "MatMul" and node.name not in exclude:
                layer = int(node.name.removeprefix("product"))
                added, constants = pair(node.input[0], layer)
                node.input[0] = f"d{layer}"
                model.graph.node.extend(added)
                model.graph.initializer.extend(constants)
            model.graph.node.append(node)
        onnx.save(model, folder / onnx_file.FILE)

    def search(self, make: Any = None, **settings: Any) -> SearchReport:
        params = QuantizeParams(**{"from": "parent", "search": {"budget": 0.05, "samples": 64, **settings}})
        return search(self.source, self.task, self.data, params, make or self.eight_bits, self.nodes)


@pytest.fixture
def chain(tmp_path: Path, make_workload: Any) -> Chain:
    """`chain(depth, outliers)`: products in a row; those numbered in `outliers` read a constant, huge channel."""
    task = make_workload(None, {"x": ("float32", (WIDTH,))})

    def make(depth: int = 3, outliers: set[int] | None = None, outlier: float = OUTLIER) -> Planted:
        return Planted(tmp_path / "chain", task, depth, {1} if outliers is None else outliers, outlier)

    return make


@pytest.mark.parametrize("sweep", ["one", "all_but_one"])
def test_the_planted_layer_is_the_one_kept(chain: Chain, sweep: str) -> None:
    planted = chain()
    report = planted.search(sweep=sweep)
    assert report.kept == ("product1",)
    assert [row.node for row in report.table if row.kept] == ["product1"] == [report.table[0].node]
    assert {row.op for row in report.table} == {"MatMul"}
    assert sorted(row.node for row in report.table) == planted.nodes
    assert report.table[0].snr_db < 10 if sweep == "one" else report.table[0].snr_db > 20
    assert all(row.snr_db > 20 if sweep == "one" else row.snr_db < 10 for row in report.table[1:])
    assert report.within_budget
    assert report.verdict.startswith("1 of 3 nodes stay in floating point: accuracy changes by")


def test_the_budget_is_held_on_validation_by_the_model_that_is_kept(chain: Chain, tmp_path: Path) -> None:
    planted = chain()
    report = planted.search()
    none, one = report.path
    assert (none.kept, none.within_budget) == (0, False)
    assert (one.kept, one.within_budget) == (1, True)
    with np.load(planted.data / "validation.npz") as split:
        x, labels = split["x"], split["label"]
    assert report.parent_metric == 1.0
    for tried, exclude in ((none, ()), (one, report.kept)):
        planted.eight_bits(tmp_path, exclude)
        session = ort.InferenceSession(str(tmp_path / onnx_file.FILE), providers=["CPUExecutionProvider"])
        accuracy = float((session.run(None, {"x": x})[0].argmax(axis=1) == labels).mean())
        assert tried.metric == pytest.approx(accuracy, abs=0.011)
        assert tried.loss == pytest.approx(1 - tried.metric)
    assert none.loss > 0.05 >= one.loss


def test_equal_searches_give_equal_reports(chain: Chain) -> None:
    planted = chain()
    first, second = (vars(planted.search()) for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_the_samples_asked_for_are_those_compared(chain: Chain) -> None:
    planted = chain()
    few, many = planted.search(samples=8), planted.search(samples=1000)
    assert (few.calibration_samples, many.calibration_samples) == (8, 96)
    assert few.table[0].snr_db != many.table[0].snr_db
    assert few.validation_samples == 200


def test_of_six_layers_the_two_planted_ones_are_kept_within_the_bound_of_models(chain: Chain) -> None:
    planted = chain(depth=6, outliers={2, 4})
    report = planted.search()
    assert set(report.kept) == {"product2", "product4"}
    assert [tried.kept for tried in report.path] == [0, 1, 2]
    assert report.models == len(planted.made) == 1 + 6 + 2 <= report.models_bound == 13
    assert planted.made[0] == ()
    assert planted.made[1] == tuple(planted.nodes[1:])


@pytest.mark.parametrize("sweep", ["one", "all_but_one"])
def test_quantize_searches_and_leaves_what_was_found_in_floating_point(
    chain: Chain, write_workload: Any, tmp_path: Path, sweep: str
) -> None:
    planted = chain()
    calibration = read(planted.data / "calibration.npz")
    proof.save(planted.source, {"x": calibration["x"][:8]}, {"logits": planted.run(calibration["x"][:8])["logits"]})
    settings = {"from": "parent", "calibration": "minmax", "samples": 64, "search": {"budget": 0.05, "sweep": sweep}}
    report = quantize(
        planted.source, write_workload(WORKLOAD), planted.data, tmp_path / "out", QuantizeParams(**settings)
    )
    assert report.search is not None
    assert report.search.within_budget
    # The quantiser rounds what a node puts out, too: the nodes that make the outlier are as sensitive.
    assert set(report.search.kept) <= {"product1", "bias0", "relu0"}
    assert "product1" in report.search.kept
    assert "product2" not in report.search.kept
    model = onnx_file.load(tmp_path / "out")
    makers = {output: node.op_type for node in model.graph.node for output in node.output}
    products = {node.name: makers.get(node.input[0]) for node in model.graph.node if node.name.startswith("product")}
    assert products["product1"] != "DequantizeLinear" == products["product2"]
    validation = read(planted.data / "validation.npz")
    session = ort.InferenceSession(str(tmp_path / "out" / onnx_file.FILE), providers=["CPUExecutionProvider"])
    accuracy = (session.run(None, {"x": validation["x"]})[0].argmax(axis=1) == validation["label"]).mean()
    assert accuracy >= 0.95 > report.search.path[0].metric


def test_nothing_is_swept_if_nothing_has_to_be_kept(chain: Chain) -> None:
    planted = chain(outliers=set())
    report = planted.search()
    assert (report.kept, report.table, report.within_budget) == ((), (), True)
    assert (report.models, [tried.kept for tried in report.path]) == (1, [0])
    assert report.verdict.startswith("nothing has to stay in floating point: accuracy changes by")


def test_it_says_so_if_no_quantised_model_is_good_enough(chain: Chain) -> None:
    planted = chain(outliers={0, 1, 2})
    report = planted.search()
    assert not report.within_budget
    assert sorted(report.kept) == planted.nodes
    assert [tried.kept for tried in report.path] == [0, 1, 2]
    assert not any(tried.within_budget for tried in report.path)
    assert "no quantised model is within the budget of 5.00 points: with 2 of 3 nodes" in report.verdict


def test_outputs_that_are_not_finite_rank_first_and_score_nothing(chain: Chain) -> None:
    planted = chain(outlier=1e5)
    report = planted.search(make=planted.half)
    assert report.kept == ("product1",)
    assert (report.table[0].snr_db, report.table[0].cosine) == (-200.0, -1.0)
    assert report.path[0].metric == 0.0
    assert report.path[1].metric > 0.99


def test_what_can_not_be_searched_is_a_fault(chain: Chain) -> None:
    planted = chain()
    with pytest.raises(Fault, match="none of the workload's") as fault:
        planted.search(metric="accurcy")
    assert (fault.value.got, fault.value.expected) == ("accurcy", "accuracy")
    planted.nodes = []
    with pytest.raises(Fault, match="nothing to search"):
        planted.search()
    with np.load(planted.data / "calibration.npz") as split:
        write(planted.data / "calibration.npz", {**split, "x": np.full_like(split["x"], np.nan)})
    planted.nodes = ["product0"]
    with pytest.raises(Fault, match="output logits of the parent is not finite"):
        planted.search()


def test_a_file_that_the_runtime_refuses_is_a_fault_with_its_words(chain: Chain) -> None:
    planted = chain()

    def broken(folder: Path, exclude: tuple[str, ...]) -> None:
        planted.eight_bits(folder, exclude)
        model = onnx.load(folder / onnx_file.FILE)
        model.graph.node[0].op_type = "NoSuchOperator"
        onnx.save(model, folder / onnx_file.FILE)

    with pytest.raises(Fault, match="can't run a model") as fault:
        planted.search(make=broken)
    assert "NoSuchOperator" in str(fault.value.got)


def test_a_batch_is_cut_to_its_longest_sample(tmp_path: Path, make_workload: Any) -> None:
    task = make_workload(None, {"x": ("float32", ("tokens",))}, ("total",))
    task.AXES, task.lengths = {"tokens": 6}, lambda inputs: np.array([3] * len(inputs["x"]))
    node = helper.make_node("ReduceSum", ["x", "axis"], ["total"], keepdims=0)
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens"])]
    outputs = [helper.make_tensor_value_info("total", TensorProto.FLOAT, ["batch"])]
    graph = helper.make_graph([node], "sum", infos, outputs, [numpy_helper.from_array(np.array([1]), "axis")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / onnx_file.FILE)
    samples = {"x": np.arange(240, dtype=np.float32).reshape(40, 6), "label": np.zeros(40)}
    assert np.allclose(sensitivity_runs.run(tmp_path, task, samples)["total"], samples["x"][:, :3].sum(axis=1))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_the_fewest_that_are_enough_are_found_in_few_steps(count: int) -> None:
    for needed in range(1, count + 1):
        asked: list[int] = []

        def enough(kept: int, needed: int = needed, asked: list[int] = asked) -> bool:
            asked.append(kept)
            return kept >= needed

        assert fewest(count, enough) == needed
        assert len(asked) == len(set(asked)) <= 2 * (count - 1).bit_length()
        assert all(0 < kept < count for kept in asked)


def test_what_is_found_is_enough_and_one_less_is_not_even_if_more_can_be_worse() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        known = [False, *(rng.random(30) < 0.4), True]
        found = fewest(31, known.__getitem__)
        assert known[found]
        assert not known[found - 1]


def test_noise_is_that_of_the_worst_output() -> None:
    a, b = np.array([3.0, 4.0]), np.array([1.0, 0.0])
    assert noise({"a": a, "b": b}, {"a": a, "b": b}) == (200.0, 1.0)
    snr, cosine = noise({"a": a, "b": b}, {"a": a + np.array([0.05, 0]), "b": np.array([0.9, 0.1])})
    assert snr == pytest.approx(10 * np.log10(1 / 0.02))
    assert cosine == pytest.approx(0.9 / np.hypot(0.9, 0.1))
    assert noise({"a": a}, {"a": np.array([np.nan, 4.0])}) == (-200.0, -1.0)
    assert noise({"a": a}, {"a": -a})[1] == pytest.approx(-1.0)

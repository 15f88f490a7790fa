"""Ranges against slow, obvious references; every method on values whose answer is known."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.calibration_ranges import HALF, Grid, Values, choose, divergence, e4m3, observe


def values(x: np.ndarray) -> Values:
    top = float(np.abs(x).max()) or 1.0
    return Values(float(x.min()), float(x.max()), np.histogram(x, 2 * HALF, (-top, top))[0])


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    return np.random.default_rng(0).normal(size=200_000)


@pytest.mark.parametrize("kind", ["uint8", "int8", "fp8"])
def test_minmax_takes_all_values_in(normal: np.ndarray, kind: str) -> None:
    low, high = choose(Values(float(normal.min()), float(normal.max())), "minmax", Grid(kind), 99.99)
    if kind == "uint8":
        assert (low, high) == (normal.min(), normal.max())
    else:
        assert (-low, high) == (np.abs(normal).max(),) * 2


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
def test_percentile_is_numpys(normal: np.ndarray, percentile: float) -> None:
    low, high = choose(values(normal), "percentile", Grid("uint8"), percentile)
    cut = (100 - percentile) / 2
    expected = np.percentile(normal, [cut, 100 - cut])
    assert (low, high) == pytest.approx(tuple(expected), abs=2 * np.abs(normal).max() / HALF)
    low, high = choose(values(normal), "percentile", Grid("int8"), percentile)
    assert (-low, high) == (pytest.approx(np.percentile(np.abs(normal), percentile), abs=0.01),) * 2


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_a_percentile_of_100_is_minmax(normal: np.ndarray, kind: str) -> None:
    grid, seen = Grid(kind), values(normal)
    assert choose(seen, "percentile", grid, 100.0) == choose(seen, "minmax", grid, 100.0)


def integers(x: np.ndarray, low: float, high: float, symmetric: bool) -> np.ndarray:
    """Each value through 8 bits, one at a time."""
    out = []
    for value in x:
        if symmetric:
            scale = max(-low, high) / 127
            out.append(max(-127, min(127, round(value / scale))) * scale)
        else:
            scale = (high - low) / 255
            zero = round(-low / scale)
            out.append((max(0, min(255, round(value / scale) + zero)) - zero) * scale)
    return np.array(out)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_rounding_is_that_of_eight_bits(kind: str) -> None:
    x = np.random.default_rng(1).normal(size=300)
    got = Grid(kind).rounded(x, -1.5, 1.1)
    np.testing.assert_allclose(got, integers(x, -1.5, 1.1, kind == "int8"), atol=1e-12)


def test_e4m3_is_the_formats_own_rounding() -> None:
    x = np.concatenate([np.random.default_rng(2).normal(size=4000) * 10.0**p for p in range(-4, 3)]).astype(np.float32)
    x = np.clip(x, -448, 448)
    np.testing.assert_array_equal(e4m3(x.astype(np.float64)), x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
    assert e4m3(np.array([1e9, -1e9])).tolist() == [448, -448]


@pytest.mark.parametrize("kind", ["uint8", "int8", "fp8"])
def test_mse_is_near_the_least_error_of_a_search_on_the_values_themselves(kind: str) -> None:
    x = np.concatenate([np.random.default_rng(3).normal(size=20_000), [30.0]])
    grid = Grid(kind)

    def error(low: float, high: float) -> float:
        return float(((x - grid.rounded(x, low, high)) ** 2).sum())

    found = error(*choose(values(x), "mse", grid, 99.99))
    tried = np.linspace(0.02, 1, 60)
    if grid.symmetric:
        best = min(error(-30 * s, 30 * s) for s in tried)
    else:
        best = min(error(float(x.min()) * s, 30 * t) for s in tried for t in tried)
    assert found <= 1.05 * best
    assert found <= 1.001 * error(float(x.min()), float(x.max()))


def test_mse_cuts_an_outlier_off_where_that_pays() -> None:
    x = np.concatenate([np.random.default_rng(4).normal(size=1_000_000), [40.0]])
    assert choose(values(x), "mse", Grid("int8"), 99.99)[1] < 10
    assert choose(values(x), "minmax", Grid("int8"), 99.99)[1] == 40


def slow_divergence(counts: np.ndarray, stop: int, levels: int) -> float:
    """Migacz's loop, bin by bin."""
    p = [float(c) for c in counts[:stop]]
    p[-1] += float(sum(counts[stop:]))
    q = [0.0] * stop
    for level in range(levels):
        members = [i for i in range(stop) if i * levels // stop == level]
        held = [i for i in members if p[i] > 0]
        for i in held:
            q[i] = sum(float(counts[j]) for j in members) / len(held)
    total_p, total_q = sum(p), sum(q)
    return sum(
        a / total_p * np.log((a / total_p) / max(b / total_q, 1e-10)) for a, b in zip(p, q, strict=True) if a > 0
    )


@pytest.mark.parametrize("stop", [16, 23, 40, 64])
def test_divergence_is_the_slow_loops(stop: int) -> None:
    counts = np.random.default_rng(5).integers(0, 50, 64).astype(np.float64)
    counts[[3, 17, 30]] = 0
    assert divergence(counts, Grid("int8").levels(stop, 16)) == pytest.approx(
        slow_divergence(counts, stop, 16), rel=1e-9
    )


def test_entropy_takes_the_levels_of_fp8_for_fp8() -> None:
    """Integer levels would cut a long tail off, whose values FP8 holds as closely as the others."""
    bins = np.arange(600)
    held = e4m3((bins + 0.5) / 600 * 448)
    level = Grid("fp8").levels(600, 128)
    assert level[0] == 0 and (np.diff(level) == (np.diff(held) > 0)).all()
    rng = np.random.default_rng(7)
    x = rng.standard_t(3, 400_000)
    low, high = choose(values(x), "entropy", Grid("fp8"), 99.99)
    noise = x - Grid("fp8").rounded(x, low, high)
    assert 10 * np.log10((x**2).sum() / (noise**2).sum()) > 25
    assert choose(values(x), "entropy", Grid("int8"), 99.99)[1] < 0.6 * high


def test_entropy_cuts_a_lone_outlier_off_and_leaves_few_samples_alone() -> None:
    rng = np.random.default_rng(6)
    many = np.concatenate([rng.normal(size=500_000), [40.0]])
    assert 2.5 < choose(values(many), "entropy", Grid("int8"), 99.99)[1] < 6
    few = rng.normal(size=2000)
    assert choose(values(few), "entropy", Grid("int8"), 99.99)[1] > 0.6 * np.abs(few).max()


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_a_tensor_of_zeros_has_the_range_zero(method: str) -> None:
    assert choose(values(np.zeros(100)), method, Grid("uint8"), 99.99) == (0.0, 0.0)


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_a_range_without_end_stays_one(method: str, kind: str) -> None:
    low, _ = choose(Values(-np.inf, 1.0), method, Grid(kind), 99.99)
    assert low == -np.inf


def doubling() -> onnx.ModelProto:
    """y = 2 x, with whole numbers beside it."""
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "two"], ["y"], name="mul"),
            helper.make_node("Shape", ["y"], ["shape"], name="shape"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.array(2, np.float32), "two")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_every_sample_is_seen_whatever_the_batch(method: str) -> None:
    x = np.random.default_rng(7).normal(size=(11, 3)).astype(np.float32)
    found = observe(doubling(), ["x", "y", "shape", "nowhere"], {"x": x}, 4, method)
    assert found.keys() == {"x", "y"}
    assert (found["y"].low, found["y"].high) == (2 * x.min(), 2 * x.max())
    if method == "mse":
        top = found["y"].largest
        np.testing.assert_array_equal(found["y"].counts, np.histogram(2 * x, 2 * HALF, (-top, top))[0])


def test_one_value_that_is_not_finite_is_not_lost_among_the_batches() -> None:
    x: Any = np.ones((12, 3), np.float32)
    x[1, 1] = np.nan
    found = observe(doubling(), ["y"], {"x": x}, 4, "mse")
    assert np.isnan(found["y"].low)
    assert found["y"].counts is None

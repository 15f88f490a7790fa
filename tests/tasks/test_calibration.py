"""Calibration data: unusable samples are named; every sample is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.calibration import Reader, batches, check_ranges, check_samples
from tasks.errors import Fault

INPUTS = {"image": ("float32", (3, 4, 4)), "ids": ("int64", (2,))}


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"image": rng.normal(size=(10, 3, 4, 4)).astype(np.float32), "ids": np.zeros((10, 2), np.int64)}


def test_good_samples_pass_and_zeros_are_fine_for_whole_numbers(arrays: Any) -> None:
    check_samples(arrays, INPUTS)


@pytest.mark.parametrize(("value", "got"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_one_value_that_is_not_finite_names_its_sample(arrays: Any, value: float, got: str) -> None:
    arrays["image"][6, 1, 2, 3] = value
    with pytest.raises(Fault, match="calibration sample 6 of input image is unusable") as caught:
        check_samples(arrays, INPUTS)
    assert got in str(caught.value.got)
    assert "finite float32 values" in str(caught.value.expected)


def test_a_sample_of_zeros_is_named(arrays: Any) -> None:
    arrays["image"][4] = 0
    with pytest.raises(Fault, match="calibration sample 4 of input image is unusable\n  got:      all zeros"):
        check_samples(arrays, INPUTS)


@pytest.mark.parametrize(
    ("change", "what", "got", "expected", "do"),
    [
        (
            lambda v: v[:, :1],
            "sample 0 of input image has another shape",
            (1, 4, 4),
            (3, 4, 4),
            "give 3 channels, not 1",
        ),
        (lambda v: v[:, :, :2], "sample 0 of input image has another shape", (3, 2, 4), (3, 4, 4), "preprocessing"),
        (lambda v: v.reshape(10, 48), "sample 0 of input image has another shape", (48,), (3, 4, 4), "preprocessing"),
        (lambda v: v.astype(np.float64), "sample 0 of input image has another type", "float64", "float32", "convert"),
        (lambda v: (v * 9).astype(np.uint8), "sample 0 of input image has another type", "uint8", "float32", "convert"),
        (lambda v: v[:0], "input image is empty", "0 samples", "at least 1", "samples"),
    ],
    ids=["channels", "height", "flat", "double", "bytes", "empty"],
)
def test_a_misfit_says_got_and_expected(
    arrays: Any, change: Any, what: str, got: object, expected: object, do: str
) -> None:
    arrays["image"] = change(arrays["image"])
    with pytest.raises(Fault, match=what) as caught:
        check_samples(arrays, INPUTS)
    assert str(caught.value.got) == str(got)
    assert str(caught.value.expected) == str(expected)
    assert do in caught.value.do


def test_a_missing_input_is_named(arrays: Any) -> None:
    del arrays["ids"]
    with pytest.raises(Fault, match="lacks input ids"):
        check_samples(arrays, INPUTS)


@pytest.mark.parametrize(("n", "size", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3])])
def test_a_last_partial_batch_is_given(n: int, size: int, sizes: list[int]) -> None:
    values = np.arange(n)
    parts = [b["x"] for b in batches({"x": values, "label": values}, ["x"], size)]
    assert [len(p) for p in parts] == sizes
    assert np.concatenate(parts).tolist() == values.tolist()


def test_a_reader_can_be_read_again() -> None:
    reader = Reader({"x": np.arange(5)}, ["x"], 2)
    assert reader.get_first()["x"].tolist() == [0, 1]
    for _ in range(2):
        seen = []
        while (batch := reader.get_next()) is not None:
            seen += batch["x"].tolist()
        assert seen == [0, 1, 2, 3, 4]
        assert reader.get_next() is None
        reader.rewind()


@pytest.mark.parametrize("bad", [(-np.inf, 1.0), (0.0, np.inf), (np.nan, 1.0)])
def test_a_range_that_is_not_finite_names_its_tensor(bad: tuple[float, float]) -> None:
    check_ranges({"fine": (0.0, 1.0)})
    with pytest.raises(Fault, match="tensor scores has no finite range"):
        check_ranges({"fine": (0.0, 1.0), "scores": bad})


def test_an_empty_range_names_its_tensor() -> None:
    check_ranges({"one value": (0.0, 0.0)})
    with pytest.raises(Fault, match="tensor scores has an empty range") as caught:
        check_ranges({"fine": (0.0, 1.0), "scores": (1.0, -1.0)})
    assert caught.value.got == "[1.0, -1.0]"

"""Calibration samples and activation ranges for quantisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tasks.errors import Fault
from tasks.workloads.protocol import Arrays

ENTROPY_BINS = 512


def check_samples(arrays: Arrays, inputs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuse calibration data that would give meaningless scales.

    Raises Fault naming input, sample index, what was expected and got: no samples, wrong
    type or shape, NaN or infinity, all zeros.
    """
    for name, (dtype, shape) in inputs.items():
        if name not in arrays:
            raise Fault(
                f"calibration data lacks input {name}",
                got=", ".join(arrays),
                expected=", ".join(inputs),
                do="run `dvc repro data`",
            )
        values = arrays[name]
        if len(values) == 0:
            raise Fault(
                f"calibration data of input {name} is empty",
                got="0 samples",
                expected="at least 1",
                do="raise quantize.*.samples",
            )
        if values.shape[1:] != shape:
            raise Fault(
                f"calibration sample 0 of input {name} has another shape",
                got=values.shape[1:],
                expected=shape,
                do=_remake(values.shape[1:], shape),
            )
        if values.dtype != np.dtype(dtype):
            raise Fault(
                f"calibration sample 0 of input {name} has another type",
                got=values.dtype,
                expected=dtype,
                do="convert it as the model's preprocessing does",
            )
        if not np.issubdtype(values.dtype, np.floating):
            continue
        flat = values.reshape(len(values), -1)
        for index, what in (
            (_first(~np.isfinite(flat).all(axis=1)), "NaN or infinity"),
            (_first(~flat.any(axis=1)), "all zeros"),
        ):
            if index is not None:
                raise Fault(
                    f"calibration sample {index} of input {name} is unusable",
                    got=what,
                    expected=f"finite {dtype} values that are not all zero",
                    do="remove or mend that sample",
                )


def batches(arrays: Arrays, names: list[str], size: int) -> Iterator[Arrays]:
    """Batches of `size` of the named inputs; a last partial batch is given too."""
    for start in range(0, len(arrays[names[0]]), size):
        yield {name: arrays[name][start : start + size] for name in names}


def check_ranges(ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise Fault if a tensor's range (low, high) is not finite, or low is above high.

    A range like that comes of a −inf mask or of an overflow, and would give a useless scale.
    One value only, such as [0, 0], is a range.
    """
    for name, (low, high) in ranges.items():
        if not (np.isfinite(low) and np.isfinite(high)):
            raise Fault(
                f"tensor {name} has no finite range",
                got=f"[{low}, {high}]",
                expected="finite activations",
                do="replace infinite constants (such as an attention mask of −inf) before export",
            )
        if low > high:
            raise Fault(
                f"tensor {name} has an empty range",
                got=f"[{low}, {high}]",
                expected="low at most high",
                do="use another calibration or more samples",
            )


class Reader:
    """What ONNX Runtime's calibrators, and ModelOpt's, read batches from; `get_next` ends with None."""

    def __init__(self, arrays: Arrays, names: list[str], size: int) -> None:
        self._make = lambda: batches(arrays, names, size)
        self.rewind()

    def rewind(self) -> None:
        self._batches = self._make()

    def get_first(self) -> Arrays:
        return next(self._make())

    def get_next(self) -> Arrays | None:
        return next(self._batches, None)


def _first(mask: Any) -> int | None:
    found = np.flatnonzero(mask)
    return int(found[0]) if len(found) else None


def _remake(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if len(got) == len(expected) and got[1:] == expected[1:]:
        return f"give {expected[0]} channels, not {got[0]}"
    return "make the samples as the model's preprocessing does"

"""Activation ranges from calibration samples, tensor by tensor, by four methods.

`minmax` takes all values in. `percentile` cuts the same share off both ends (of magnitudes, if symmetric). `entropy`
takes the threshold whose quantised distribution has the least KL divergence from the values' own (Migacz 2017, GTC
S7310). `mse` takes the range with the least squared error of quantisation over the values (Sung et al. 2015,
arXiv:1511.06488; compared with the others by Wu et al. 2020, arXiv:2004.09602, section 4).

Values are seen as a histogram of 2,048 bins on each side of zero, so that memory doesn't grow with the samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import onnx

from tasks import onnx_file
from tasks.calibration import batches
from tasks.errors import Fault
from tasks.workloads.protocol import Arrays

HALF = 2048
SHARES = 100
STRIDE = 8
Range = tuple[float, float]


@dataclass(frozen=True)
class Values:
    """A tensor's lowest and highest value, and counts [4,096] of equal bins from -m to m, the largest magnitude.

    The counts are None where a value isn't finite, and where nobody asked for them.
    """

    low: float
    high: float
    counts: np.ndarray | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Grid:
    """What a format can express: signed symmetric or unsigned 8-bit integers, or FP8 (E4M3)."""

    kind: str

    @property
    def symmetric(self) -> bool:
        """Whether zero is in the middle, so that a range is [-t, t]."""
        return self.kind != "uint8"

    def rounded(self, values: np.ndarray, low: float, high: float) -> np.ndarray:
        """Values as the format holds them where its range is [low, high]; what is outside is cut off."""
        if self.kind == "uint8":
            scale = max((high - low) / 255, 1e-30)
            zero = np.round(-low / scale)
            return (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale
        top = max(-low, high, 1e-30)
        if self.kind == "int8":
            return np.clip(np.round(values / (top / 127)), -127, 127) * (top / 127)
        return e4m3(values / (top / 448)) * (top / 448)

    def levels(self, bins: int, whole: int) -> np.ndarray:
        """The level [bins] of each of as many equal bins from 0 to the end of the range; integers have `whole`."""
        if self.kind != "fp8":
            return np.arange(bins) * whole // bins
        return np.unique(e4m3((np.arange(bins) + 0.5) / bins * 448), return_inverse=True)[1]


def e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest numbers of FP8 E4M3 (Micikevicius et al. 2022, arXiv:2209.05433): 3 bits of fraction, at most 448."""
    magnitude = np.abs(values)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.sign(values) * np.minimum(np.round(magnitude / step) * step, 448.0)


def observe(model: onnx.ModelProto, names: Iterable[str], inputs: Arrays, batch: int, method: str) -> dict[str, Values]:
    """Run all samples through a model, unoptimised, and sum up the named tensors of floating point.

    Names that the model doesn't have, and tensors of other types, are left out. Passes over the data: one for
    `minmax`, else two.
    """
    run = _runner(model, names)
    found: dict[str, Values] = {}
    total = 1 if method == "minmax" else 2
    for tensors in _progress(run, inputs, batch, f"ranges, pass 1 of {total}"):
        for name, value in tensors.items():
            low, high = float(np.min(value)), float(np.max(value))
            if name in found:  # NumPy's minimum passes a NaN on; Python's may not.
                low, high = float(np.minimum(low, found[name].low)), float(np.maximum(high, found[name].high))
            found[name] = Values(low, high)
    if method == "minmax":
        return found
    counts = {n: np.zeros(2 * HALF, np.int64) for n, v in found.items() if np.isfinite((v.low, v.high)).all()}
    for tensors in _progress(run, inputs, batch, "ranges, pass 2 of 2"):
        for name in tensors.keys() & counts.keys():
            top = found[name].largest or 1.0
            counts[name] += np.histogram(tensors[name].ravel(), 2 * HALF, (-top, top))[0]
    return {name: Values(v.low, v.high, counts.get(name)) for name, v in found.items()}


def choose(values: Values, method: str, grid: Grid, percentile: float) -> Range:
    """The range (low, high) of a tensor by a method; [-t, t] if the grid is symmetric. What isn't finite stays so."""
    low, high = values.low, values.high
    if method != "minmax" and values.counts is not None and values.largest > 0:
        if method == "percentile":
            low, high = _percentile(values, grid, percentile)
        else:
            low, high = {"entropy": _entropy, "mse": _mse}[method](values, grid)
        low, high = max(low, values.low), min(high, values.high)
    if grid.symmetric:
        top = max(abs(low), abs(high))
        return (-top, top) if np.isfinite((low, high)).all() else (low, high)
    return low, high


def _magnitudes(values: Values) -> np.ndarray:
    """Counts [2,048] of equal bins of |value|."""
    assert values.counts is not None
    return np.asarray(values.counts[HALF:] + values.counts[:HALF][::-1])


def _percentile(values: Values, grid: Grid, percentile: float) -> Range:
    assert values.counts is not None
    bin_width = values.largest / HALF
    if percentile >= 100:
        return values.low, values.high
    if grid.symmetric:
        share = np.cumsum(_magnitudes(values)) / values.counts.sum()
        top = float((np.searchsorted(share, percentile / 100) + 1) * bin_width)
        return -top, top
    share, cut = np.cumsum(values.counts) / values.counts.sum(), (100 - percentile) / 200
    ends = np.searchsorted(share, cut, "right"), np.searchsorted(share, 1 - cut) + 1
    return float((ends[0] - HALF) * bin_width), float((ends[1] - HALF) * bin_width)


def _entropy(values: Values, grid: Grid) -> Range:
    """Thresholds on the magnitude, in steps of 1/256 of the largest; values of one sign have all 256 levels.

    FP8 has those of its own grid, which are the closer, the smaller the values are.
    """
    counts = _magnitudes(values).astype(np.float64)
    counts[0] = counts[1]  # Zeros, such as a ReLU's, are exact at any threshold.
    # A bin of a few values says nothing of the distribution: at least 32 on average, but never fewer bins than 512.
    merge = HALF // int(np.clip(2 ** np.floor(np.log2(max(counts.sum(), 1) / 32)), 512, HALF))
    counts = counts.reshape(-1, merge).sum(axis=1)
    one_sided = not grid.symmetric and (values.low >= 0 or values.high <= 0)
    levels = 256 if one_sided else 128
    stops = range(levels, len(counts) + 1, max(1, STRIDE // merge))
    best = min(stops, key=lambda stop: divergence(counts, grid.levels(stop, levels)))
    top = best * values.largest / len(counts)
    return -top, top


def divergence(counts: np.ndarray, level: np.ndarray) -> float:
    """KL divergence of counts [n], cut off where `level` [m] ends, the rest in the last bin, from the same in levels.

    `level` is each bin's, from 0 on. A level's mass is spread evenly over those of its bins that hold values. A bin
    that the levels leave empty, though it holds what was cut off, counts as one of the smallest mass.
    """
    kept = counts[: len(level)]
    whole = kept.copy()
    whole[-1] += counts[len(level) :].sum()
    held = whole > 0
    mass = np.bincount(level, kept)
    bins = np.bincount(level, held)
    spread = np.where(held, (mass / np.maximum(bins, 1))[level], 0.0)
    p, q = whole[held] / whole.sum(), spread[held]
    q = np.maximum(q / max(q.sum(), 1e-30), 1e-10)
    return float((p * np.log(p / q)).sum())


def _mse(values: Values, grid: Grid) -> Range:
    """Shares of the whole range, in hundredths; of both ends at once, then of each by itself."""
    assert values.counts is not None
    centres = (np.arange(2 * HALF) + 0.5 - HALF) * values.largest / HALF
    seen = values.counts > 0
    x, weight = centres[seen], values.counts[seen]
    low, high = min(values.low, 0.0), max(values.high, 0.0)

    def error(range_: Range) -> float:
        return float((weight * (x - grid.rounded(x, *range_)) ** 2).sum())

    shares = np.arange(SHARES, 0, -1) / SHARES
    if grid.symmetric:
        top = max(-low, high)
        return min(((-s * top, s * top) for s in shares), key=error)
    found = min(((s * low, s * high) for s in shares), key=error)
    for _ in range(2):
        found = min(((s * low, found[1]) for s in shares), key=error)
        found = min(((found[0], s * high) for s in shares), key=error)
    return found


def _runner(model: onnx.ModelProto, names: Iterable[str]) -> Callable[[Arrays], Arrays]:
    """A function from inputs to the named tensors of floating point that have values."""
    import onnxruntime as ort

    inputs = {value.name for value in model.graph.input}
    made = {name for node in model.graph.node for name in node.output if name}
    wanted = [n for n in dict.fromkeys(names) if n in made]
    fed = [n for n in dict.fromkeys(names) if n in inputs]
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    known = {output.name for output in seen.graph.output}
    seen.graph.output.extend(onnx.ValueInfoProto(name=n) for n in wanted if n not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    content = onnx_file.serialized(seen, "the model")
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(feed: Arrays) -> Arrays:
        found = dict(zip(wanted, session.run(wanted, feed) if wanted else [], strict=True))
        found |= {name: feed[name] for name in fed}
        return {n: v for n, v in found.items() if v.size and np.issubdtype(v.dtype, np.floating)}

    return run


def _progress(run: Callable[[Arrays], Arrays], inputs: Arrays, batch: int, what: str) -> Iterable[Arrays]:
    """The tensors of each batch; says how far it is every ten seconds."""
    total, start, told = len(next(iter(inputs.values()))), time.monotonic(), time.monotonic()
    if not total:
        raise Fault("no calibration samples", got="0", expected="at least 1", do="raise quantize.*.samples")
    for done, part in enumerate(batches(inputs, list(inputs), batch), 1):
        yield run(part)
        if time.monotonic() - told > 10:
            told, share = time.monotonic(), min(1.0, done * batch / total)
            print(f"{what}: {share:.0%}, {(told - start) / share * (1 - share):.0f} s left", flush=True)

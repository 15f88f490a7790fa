"""How near a quantised ONNX file's outputs are to its parent's, before anything is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tasks import onnx_file
from tasks.calibration import batches
from tasks.errors import Fault, Unavailable
from tasks.quantize_nodes import prepared
from tasks.workloads.protocol import Arrays

MAX_SNR_DB = 200.0
RUNTIME = "ONNX Runtime on the CPU"


@dataclass(frozen=True)
class Fidelity:
    """Of each output: signal-to-noise ratio (dB, at most 200) and cosine similarity against the parent's.

    `by` says what ran the file. Where nothing here can, it says why, and there are no figures.
    """

    snr_db: dict[str, float]
    cosine: dict[str, float]
    by: str


def fidelity(parent: Path, child: Path, inputs: Arrays, batch: int = 32) -> Fidelity:
    """Run both folders' models, unoptimised, over all inputs, `batch` at a time, and compare their outputs.

    A BF16 file that ONNX Runtime's CPU provider has no operators for is run in FP32 with its values rounded to BF16.
    Raises Fault if outputs aren't finite, or a file is no valid graph.
    """
    before, after = onnx_file.load(parent), onnx_file.load(child)
    # ONNX Runtime refuses nodes that share a name.
    by, want = RUNTIME, _session(prepared(before), "the parent")
    try:
        got = _session(after, "the quantised file")
    except Unavailable as lacking:
        if onnx_file.notes(after).get("precision") != "bf16":
            return Fidelity({}, {}, f"nothing: {lacking}")
        from tasks.quantize_half import rounded_to_bf16

        got, by = (
            _session(rounded_to_bf16(after), "the quantised file"),
            f"{RUNTIME}, in FP32 with values rounded to BF16: {lacking}",
        )
    sums: dict[str, np.ndarray] = {}
    for part in batches(inputs, list(inputs), batch):
        for name, expected, found in _pairs(want, got, part):
            terms = np.array([expected @ expected, found @ found, expected @ found, ((expected - found) ** 2).sum()])
            sums[name] = sums.get(name, np.zeros(4)) + terms
    snr, cosine = {}, {}
    for name, (signal, power, product, noise) in sums.items():
        ratio = float(10 * np.log10(max(signal, 1e-30) / noise)) if noise else MAX_SNR_DB
        snr[name] = min(MAX_SNR_DB, ratio)
        norms = float(np.sqrt(signal * power))
        cosine[name] = float(product / norms) if norms else float(noise == 0)
    return Fidelity(snr, cosine, by)


def _session(model: onnx.ModelProto, what: str) -> Any:
    """A session of a model as it is; Unavailable, in a line, if the provider lacks an operator of a type."""
    import onnxruntime as ort
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Lacking

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        content = onnx_file.serialized(model, "the model")
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Lacking as error:
        raise Unavailable(" ".join(str(error).split("NOT_IMPLEMENTED :")[-1].split())[:200]) from None
    except Fault:
        raise
    except Exception as error:
        raise Fault(
            f"{what} is not valid",
            got=" ".join(str(error).split())[:300],
            expected="a graph that ONNX Runtime loads",
            do="see what exported it"
            if what == "the parent"
            else "leave the node or operator that it names to quantize.*.keep or keep_ops",
        ) from None


def _pairs(want: Any, got: Any, part: Arrays) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Name, and each side's values [m] in double precision, of every output for one batch."""
    names = [output.name for output in want.get_outputs()]
    pairs = []
    for name, a, b in zip(names, want.run(names, part), got.run(names, part), strict=True):
        expected, found = (v.ravel().astype(np.float64) for v in (a, b))
        for values, when, do in (
            (expected, "before quantisation", "look at the model and at the calibration samples"),
            (found, "after quantisation", "look at the scales and at constants of the model"),
        ):
            if not np.isfinite(values).all():
                raise Fault(
                    f"output {name} is not finite {when}",
                    got=f"{int((~np.isfinite(values)).sum())} of {values.size} values are NaN or infinity",
                    expected="finite values",
                    do=do,
                )
        pairs.append((name, expected, found))
    return pairs

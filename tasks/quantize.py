"""Post-training quantisation, explicit in the ONNX file: a step for every numeric format.

INT8 is in the style of the runtime: `onnxruntime` (tasks/quantize_int8.py) or `tensorrt` (tasks/quantize_trt.py, also
FP8); INT4 is of weights only (tasks/quantize_weights.py); FP16 and BF16 are casts (tasks/quantize_half.py).
Calibrations are in tasks/calibration_ranges.py. See Wu et al. 2020, arXiv:2004.09602.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from tasks import onnx_file, proof, quantize_half, quantize_int8, quantize_trt, quantize_weights, two_of_four
from tasks.calibration import check_samples
from tasks.data import read
from tasks.errors import Fault
from tasks.fidelity import Fidelity, fidelity
from tasks.files import atomic_folder, sha256, size_bytes
from tasks.quantize_nodes import INTEGER, QDQ, Maker, prepared, refuse_quantised
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import Arrays, Workload, largest, load_workload

if TYPE_CHECKING:
    from tasks.sensitivity import SearchReport

MIN_SNR_DB = 3.0


@dataclass(frozen=True)
class QuantizeReport:
    """Q/DQ nodes in the file, its bytes, and each output against the parent's on calibration data.

    `dynamic_nodes` counts matrix products whose activations are quantised batch by batch, `half_nodes` nodes that
    compute in FP16 or BF16. Dynamic activations and INT4 weights need no calibration: its method, samples and digest
    are None or 0 then. `kept` says why a node stays in higher precision, by its name. `snr_db` is the
    signal-to-noise ratio in decibels, `cosine` the cosine similarity, `compared_by` what ran the file.
    `sparse_layers` is as in the export's report, `search` the search for mixed precision, if one was asked for.
    """

    format: str
    style: str | None
    quantize_nodes: int
    dequantize_nodes: int
    dynamic_nodes: int
    half_nodes: int
    calibration: str | None
    calibration_samples: int
    calibration_batch: int
    calibration_sha256: str | None
    kept: dict[str, str]
    size_bytes: int
    sha256: str
    snr_db: dict[str, float]
    cosine: dict[str, float]
    compared_by: str
    sparse_layers: list[two_of_four.SparseLayer]
    search: SearchReport | None


def quantize(source: Path, workload: Path, data: Path, target: Path, params: QuantizeParams) -> QuantizeReport:
    """Write `target/model.onnx`, one file, in `params.format`, calibrated on `data/calibration.npz` only.

    Where nothing is calibrated that split only serves to compare outputs. A search reads validation too.

    Raises Fault for unusable calibration data, a range or scale that is not finite and
    positive, outputs that are mostly noise (below 3 dB against the parent's), a layer of the
    parent that is 2:4 sparse no more, or an input file that changed meanwhile.
    """
    task, split = load_workload(workload), data / "calibration.npz"
    samples = {k: v[: params.samples] for k, v in read(split).items()}
    check_samples(samples, largest(task))
    parent, before = onnx_file.load(source), sha256(source)
    sparse = two_of_four.made_in(parent)
    with atomic_folder(target) as folder, tempfile.TemporaryDirectory() as scratch:
        maker = maker_of(source, Path(scratch), samples, task, params)
        found = _searched(parent, Path(scratch), task, data, params, maker)
        model = maker.make(found.kept if found else ())
        check_made(model, params)
        notes = {**_notes(params, samples), **({"calibration_sha256": sha256(split)} if calibrated(params) else {})}
        onnx_file.annotate(model, {**onnx_file.notes(parent), **notes})
        (folder / onnx_file.FILE).write_bytes(onnx_file.serialized(model, target.name))
        shutil.copyfile(source / proof.FILE, folder / proof.FILE)
        if sha256(source) != before:
            raise Fault(
                f"quantisation changed its input {source}",
                got="other bytes than before",
                expected="an input that is only read",
                do="run `dvc repro` to export it again, and report this",
            )
        near = fidelity(source, folder, {n: samples[n] for n in task.INPUTS}, params.batch)
        _refuse_noise(near)
        kinds = [node.op_type for node in model.graph.node]
        return QuantizeReport(
            format=params.format,
            style=notes.get("style"),
            quantize_nodes=kinds.count("QuantizeLinear"),
            dequantize_nodes=kinds.count("DequantizeLinear"),
            dynamic_nodes=sum(kind in INTEGER for kind in kinds),
            half_nodes=_halves(model, params),
            calibration=notes.get("calibration"),
            calibration_samples=int(notes.get("samples", 0)),
            calibration_batch=int(notes.get("batch", 0)),
            calibration_sha256=notes.get("calibration_sha256"),
            kept={**maker.kept, **dict.fromkeys(found.kept if found else (), "search")},
            size_bytes=size_bytes(folder / onnx_file.FILE),
            sha256=sha256(folder / onnx_file.FILE),
            snr_db=near.snr_db,
            cosine=near.cosine,
            compared_by=near.by,
            sparse_layers=two_of_four.check(model, sparse) if sparse else [],
            search=found,
        )


def maker_of(source: Path, scratch: Path, samples: Arrays, task: Workload, params: QuantizeParams) -> Maker:
    """A maker of the model of `source` in `params.format`: what is calibrated is so once, and `source` only read."""
    model = onnx_file.load(source)
    inputs = {name: samples[name] for name in task.INPUTS}
    if params.format in quantize_half.HALF:
        return quantize_half.maker(model, scratch, inputs, params)
    refuse_quantised(model)
    if params.format == "int4":
        return quantize_weights.maker(model, params)
    if params.format == "fp8" or params.style == "tensorrt":
        return quantize_trt.maker(model, scratch, inputs, params)
    if params.activations == "dynamic":
        return quantize_int8.dynamic(model, params)
    return quantize_int8.static(model, scratch, inputs, params)


def made(
    source: Path, folder: Path, samples: Arrays, task: Workload, params: QuantizeParams, exclude: tuple[str, ...] = ()
) -> None:
    """Write `folder/model.onnx` by `params`, with the nodes of `exclude` in floating point; nothing is compared."""
    with tempfile.TemporaryDirectory() as scratch:
        _write(folder, maker_of(source, Path(scratch), samples, task, params), exclude)


def nodes(source: Path, samples: Arrays, task: Workload, params: QuantizeParams) -> list[str]:
    """Names of the nodes of `source/model.onnx` that would be quantised by `params`, in the file's order."""
    with tempfile.TemporaryDirectory() as scratch:
        return maker_of(source, Path(scratch), samples, task, params).nodes


def calibrated(params: QuantizeParams) -> bool:
    """Whether a format's file depends on calibration samples."""
    return params.format != "int4" and params.activations != "dynamic"


def check_made(model: onnx.ModelProto, params: QuantizeParams) -> None:
    """Raise Fault if nothing is in the format that was asked for, or a scale is unusable."""
    if params.format in quantize_half.HALF:
        quantize_half.converted(model, params.format)
    elif params.activations != "dynamic":
        check_scales(model)
    elif not any(node.op_type in INTEGER for node in model.graph.node):
        raise _nothing_quantised("no matrix product or LSTM with a constant weight")


def _write(folder: Path, maker: Maker, exclude: tuple[str, ...]) -> None:
    model = maker.make(exclude)
    (folder / onnx_file.FILE).write_bytes(onnx_file.serialized(model, folder.name))


def _searched(
    parent: onnx.ModelProto, scratch: Path, task: Workload, data: Path, params: QuantizeParams, maker: Maker
) -> SearchReport | None:
    """The search that `params.search` asks for; Fault if it leaves nothing quantised."""
    if params.search is None:
        return None
    from tasks.sensitivity import search

    source = scratch / "parent"
    source.mkdir()
    (source / onnx_file.FILE).write_bytes(onnx_file.serialized(prepared(parent), "the parent"))

    def make(folder: Path, exclude: tuple[str, ...]) -> None:
        _write(folder, maker, exclude)

    found = search(source, task, data, params, make, maker.nodes)
    if not found.within_budget:
        for row in found.table:
            print(f"{row.node} ({row.op}): {row.snr_db:.1f} dB, cosine {row.cosine:.4f}", flush=True)
        raise Fault(
            "no mixed precision holds the budget",
            got=found.verdict,
            expected="a model with at least one node quantised",
            do="raise quantize.*.search.budget, use another calibration or format, or leave this variant out",
        )
    return found


def _notes(params: QuantizeParams, samples: Arrays) -> dict[str, str]:
    """What the file says of its format and of how it was calibrated; with the parent's, its identity."""
    told: dict[str, str] = {"precision": params.format}
    if params.format == "int8":
        told |= {"style": params.style, "activations": params.activations}
    if params.format == "fp8":
        told |= {"style": "tensorrt"}
    if params.format == "int4":
        told |= {"block": str(params.block)}
    if not calibrated(params):
        return told
    method = {"fp16": "minmax", "bf16": "minmax"}.get(params.format, params.calibration)
    told |= {"calibration": method, "samples": str(len(samples["label"])), "batch": str(params.batch)}
    return told | ({"percentile": str(params.percentile)} if method == "percentile" else {})


def _halves(model: onnx.ModelProto, params: QuantizeParams) -> int:
    return quantize_half.converted(model, params.format) if params.format in quantize_half.HALF else 0


def _refuse_noise(near: Fidelity) -> None:
    noisy = [f"{name} at {value:.1f} dB" for name, value in near.snr_db.items() if value < MIN_SNR_DB]
    if noisy:
        raise Fault(
            "quantisation destroyed the outputs",
            got="; ".join(noisy),
            expected=f"at least {MIN_SNR_DB} dB against the parent",
            do="try another calibration or more samples",
        )


def check_scales(model: onnx.ModelProto) -> None:
    """Raise Fault if a scale is NaN, infinite, zero, negative or no constant, naming its tensor."""
    constants: dict[str, np.ndarray] = {}
    pairs = []
    for graph in onnx_file.graphs(model.graph):
        constants |= onnx_file.constants(graph)
        pairs += [n for n in graph.node if n.op_type in QDQ]
    if not pairs:
        raise _nothing_quantised("no Q/DQ nodes")
    for node in pairs:
        scale = constants.get(node.input[1])
        if scale is None:
            raise Fault(
                f"scale of {node.input[0]} is computed by the model",
                got=f"{node.input[1]}, no initializer and no Constant node",
                expected="a constant",
                do="quantise the model as export wrote it",
            )
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise Fault(
                f"scale of {node.input[0]} is unusable",
                got=np.ravel(scale)[:4].tolist(),
                expected="finite and above 0",
                do="look at the calibration data and at constants of the model",
            )


def _nothing_quantised(got: str) -> Fault:
    return Fault(
        "nothing was quantised",
        got=got,
        expected="at least one",
        do="check that the model has convolutions or matrix products; dynamic activations are for the latter only",
    )

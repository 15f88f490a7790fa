"""Post-training INT8 quantisation with explicit Q/DQ nodes, in the style of the runtime.

`onnxruntime`: unsigned activations, signed per-channel weights of reduced range (7 bits), which
do not saturate on CPUs without VNNI. `tensorrt`: symmetric, signed, per channel, no
quantised bias, placed for TensorRT's fusions by NVIDIA ModelOpt. Dynamic activations: the
runtime finds each batch's own ranges, and the results depend on the batch.
Calibration: min-max; entropy (KL divergence, Migacz 2017, GTC S7310); percentile.
See Wu et al. 2020, arXiv:2004.09602.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tasks import onnx_file, two_of_four
from tasks.calibration import ENTROPY_BINS, Reader, check_ranges, check_samples
from tasks.data import read
from tasks.errors import Fault
from tasks.files import atomic_folder, sha256, size_bytes
from tasks.parity import fidelity
from tasks.quiet import quiet
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import Arrays, Workload, largest, load_workload

MIN_SNR_DB = 3.0


@dataclass(frozen=True)
class QuantizeReport:
    """Q/DQ pairs in the file, its bytes, and each output against the parent's on calibration data.

    `dynamic_nodes` counts matrix products whose activations are quantised batch by batch; with
    those there is no calibration, and its digest is None. `snr_db` is the signal-to-noise ratio
    in decibels, `cosine` the cosine similarity. `sparse_layers` is as in the export's report.
    """

    quantize_nodes: int
    dequantize_nodes: int
    dynamic_nodes: int
    calibration_samples: int
    calibration_sha256: str | None
    size_bytes: int
    sha256: str
    snr_db: dict[str, float]
    cosine: dict[str, float]
    sparse_layers: list[two_of_four.SparseLayer]


def quantize(source: Path, workload: Path, data: Path, target: Path, params: QuantizeParams) -> QuantizeReport:
    """Write `target/model.onnx`, one file, INT8 by `params`, calibrated on `data/calibration.npz` only.

    With dynamic activations nothing is calibrated; that split only serves to compare outputs.

    Raises Fault for unusable calibration data, a range or scale that is not finite and
    positive, outputs that are mostly noise (below 3 dB against the parent's), or a layer of the
    parent that is 2:4 sparse no more.
    """
    task = load_workload(workload)
    split = data / "calibration.npz"
    samples = {k: v[: params.samples] for k, v in read(split).items()}
    check_samples(samples, largest(task))
    parent, dynamic = onnx_file.load(source), params.activations == "dynamic"
    sparse = two_of_four.made_in(parent)
    with atomic_folder(target) as folder, tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "source"
        shutil.copytree(source, copy)
        made = Path(scratch) / "made"
        made.mkdir()
        with quiet():
            if dynamic:
                _dynamic(copy, made)
            else:
                {"onnxruntime": _onnxruntime, "tensorrt": _tensorrt}[params.style](copy, made, samples, task, params)
        model = onnx_file.load(made)
        kinds = [node.op_type for node in model.graph.node]
        if not dynamic:
            check_scales(model)
        elif "MatMulInteger" not in kinds:
            raise _nothing_quantised("no matrix product with a constant weight")
        calibration = {} if dynamic else {"calibration_sha256": sha256(split)}
        onnx_file.annotate(model, {**onnx_file.notes(parent), "precision": params.format, **calibration})
        (folder / onnx_file.FILE).write_bytes(onnx_file.serialized(model, target.name))
        snr, cosine = fidelity(source, folder, {n: samples[n] for n in task.INPUTS})
        noisy = [f"{name} at {value:.1f} dB" for name, value in snr.items() if value < MIN_SNR_DB]
        if noisy:
            raise Fault(
                "quantisation destroyed the outputs",
                got="; ".join(noisy),
                expected=f"at least {MIN_SNR_DB} dB against the parent",
                do="try another calibration or more samples",
            )
        return QuantizeReport(
            kinds.count("QuantizeLinear"),
            kinds.count("DequantizeLinear"),
            kinds.count("MatMulInteger"),
            0 if dynamic else len(samples["label"]),
            calibration.get("calibration_sha256"),
            size_bytes(folder),
            sha256(folder),
            snr,
            cosine,
            two_of_four.check(model, sparse) if sparse else [],
        )


def _onnxruntime(source: Path, folder: Path, samples: Arrays, task: Workload, params: QuantizeParams) -> None:
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.registry import QDQRegistry
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = source / "prepared.onnx"
    quant_pre_process(source / onnx_file.FILE, prepared, skip_symbolic_shape=True)
    inputs = {name: samples[name] for name in task.INPUTS}
    try:
        ranges = _ranges(prepared, inputs, params, params.calibration)
    except ValueError:
        _ranges(prepared, inputs, params, "minmax")  # A histogram of infinities fails without the tensor's name.
        raise
    quantizer = QDQQuantizer(
        onnx.load(prepared),
        per_channel=True,
        reduce_range=True,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=ranges,
        nodes_to_quantize=[],
        nodes_to_exclude=[],
        op_types_to_quantize=list(QDQRegistry),
        extra_options={},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(folder / onnx_file.FILE), False)


def _dynamic(source: Path, folder: Path) -> None:
    """Products with constant weights become integer ones, weights signed, of 7 bits and per channel; tables of 8."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx_file.load(source)
    # What the exporter noted of shapes doesn't hold once the library has turned Gemm into MatMul.
    del model.graph.value_info[:]
    onnx_file.fold_transposes(model.graph)
    quantize_dynamic(
        model,
        folder / onnx_file.FILE,
        op_types_to_quantize=["MatMul", "Gemm", "LSTM", "Gather"],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


def _ranges(model: Path, inputs: Arrays, params: QuantizeParams, method: str) -> Any:
    """ONNX Runtime's activation ranges by `method`; Fault if one is not finite, naming its tensor."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator
    from onnxruntime.quantization.registry import QDQRegistry

    known: dict[str, tuple[Any, dict[str, Any]]] = {
        "minmax": (CalibrationMethod.MinMax, {}),
        "entropy": (CalibrationMethod.Entropy, {"num_bins": ENTROPY_BINS}),
        "percentile": (CalibrationMethod.Percentile, {"percentile": params.percentile, "symmetric": False}),
    }
    calibrate_method, options = known[method]
    calibrator = create_calibrator(
        model,
        list(QDQRegistry),
        augmented_model_path=str(model.with_name("augmented.onnx")),
        calibrate_method=calibrate_method,
        extra_options=options,
    )
    # The library's histograms want batches of one size: the largest that leaves no partial one.
    n = len(next(iter(inputs.values())))
    size = next(s for s in range(min(params.batch, n), 0, -1) if n % s == 0)
    calibrator.collect_data(Reader(inputs, list(inputs), size))
    ranges = calibrator.compute_data()
    found = {name: ranges[name].range_value for name in ranges.keys()}  # noqa: SIM118
    check_ranges({name: (float(np.ravel(low)[0]), float(np.ravel(high)[0])) for name, (low, high) in found.items()})
    return ranges


def _tensorrt(source: Path, folder: Path, samples: Arrays, task: Workload, params: QuantizeParams) -> None:
    from modelopt.onnx.quantization import quantize as modelopt_quantize

    method = {"minmax": "max", "entropy": "entropy"}[params.calibration]
    modelopt_quantize(
        str(source / onnx_file.FILE),
        quantize_mode="int8",
        calibration_data_reader=Reader(samples, list(task.INPUTS), params.batch),
        calibration_method=method,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=str(folder / onnx_file.FILE),
        log_level="WARNING",
    )


def check_scales(model: onnx.ModelProto) -> None:
    """Raise Fault if a scale is NaN, infinite, zero, negative or no constant, naming its tensor."""
    constants: dict[str, np.ndarray] = {}
    pairs = []
    for graph in onnx_file.graphs(model.graph):
        constants |= onnx_file.constants(graph)
        pairs += [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
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

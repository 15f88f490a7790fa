"""TensorRT for RTX: ahead-of-time engines for named compute capabilities, built without a GPU.

Networks are strongly typed: precision is what the ONNX file says.
Manual: https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_rtx as trt

from tasks import onnx_file, target
from tasks.engines.protocol import Session
from tasks.errors import Fault, Unavailable
from tasks.files import sha256
from tasks.manifest import Manifest, TensorSpec, dynamic, require
from tasks.settings import BuildParams

FILE = "engine.rtx"


class _Log(trt.ILogger):
    """Keeps TensorRT's errors, so that a failed build can say why."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(message)


def build(source: Path, folder: Path, spec: BuildParams) -> Manifest:
    """Build `folder/engine.rtx` from `source/model.onnx` for `spec.compute_capabilities`.

    Raises Fault, with the parser's node and operator or the builder's own words, if that fails.
    """
    model, log = onnx_file.load(source), _Log()
    axes = onnx_file.axes(model)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(source / onnx_file.FILE)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise Fault(
            f"TensorRT-RTX can't read {source.name}",
            got="; ".join(f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" for e in errors),
            expected="operators it supports",
            do="use opset 18 to 21, or another backend for this variant",
        )
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(spec.compute_capabilities)
    for i, capability in enumerate(spec.compute_capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, "SM" + capability.replace(".", "")), i)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        sample = dynamic(tuple(tensor.shape), axes)[1:]
        least = tuple(d if isinstance(d, int) else 1 for d in sample)
        most = tuple(d if isinstance(d, int) else axes[str(d)] for d in sample)
        profile.set_shape(tensor.name, (1, *least), (min(8, spec.max_batch), *most), (spec.max_batch, *most))
    config.add_optimization_profile(profile)
    blob = builder.build_serialized_network(network, config)
    if blob is None:
        raise Fault(
            f"TensorRT-RTX could not build {source.name}",
            got="; ".join(log.errors) or "no engine and no message",
            expected="an engine",
            do="see the messages; another opset, format or backend may do",
        )
    (folder / FILE).write_bytes(bytes(blob))
    notes = onnx_file.notes(model)
    kinds = [str(network.get_layer(i).type).removeprefix("LayerType.") for i in range(network.num_layers)]
    return Manifest(
        backend="tensorrt_rtx",
        backend_version=trt.__version__,
        built_for={
            "device": "cuda",
            "compute_capabilities": list(spec.compute_capabilities),
            "engine": validity(bytes(blob)),
        },
        engine_file=FILE,
        inputs=tuple(_spec(network.get_input(i), axes) for i in range(network.num_inputs)),
        outputs=tuple(_spec(network.get_output(i), axes) for i in range(network.num_outputs)),
        max_batch=spec.max_batch,
        axes=axes,
        threads=spec.threads,
        preprocessing=notes.get("preprocessing"),
        precision_asked=notes.get("precision", "as the model"),
        operators={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        engine_sha256=sha256(folder / FILE),
        onnx_sha256=sha256(source),
        model_sha256=notes.get("model_sha256"),
        calibration_sha256=notes.get("calibration_sha256"),
        rebuild=f"dvc repro build@{folder.name}",
    )


def validity(blob: bytes) -> str:
    """What the runtime says of an engine's header: "valid", or why it can't run on this machine.

    Raises Fault if the header is not that of an engine. Without a GPU no more can be known.
    """
    state, why = trt.Runtime(_Log()).get_engine_validity(blob)
    diagnostics = [name for name, flag in trt.EngineInvalidityDiagnostics.__members__.items() if why & int(flag)]
    if "MALFORMED_ENGINE" in diagnostics:
        raise Fault(
            "not a TensorRT-RTX engine",
            got=f"{len(blob)} bytes with a malformed header",
            expected="an engine",
            do="rebuild it",
        )
    if target.fingerprint().compute_capability is None:
        return "well-formed; no GPU here to check it against"
    return "valid" if state == trt.EngineValidity.VALID else ", ".join(diagnostics) or state.name.lower()


def _spec(tensor: Any, axes: dict[str, int]) -> TensorSpec:
    return TensorSpec(tensor.name, np.dtype(trt.nptype(tensor.dtype)).name, dynamic(tuple(tensor.shape), axes))


def open(folder: Path, described: Manifest) -> Session:
    """Say why the engine can't be run: this backend builds ahead of time only, so far.

    Raises Fault for an engine of another version, else Unavailable.
    """
    require(described, folder, version=trt.__version__)
    here = target.fingerprint()
    built = described.built_for["compute_capabilities"]
    if here.compute_capability is None:
        raise Unavailable(f"built, not run here: no NVIDIA GPU (built for compute capability {', '.join(built)})")
    if here.compute_capability not in built:
        raise Unavailable(
            f"built, not run here: built for compute capability {', '.join(built)}, "
            f"here {here.gpu_name} with {here.compute_capability}"
        )
    raise Unavailable("built, not run here: this version builds tensorrt_rtx engines ahead of time only")

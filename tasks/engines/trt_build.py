"""One build for TensorRT 10, TensorRT 11 and TensorRT for RTX; `trt` is the module.

Networks are strongly typed: precision is what the ONNX file says, by its types and Q/DQ nodes. TensorRT 11 knows
nothing else; TensorRT 10 is told so by a flag that 11 ignores. There are no precision flags and no calibrators.
Manual: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/python-api-docs.html
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tasks import layers as told
from tasks import onnx_file, styles
from tasks.engines import trt_callbacks, trt_layers
from tasks.engines.protocol import Built
from tasks.engines.trt_profile import optimum
from tasks.errors import Fault
from tasks.files import sha256
from tasks.manifest import Layer, Manifest, TensorSpec, dynamic
from tasks.settings import BuildParams


@trt_callbacks.uncollected()
def build(
    trt: Any,
    source: Path,
    folder: Path,
    spec: BuildParams,
    file: str,
    built_for: dict[str, Any],
    configure: Callable[[Any], None],
) -> Built:
    """Build `folder/file` from `source/model.onnx`; `configure` adds the backend's own settings to a builder config.

    Raises Fault, with the parser's node and operator or the builder's own words, if that fails; KeyboardInterrupt, with
    no engine left, after Ctrl-C.
    """
    model = onnx_file.load(source)
    axes, notes = onnx_file.axes(model), onnx_file.notes(model)
    asked = styles.asked(spec.precision, spec.where, notes, source.name)
    if unfit := styles.slow_for(spec.backend, spec.where, notes):
        raise Fault(
            f"{spec.backend} can't take {source.name}",
            got=unfit,
            expected="a file in its own style",
            do="quantise with style: tensorrt, and build from that",
        )
    log = trt_callbacks.logger(trt)
    builder = trt.Builder(log)
    network = parse(trt, builder, log, source, model)
    config = settings(trt, builder, network, spec, axes)
    configure(config)
    serialize(trt, builder, network, config, log, folder / file, spec.backend)
    layers, layers_from = layers_of(trt, network, log, folder / file, spec)
    kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]
    described = Manifest(
        backend=spec.backend,
        backend_version=trt.__version__,
        device="cuda",
        built_for={"device": "cuda", **built_for, "layers_from": layers_from},
        engine_file=file,
        inputs=tuple(tensor_spec(trt, network.get_input(i), axes) for i in range(network.num_inputs)),
        outputs=tuple(tensor_spec(trt, network.get_output(i), axes) for i in range(network.num_outputs)),
        max_batch=spec.max_batch,
        axes=axes,
        threads=spec.threads,
        settings={"cuda_graph": spec.cuda_graph, "precision": asked, **compatible(spec)},
        preprocessing=notes.get("preprocessing"),
        precision_asked=asked,
        precision_found=told.found(layers),
        operators={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        engine_sha256=sha256(folder / file),
        onnx_sha256=sha256(source),
        model_sha256=notes.get("model_sha256"),
        calibration_sha256=notes.get("calibration_sha256"),
        rebuild=f"dvc repro build@{folder.name}",
    )
    return Built(described, layers)


def compatible(spec: BuildParams) -> dict[str, bool]:
    """The promises that were built into an engine and that opening relies on."""
    return {key: True for key in ("version_compatible", "hardware_compatible", "refit") if getattr(spec, key)}


def parse(trt: Any, builder: Any, log: Any, source: Path, model: onnx.ModelProto) -> Any:
    """The network of `source/model.onnx`; Fault with each node, its operator and why, if one isn't supported."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(source / onnx_file.FILE)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise Fault(
            f"{trt.__name__} can't read {source.name}",
            got="; ".join(_error(e, model) for e in errors) or trt_callbacks.said(log, "no reason given"),
            expected="operators and types that it supports",
            do="use opset 18 to 21, or another format or backend for this variant",
        )
    return network


def _error(error: Any, model: onnx.ModelProto) -> str:
    """A parser error by node and operator. The parser names neither where it fails before it reads the node."""
    name, operator = error.node_name(), error.node_operator()
    if not operator and 0 <= error.node() < len(model.graph.node):
        node = model.graph.node[error.node()]
        name, operator = name or node.name, node.op_type
    return f"node {name or error.node()} ({operator or 'unknown operator'}): {' '.join(str(error.desc()).split())}"


def settings(trt: Any, builder: Any, network: Any, spec: BuildParams, axes: dict[str, int]) -> Any:
    """A builder config by `spec`, with one optimisation profile over all batches and sizes of the dynamic axes."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if spec.precision != "tf32":
        # On by default: FP32 would be a precision that nobody asked for.
        config.clear_flag(trt.BuilderFlag.TF32)
    for asked, flag in ((spec.sparse, trt.BuilderFlag.SPARSE_WEIGHTS), (spec.refit, trt.BuilderFlag.REFIT)):
        if asked:
            config.set_flag(flag)
    if spec.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, spec.workspace_mib << 20)
    profile = builder.create_optimization_profile()
    batch, sizes = optimum(spec, axes)
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        sample = dynamic(tuple(tensor.shape), axes)[1:]
        least = tuple(d if isinstance(d, int) else 1 for d in sample)
        usual, most = (tuple(d if isinstance(d, int) else of[str(d)] for d in sample) for of in (sizes, axes))
        profile.set_shape(tensor.name, (1, *least), (batch, *usual), (spec.max_batch, *most))
    config.add_optimization_profile(profile)
    return config


def serialize(trt: Any, builder: Any, network: Any, config: Any, log: Any, file: Path, name: str) -> None:
    """Build and write the engine, telling each phase; Fault with the builder's words if it gives none."""
    with trt_callbacks.interruptible() as stop:
        monitor = trt_callbacks.progress(trt, name, stop)
        config.progress_monitor = monitor
        blob = builder.build_serialized_network(network, config)
        if blob is not None and not stop():
            file.write_bytes(memoryview(blob))
    if blob is None:
        raise Fault(
            f"{trt.__name__} could not build {file.parent.name}",
            got=trt_callbacks.said(log, "no engine and no message"),
            expected="an engine",
            do="see the messages; another opset, format, workspace_mib or backend may do",
        )


def layers_of(trt: Any, network: Any, log: Any, file: Path, spec: BuildParams) -> tuple[tuple[Layer, ...], str]:
    """What an engine runs, and where that is known from: the inspector where the engine can be opened, else the log."""
    if spec.backend == "tensorrt":
        engine = deserialize(trt, file, log, bool(spec.version_compatible))
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
        if layers := trt_layers.of_json(text):
            return layers, trt_layers.INSPECTOR
    if layers := trt_layers.of_log(log.layers, tf32=spec.precision == "tf32"):
        return layers, trt_layers.LOG
    return trt_layers.of_network(trt, network), trt_layers.NETWORK


def deserialize(trt: Any, file: Path, log: Any, host_code: bool) -> Any:
    """The engine of a file; Fault with the runtime's words if it isn't one for this version and GPU.

    `host_code` lets a version-compatible engine bring the runtime that it was built with.
    """
    runtime = trt.Runtime(log)
    if host_code:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        raise Fault(
            f"{trt.__name__} {trt.__version__} can't load {file}",
            got=trt_callbacks.said(log, "no engine and no message"),
            expected="an engine for this version, GPU and driver, whole and with nothing before its header",
            do=f"rebuild: dvc repro build@{file.parent.name}",
        )
    return engine


def tensor_spec(trt: Any, tensor: Any, axes: dict[str, int]) -> TensorSpec:
    """Name, type and shape of a network's input or output; Fault for a type that NumPy and ml_dtypes don't know."""
    names = {trt.DataType.BF16: "bfloat16", trt.DataType.FP8: "float8_e4m3fn"}
    try:
        dtype = names.get(tensor.dtype) or np.dtype(trt.nptype(tensor.dtype)).name
    except TypeError:
        raise Fault(
            f"input or output {tensor.name} has a type that can't be passed",
            got=tensor.dtype.name,
            expected="floating point or whole numbers of 8 bits and more",
            do="cast it inside the model",
        ) from None
    return TensorSpec(tensor.name, dtype, dynamic(tuple(tensor.shape), axes))

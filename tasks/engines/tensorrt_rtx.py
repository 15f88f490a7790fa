"""TensorRT for RTX: ahead-of-time engines for named compute capabilities, built without a GPU.

The GPU's own compiler finishes the kernels when an engine first runs; what it made is kept in a runtime cache.
Manual: https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorrt_rtx as trt

from tasks import layout, target
from tasks.engines import trt_build, trt_callbacks, trt_checks
from tasks.engines.protocol import Built, DeviceSession, imported
from tasks.errors import Fault, Unavailable
from tasks.files import atomic
from tasks.manifest import Manifest, require
from tasks.settings import BuildParams

FILE = "engine.rtx"
RUNS_ON = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


def build(source: Path, folder: Path, spec: BuildParams) -> Built:
    """Build `folder/engine.rtx` from `source/model.onnx` for `spec.compute_capabilities`.

    There is no timing cache: with one the builder wants a GPU. Raises Fault, with the parser's node and operator or
    the builder's own words, if the build fails.
    """
    here = target.fingerprint().compute_capability
    if spec.refit and here not in RUNS_ON:
        raise Unavailable(
            "tensorrt_rtx builds a refittable engine on its GPU only, and there is none here that it runs on"
        )

    def configure(config: Any) -> None:
        config.num_compute_capabilities = len(spec.compute_capabilities)
        for i, capability in enumerate(spec.compute_capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, "SM" + capability.replace(".", "")), i)

    built_for = {"compute_capabilities": list(spec.compute_capabilities)}
    built = trt_build.build(trt, source, folder, spec, FILE, built_for, configure)
    validity(folder, built.manifest)
    return built


@trt_callbacks.uncollected()
def validity(folder: Path, described: Manifest) -> str:
    """What the runtime says of an engine's header: "valid", "suboptimal", or why it can't run on this machine.

    Raises Fault if the header is not that of an engine. Without a GPU no more can be known.
    """
    runtime, file = trt.Runtime(trt_callbacks.logger(trt)), folder / described.engine_file
    with file.open("rb") as stream:
        header = stream.read(runtime.engine_header_size)
    state, why = runtime.get_engine_validity(header)
    diagnostics = [name for name, flag in trt.EngineInvalidityDiagnostics.__members__.items() if why & int(flag)]
    if "MALFORMED_ENGINE" in diagnostics:
        raise Fault(
            f"{file} is no TensorRT-RTX engine",
            got=f"{file.stat().st_size} bytes with a malformed header, or with something before it",
            expected=f"an engine of tensorrt_rtx {described.backend_version}",
            do=f"rebuild: {described.rebuild}",
        )
    if target.fingerprint().compute_capability is None:
        return "well-formed; no GPU here to check it against"
    return ", ".join(diagnostics) or state.name.lower()


@trt_callbacks.uncollected()
def open(folder: Path, described: Manifest) -> DeviceSession:
    """Open an engine on an RTX GPU.

    Raises Unavailable without a GPU that it was built for, Fault for an engine of another version, for one that was cut
    off or has bytes before its header, or if another precision is asked than it was built with.
    """
    trt_checks.precision(folder, described)
    require(described, folder, version=trt.__version__)
    found = validity(folder, described)
    _check_gpu(described)
    if found not in ("valid", "suboptimal"):
        raise Fault(
            f"engine {folder.name} can't run on this GPU",
            got=f"here: {found}",
            expected=f"built for: compute capability {', '.join(described.built_for['compute_capabilities'])}",
            do=f"bring the driver up to date, or rebuild: {described.rebuild}",
        )
    trt_session = imported("trt_session")
    log = trt_callbacks.logger(trt)
    engine = trt_build.deserialize(trt, folder / described.engine_file, log, host_code=False)
    config, save = runtime_config(engine, described)

    def context() -> Any:
        return engine.create_execution_context(config)

    return trt_session.TensorRtSession(trt, described, trt_session.Engine(engine, log, context, False, save))


def _check_gpu(described: Manifest) -> None:
    here, built = target.fingerprint(), ", ".join(described.built_for["compute_capabilities"])
    if here.compute_capability is None:
        raise Unavailable(
            "built, not run here: TensorRT engines don't run on a CPU and there is no NVIDIA GPU here "
            f"(built for compute capability {built})"
        )
    if here.compute_capability not in RUNS_ON:
        raise Unavailable(
            f"built, not run here: TensorRT for RTX runs on compute capability {', '.join(RUNS_ON)}, "
            f"here {here.gpu_name} with {here.compute_capability}"
        )
    if here.compute_capability not in described.built_for["compute_capabilities"]:
        raise Unavailable(
            f"built, not run here: built for compute capability {built}, here {here.gpu_name} with "
            f"{here.compute_capability}; add that to build.*.compute_capabilities and rebuild: {described.rebuild}"
        )


def runtime_config(engine: Any, described: Manifest) -> tuple[Any, Any]:
    """How an engine runs, and what saves its runtime cache: kernels are made for each shape before it is first run.

    The cache is kept per engine and checked by the runtime itself: one of another GPU, driver or version is not used.
    CUDA graphs are the runtime's own, which knows when its kernels are final.
    """
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    if described.settings.get("cuda_graph"):
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    cache = config.create_runtime_cache()
    file = layout.STATE / "rtx" / f"{described.engine_sha256[:16]}.cache"
    before = file.read_bytes() if file.is_file() else b""
    if before:
        cache.deserialize(before)
    config.set_runtime_cache(cache)

    def save() -> None:
        after = bytes(cache.serialize())
        if after != before:
            with atomic(file) as scratch:
                scratch.write_bytes(after)

    return config, save

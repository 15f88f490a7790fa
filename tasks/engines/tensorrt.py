"""TensorRT 10 and 11: engines built on the GPU that they will run on.

The package comes from NVIDIA's own package index. Manual: https://docs.nvidia.com/deeplearning/tensorrt/latest/
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import tensorrt as trt

from tasks import layout
from tasks.engines import trt_build, trt_callbacks, trt_checks
from tasks.engines.protocol import Built, DeviceSession, imported
from tasks.files import atomic, digest_of, sha256
from tasks.manifest import Manifest, gpu_here
from tasks.settings import BuildParams

FILE = "engine.plan"


def build(source: Path, folder: Path, spec: BuildParams) -> Built:
    """Build `folder/engine.plan` from `source/model.onnx` for this machine's GPU.

    How long each kernel takes is kept in a timing cache of this model, settings, GPU and version, so that a rebuild
    chooses the same ones; its digest is in the manifest. Raises Unavailable without a GPU, Fault if the build fails.
    """
    here = gpu_here()
    cache = timing_cache(here, sha256(source), spec)
    before = cache.read_bytes() if cache.is_file() else b""
    kept: dict[str, Any] = {}

    def configure(config: Any) -> None:
        if spec.level is not None:
            config.builder_optimization_level = spec.level
        if spec.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if spec.hardware_compatible:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        kept["cache"] = config.create_timing_cache(before)
        if kept["cache"] is None or not config.set_timing_cache(kept["cache"], False):
            # Of another GPU or version, or cut off: begin a new one.
            kept["cache"] = config.create_timing_cache(b"")
            config.set_timing_cache(kept["cache"], False)

    built = trt_build.build(trt, source, folder, spec, FILE, dict(here), configure)
    with atomic(cache) as scratch:
        scratch.write_bytes(memoryview(kept["cache"].serialize()))
    built_for = {**built.manifest.built_for, "timing_cache_sha256": sha256(cache)}
    return Built(dataclasses.replace(built.manifest, built_for=built_for), built.layers)


def timing_cache(gpu: dict[str, str], onnx_sha256: str, spec: BuildParams) -> Path:
    """Where the timing cache of a model, built so for a GPU and its driver by this version of TensorRT, is kept.

    No two builds share one: what another build adds would change the digest that an identical rebuild writes.
    """
    what = digest_of([onnx_sha256, spec.model_dump(mode="json", exclude={"parent"})])[:16]
    name = "-".join((trt.__version__, gpu["gpu_name"], gpu["driver"], what))
    return layout.STATE / "timing" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.cache"


@trt_callbacks.uncollected()
def open(folder: Path, described: Manifest) -> DeviceSession:
    """Open an engine on the GPU.

    Raises Unavailable without a GPU or PyCUDA, Fault for an engine of another version, GPU or driver, for one that was
    cut off or has bytes before its header, or if another precision is asked than it was built with.
    """
    trt_checks.tensorrt(folder, described, trt.__version__)
    trt_session = imported("trt_session")
    log = trt_callbacks.logger(trt)
    settings = described.settings
    engine = trt_build.deserialize(
        trt, folder / described.engine_file, log, bool(settings.get("version_compatible", False))
    )

    def context() -> Any:
        return engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)

    return trt_session.TensorRtSession(
        trt, described, trt_session.Engine(engine, log, context, capture=bool(settings.get("cuda_graph")))
    )

"""What TensorRT's engines promise, checked before one is opened."""

from __future__ import annotations

import re
from pathlib import Path

from tasks import target
from tasks.errors import Fault, Unavailable
from tasks.manifest import Manifest, require, require_gpu

AMPERE = 8


def tensorrt(folder: Path, described: Manifest, version: str) -> None:
    """Check an engine of TensorRT 10 or 11 against this machine and the `version` installed here.

    Raises Unavailable without a GPU; Fault for another version, GPU or driver than it was built for, unless it was
    built compatible, or if another precision is asked than it was built with.
    """
    precision(folder, described)
    settings = described.settings
    if not (settings.get("version_compatible") and reads(version, described.backend_version)):
        require(described, folder, version=version)
    here = target.fingerprint()
    if here.compute_capability is None:
        told = "; ".join(f"{key} {described.built_for.get(key)}" for key in ("gpu_name", "compute_capability"))
        raise Unavailable(
            "built, not run here: TensorRT engines don't run on a CPU and there is no NVIDIA GPU here "
            f"(built for {told})"
        )
    if not settings.get("hardware_compatible"):
        require_gpu(described, folder)
    elif int(here.compute_capability.split(".")[0]) < AMPERE:
        raise Fault(
            f"engine {folder.name} was built for another GPU",
            got=f"here: {here.gpu_name} with compute capability {here.compute_capability}",
            expected="built for: compute capability 8.0 and later",
            do=f"rebuild: {described.rebuild}",
        )


def precision(folder: Path, described: Manifest) -> None:
    """Raise Fault if another precision is asked of an engine than it was built with."""
    built = described.settings.get("precision", described.precision_asked)
    if described.precision_asked != built:
        raise Fault(
            f"the precision of engine {folder.name} can't be changed after the build",
            got=f"asked for: {described.precision_asked}",
            expected=f"built in: {built}",
            do=f"quantise the ONNX file to {described.precision_asked} and rebuild: {described.rebuild}",
        )


def reads(here: str, built: str) -> bool:
    """Whether TensorRT `here` runs a version-compatible engine of TensorRT `built`.

    It runs its own, those of older versions of its major version, and as TensorRT 11 those of TensorRT 10.
    Support matrix, engine portability: https://docs.nvidia.com/deeplearning/tensorrt/latest/getting-started/support-matrix.html
    """
    ours, theirs = (tuple(int(part) for part in re.findall(r"\d+", version)[:3]) for version in (here, built))
    return ours >= theirs and (ours[0] == theirs[0] or (ours[0], theirs[0]) == (11, 10))

"""The fingerprint of this machine: what an engine is built for and measured on."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.files import digest_of, read_json, write_json

FILE = Path("target.json")
LIBRARIES = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "pycuda",
    "torchao",
    "nvidia-modelopt",
    "torch-pruning",
    "numpy",
)
ISA = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)
LLC_FALLBACK = 32 << 20


@dataclass(frozen=True)
class Target:
    """A machine.

    `kind` and `name` are of its fastest device: "cuda" where there is an NVIDIA GPU, else "cpu";
    `cpu_flags` are the instruction sets that kernels are chosen by. `gpu_name`,
    `compute_capability` and `driver` are None without an NVIDIA GPU.
    """

    id: str
    kind: str
    name: str
    cores: int
    cpu_name: str
    cpu_flags: tuple[str, ...]
    gpu_name: str | None
    compute_capability: str | None
    driver: str | None
    system: str
    python: str
    libraries: dict[str, str]


def cores() -> int:
    """How many cores this process may run on; all, where the system doesn't say which."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint() -> Target:
    """Read this machine. `id` names the GPU if there is one, the CPU and its cores; not the libraries."""
    cpu, flags = _cpu()
    gpu = _gpu() or {}
    hardware: dict[str, Any] = {"cpu": cpu, "flags": flags, "cores": cores()}
    if gpu:
        hardware |= {"gpu": gpu["name"], "compute_capability": gpu["compute_capability"]}
    kind, name = ("cuda", gpu["name"]) if gpu else ("cpu", cpu)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].strip("-")
    return Target(
        id=f"{kind}-{slug}-{cores()}c-{digest_of(hardware)[:6]}",
        kind=kind,
        name=name,
        cores=cores(),
        cpu_name=cpu,
        cpu_flags=tuple(flags),
        gpu_name=gpu.get("name"),
        compute_capability=gpu.get("compute_capability"),
        driver=gpu.get("driver"),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        libraries={name: v for name in LIBRARIES if (v := _version(name))},
    )


def refresh(path: Path = FILE) -> Target:
    """Write the fingerprint if it differs from the file's, so that DVC sees a change of machine."""
    here = fingerprint()
    if not path.is_file() or read_json(path) != plain(here):
        write_json(path, here)
    return here


def plain(target: Target) -> dict[str, Any]:
    """The fingerprint as it stands in a JSON file."""
    return {**asdict(target), "cpu_flags": list(target.cpu_flags)}


def last_level_cache_bytes() -> int:
    """Size of the CPU's last-level cache, or 32 MiB where the system doesn't say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", file.read_text().strip())
        if match:
            sizes.append(int(match[1]) << (10 if match[2] == "K" else 20))
    return max(sizes, default=LLC_FALLBACK)


def _cpu() -> tuple[str, list[str]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        text = info.read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.M):
            name = match[1].strip()
        if match := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M):
            flags = set(match[1].split())
    return name, [flag for flag in ISA if flag in flags]


def _gpu() -> dict[str, str] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    try:
        try:
            handle = first_gpu(pynvml)
        except pynvml.NVMLError:  # Such as a UUID that is shortened, which CUDA takes.
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return {
            "name": _text(pynvml.nvmlDeviceGetName(handle)),
            "compute_capability": f"{major}.{minor}",
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        }
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def first_gpu(nvml: Any) -> Any:
    """The GPU that CUDA_VISIBLE_DEVICES names first, by index, in NVML's order, or UUID; else the first of all."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""PyTorch in eager mode: the model as it is, the usual baseline, on the CPU or the GPU.

Its code is the project's, so that such an engine runs inside its project only. The manifest
holds the digest of the workload file, not of modules that this file imports.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tasks import checkpoint, layers
from tasks.engines.protocol import Built, Session, imported
from tasks.engines.torch_forms import Call, backend_version, flags, needs_autocast, place, require, settings
from tasks.engines.torch_session import CpuSession
from tasks.engines.torch_weights import module_layers
from tasks.errors import Fault
from tasks.exported import inputs_of
from tasks.files import sha256
from tasks.fit import tensors
from tasks.manifest import Manifest, TensorSpec, gpu_here, require_gpu
from tasks.manifest import require as require_version
from tasks.settings import BuildParams
from tasks.workloads.protocol import axes, example

# Its kernels are PyTorch's own: they outlive another driver or GPU as long as PyTorch does, but numbers don't.
SAME = ("gpu_name", "compute_capability")


def build(source: Path, folder: Path, spec: BuildParams) -> Built:
    """Copy the checkpoint, and run it once in its form; there is nothing to compile.

    Raises Unavailable, in one line, if the device or the precision can't be had here, and Fault if the model
    doesn't run in it.
    """
    wanted = settings(spec)
    require(spec.where, wanted)
    loaded = checkpoint.load(source)
    task = loaded.workload
    shutil.copyfile(source / checkpoint.FILE, folder / checkpoint.FILE)
    call = _call(loaded, spec.where, wanted)
    inputs = [value.to(spec.where) for value in tensors(example(task, 1)).values()]
    with flags(spec.where, spec.precision, spec.threads):
        wanted["autocast"] = needs_autocast(call, inputs)
        with torch.inference_mode():
            outputs = call(*inputs)
    found = module_layers(call.model, spec.precision == "tf32")
    digest = sha256(folder / checkpoint.FILE)
    described = Manifest(
        backend="eager",
        backend_version=backend_version(wanted),
        device=spec.where,
        built_for={
            "device": spec.where,
            "workload_sha256": sha256(Path(loaded.workload_path)),
            **(gpu_here() if spec.where == "cuda" else {}),
        },
        engine_file=checkpoint.FILE,
        inputs=inputs_of(task),
        outputs=tuple(
            TensorSpec(n, str(v.dtype).removeprefix("torch."), (None, *v.shape[1:])) for n, v in outputs.items()
        ),
        max_batch=spec.max_batch,
        axes=axes(task),
        threads=spec.threads,
        settings=wanted,
        preprocessing=task.PREPROCESSING,
        precision_asked=spec.precision,
        precision_found=layers.found(found),
        operators=dict(sorted(Counter(layer.kind for layer in found).items())),
        engine_sha256=digest,
        onnx_sha256=None,
        model_sha256=digest,
        calibration_sha256=None,
        rebuild=f"dvc repro build@{folder.name}",
    )
    return Built(described, found, len(found))


def _call(loaded: checkpoint.Checkpoint, device: str, wanted: dict[str, Any]) -> Call:
    return Call(place(loaded.model, device, wanted), loaded.workload.OUTPUTS, device, wanted)


def open(folder: Path, described: Manifest) -> Session:
    """Open a copied checkpoint.

    Raises Fault if PyTorch's version, the GPU or the workload is another, or the workload isn't here, and Unavailable
    without the device.
    """
    if described.device == "cuda":
        require_gpu(described, folder, same=SAME)
    require(described.device, described.settings)
    require_version(described, folder, version=backend_version(described.settings))
    workload = checkpoint.workload_file(folder)
    if not workload.is_file():
        raise Fault(
            f"engine {folder.name} runs inside its project only",
            got=f"here: no {workload}",
            expected="built for: eager mode, with the model's code in the workload file",
            do="run it in the project's root, or use an engine of another backend",
        )
    built, here = described.built_for.get("workload_sha256"), sha256(workload)
    if built != here:
        raise Fault(
            f"engine {folder.name} was built for another {workload.name}",
            got=f"here: sha256 {here[:12]}…",
            expected=f"built for: sha256 {built[:12]}…" if built else "built for: no digest noted",
            do=f"rebuild: dvc repro --force --single-item build@{folder.name}",
        )
    loaded = checkpoint.load(folder)
    if described.device == "cpu":
        return CpuSession(described, _call(loaded, "cpu", described.settings))

    def make() -> Any:
        call = _call(loaded, "cuda", described.settings)
        return lambda shapes: call

    session: Session = imported("torch_cuda").TorchCudaSession(described, make)
    return session

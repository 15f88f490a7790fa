"""PyTorch in eager mode on the CPU: the model as it is, the usual baseline.

Its code is the project's, so that such an engine runs inside its project only. The manifest
holds the digest of the workload file, not of modules that this file imports.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tasks import checkpoint
from tasks.engines.protocol import check_batch
from tasks.errors import Fault
from tasks.files import sha256
from tasks.fit import forward, tensors
from tasks.manifest import Manifest, TensorSpec, require
from tasks.settings import BuildParams
from tasks.workloads.protocol import Arrays, axes, example


def build(source: Path, folder: Path, spec: BuildParams) -> Manifest:
    """Copy the checkpoint; there is nothing to compile."""
    loaded = checkpoint.load(source)
    task = loaded.workload
    shutil.copyfile(source / checkpoint.FILE, folder / checkpoint.FILE)
    with torch.inference_mode():
        outputs = forward(loaded.model, task, tensors(example(task, 1)))
    digest = sha256(folder / checkpoint.FILE)
    kinds = [type(m).__name__ for m in loaded.model.modules() if not list(m.children())]
    return Manifest(
        backend="eager",
        backend_version=torch.__version__,
        built_for={"device": "cpu", "workload_sha256": sha256(Path(loaded.workload_path))},
        engine_file=checkpoint.FILE,
        inputs=tuple(TensorSpec(n, d, (None, *s)) for n, (d, s) in task.INPUTS.items()),
        outputs=tuple(
            TensorSpec(n, str(v.dtype).removeprefix("torch."), (None, *v.shape[1:])) for n, v in outputs.items()
        ),
        max_batch=spec.max_batch,
        axes=axes(task),
        threads=spec.threads,
        preprocessing=task.PREPROCESSING,
        precision_asked="as the model",
        operators={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        engine_sha256=digest,
        onnx_sha256=None,
        model_sha256=digest,
        calibration_sha256=None,
        rebuild=f"dvc repro build@{folder.name}",
    )


class EagerSession:
    """A checkpoint run by PyTorch with the manifest's thread count."""

    device = "cpu"

    def __init__(self, folder: Path, described: Manifest) -> None:
        loaded = checkpoint.load(folder)
        self._model, self._task = loaded.model, loaded.workload
        self._threads, self._max_batch, self._axes = described.threads, described.max_batch, described.axes
        self.inputs, self.outputs = described.inputs, described.outputs

    def run(self, batch: Arrays) -> Arrays:
        check_batch(batch, self.inputs, self._max_batch, self._axes)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            outputs = forward(self._model, self._task, tensors({n: batch[n] for n in self._task.INPUTS}))
        return {name: value.numpy() for name, value in outputs.items()}

    def synchronize(self) -> None:
        """Eager CPU calls return when they are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._model


def open(folder: Path, described: Manifest) -> EagerSession:
    """Open a copied checkpoint; Fault if PyTorch's version or the workload is another, or it isn't here."""
    require(described, folder, version=torch.__version__)
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
    return EagerSession(folder, described)

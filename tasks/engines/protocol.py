"""The one seam between the tools and the backends: build an engine, open it as a session."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self, cast

from tasks import manifest
from tasks.errors import Fault, Unavailable
from tasks.manifest import Layer, Manifest, TensorSpec
from tasks.settings import BuildParams
from tasks.workloads.protocol import Arrays

BACKENDS = ("eager", "onnxruntime", "inductor", "tensorrt", "tensorrt_rtx")
# Packages that an extra of pyproject.toml installs; the others always are.
EXTRAS = {"pycuda": "cuda", "tensorrt": "tensorrt"}


class Session(Protocol):
    """An open engine.

    `run` takes every input [n, …] by name and returns every output [n, …] by name, n at most
    the manifest's max_batch. `synchronize` returns when all that was started is done.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    device: str

    def run(self, batch: Arrays) -> Arrays: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class DeviceSession(Session, Protocol):
    """A session on a GPU. `run` is `load`, `launch` and `fetch` in a row.

    `load` copies inputs to the device and waits for that; `launch` starts one inference on what was
    loaded, and returns before it is done; `fetch` waits, and copies the outputs back. `device_ms` is the GPU's own
    time, in milliseconds per call, of that many launches, between two events. `memory_bytes` is what this session holds
    of the device's memory, as far as its backend tells.
    """

    memory_bytes: int | None

    def load(self, batch: Arrays) -> None: ...
    def launch(self) -> None: ...
    def fetch(self) -> Arrays: ...
    def device_ms(self, calls: int) -> float: ...


class BareSession(Session, Protocol):
    """A session that lends the backend's own call of its engine, to be timed beside its own.

    In the block, `bare(batch)` is a call without arguments that runs the engine on that batch with nothing of the
    session's around: on the CPU until it is done, on a GPU started on the session's `stream`. What it returns are the
    outputs, in order or by name, and valid until the next call.
    """

    def bare(self, batch: Arrays) -> AbstractContextManager[Callable[[], Any]]: ...


@dataclass(frozen=True)
class Built:
    """What a backend's `build` returns: the manifest, and what the backend says that it runs, layer by layer.

    `nodes` is the number of the source's nodes, where the source isn't an ONNX file and the backend knows it.
    """

    manifest: Manifest
    layers: tuple[Layer, ...]
    nodes: int | None = None


class Backend(Protocol):
    """A module of this folder.

    `build` writes the engine file; `open` checks that the engine can
    run here. Both raise Unavailable, in one line, if the backend can't do that on this
    machine, and Fault if the engine was built for another one.
    """

    def build(self, source: Path, folder: Path, spec: BuildParams) -> Built: ...
    def open(self, folder: Path, described: Manifest) -> Session: ...


def backend(name: str) -> Backend:
    """The module of a backend; only the one asked for is imported.

    Raises Fault for an unknown name, Unavailable if a package it needs isn't installed.
    """
    if name not in BACKENDS:
        raise Fault("no such backend", got=name, expected=", ".join(BACKENDS), do="mend build.*.backend")
    return cast(Backend, imported(name))


def imported(module: str) -> ModuleType:
    """A module of this folder, late; Unavailable, in one line, if a package or a library it needs isn't here."""
    try:
        return importlib.import_module(f"tasks.engines.{module}")
    except ImportError as error:
        package, words = (error.name or module).split(".")[0], " ".join(str(error).split())
        if package == "tasks":
            raise
        if not isinstance(error, ModuleNotFoundError):
            why = f"{package} can't be loaded here ({words}): a library or the driver is missing, see docs/engines.md"
            raise Unavailable(why) from None
        how = f"pip install -e '.[{EXTRAS[package]}]'" if package in EXTRAS else "make setup"
        raise Unavailable(f"{package} isn't installed here ({words}): {how}, see docs/engines.md") from None


def open_engine(folder: Path) -> Session:
    """Open the engine of a folder after checking its manifest.

    Raises Fault for a damaged engine or one built for elsewhere, Unavailable for a backend
    that can't run here.
    """
    described = manifest.read(folder)
    return backend(described.backend).open(folder, described)


def check_batch(
    batch: Arrays, inputs: Sequence[TensorSpec], max_batch: int, axes: Mapping[str, int] | None = None
) -> None:
    """Raise Fault if an input is missing, has another type or shape, or they aren't as many each, 1 to `max_batch`.

    A dynamic axis may have any size from 1 to that of `axes`.
    """
    largest = axes or {}
    for spec in inputs:
        if spec.name not in batch:
            raise Fault(
                f"input {spec.name} is missing",
                got=", ".join(batch) or "nothing",
                expected=", ".join(i.name for i in inputs),
                do="give every input by name",
            )
        value = batch[spec.name]
        if (
            value.dtype.name != spec.dtype
            or value.ndim != len(spec.shape)
            or any(not _fits(e, g, largest) for e, g in zip(spec.shape, value.shape, strict=True))
        ):
            raise Fault(
                f"input {spec.name} doesn't fit",
                got=f"{value.dtype.name} {value.shape}",
                expected=f"{spec.dtype} {spec.shape}, None being the batch"
                + "".join(f", {name} 1 to {size}" for name, size in largest.items()),
                do="prepare it as the workload does",
            )
        if not 1 <= len(value) <= max_batch:
            raise Fault(
                f"input {spec.name}: batch out of range",
                got=len(value),
                expected=f"1 to {max_batch}",
                do="split the batch, or raise build.*.max_batch and rebuild",
            )
    counts = {spec.name: len(batch[spec.name]) for spec in inputs}
    if len(set(counts.values())) > 1:
        raise Fault(
            "the inputs differ in number",
            got=", ".join(f"{name}: {n}" for name, n in counts.items()),
            expected="as many of each",
            do="give every input of every sample",
        )


def _fits(expected: int | str | None, got: int, axes: Mapping[str, int]) -> bool:
    if isinstance(expected, str):
        return 1 <= got <= axes.get(expected, got)
    return expected is None or expected == got

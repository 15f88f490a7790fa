"""PyTorch's compiler, Inductor, on exported programs: a package on the CPU, a program and a cache on the GPU.

Caches hold pickles, and packages machine code: an engine is as trusted as a program. A compiler is needed where the
program is compiled, which is when building, and on opening without a package.
Manual: https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tasks import exported, layers, target
from tasks.engines import inductor_package
from tasks.engines.inductor_compiled import Compiled, fresh_caches
from tasks.engines.inductor_layers import recorded
from tasks.engines.protocol import Built, Session, imported
from tasks.engines.torch_forms import backend_version, flags, require, settings
from tasks.engines.torch_graph import formed
from tasks.engines.torch_session import CpuSession
from tasks.errors import Fault, Unavailable
from tasks.exported import Notes, by_name
from tasks.files import sha256
from tasks.manifest import Layer, Manifest, gpu_here, require_gpu
from tasks.manifest import require as require_version
from tasks.quiet import quiet
from tasks.settings import BuildParams

ENGINE, CACHE = "engine", "cache.bin"


def build(source: Path, folder: Path, spec: BuildParams) -> Built:
    """Compile `source/program.pt2` for this machine, in the form that the settings ask for.

    On the CPU: a package for any batch, if a fresh process proves that it loads. Else the program and the compiler's
    caches, for batches of 1, of `opt_batch` (or `max_batch`) and for any other. Raises Unavailable, in one line, if
    the device, the precision or a C++ compiler can't be had here, and Fault for what Inductor can't compile.
    """
    wanted = settings(spec) | {"static": sorted({1, spec.opt_batch or spec.max_batch})}
    require(spec.where, wanted)
    require_compiler()
    program, notes = exported.load(source)
    nodes = sum(node.op == "call_function" for node in program.graph.nodes)
    engine = folder / ENGINE
    engine.mkdir()
    with flags(spec.where, spec.precision, spec.threads), quiet(), fresh_caches():
        made = _compile(program, notes, source, engine, spec, wanted)
    described = _described(notes, source, folder, spec, wanted, made)
    return Built(described, made[0], nodes)


def _compile(
    program: torch.export.ExportedProgram,
    notes: Notes,
    source: Path,
    engine: Path,
    spec: BuildParams,
    wanted: dict[str, Any],
) -> tuple[tuple[Layer, ...], str | None]:
    """Fill the engine's folder; the layers, and why there is no package."""
    module = formed(program, spec.where, wanted)
    left_out: str | None = "on a GPU, packages of PyTorch 2.11 crash as they load"
    with recorded(spec.precision == "tf32") as graphs:
        if spec.where == "cpu":
            left_out = inductor_package.compile_package(module, notes, engine / inductor_package.FILE, spec.threads)
            if left_out is None:
                return graphs[-1], None
            graphs.clear()
        try:
            _warm(module, notes, spec, wanted)
        except Exception as error:
            raise Fault(
                f"Inductor can't compile {source.name} for {spec.where} in {spec.precision}",
                got=_told(error),
                expected="operations that it knows",
                do="another precision may do, or another backend for this variant",
            ) from error
    (engine / exported.FILE).write_bytes((source / exported.FILE).read_bytes())
    saved = torch.compiler.save_cache_artifacts()
    if saved is not None:
        (engine / CACHE).write_bytes(saved[0])
    return graphs[0] if graphs else (), left_out


def _told(error: BaseException) -> str:
    """An error of the compiler, after the first one behind it: what a kernel raises may come out as another."""
    first = error
    while (behind := first.__cause__ or first.__context__) is not None:
        first = behind
    kinds = [first, error] if first is not error else [error]
    return "; then ".join(f"{type(e).__name__}: {' '.join(str(e).split())[: 400 // len(kinds)]}" for e in kinds)


def _warm(module: fx.GraphModule, notes: Notes, spec: BuildParams, wanted: dict[str, Any]) -> None:
    """Compile for the sizes that an engine has kernels of its own for, the largest first, and for any other."""
    compiled = Compiled(module, notes, wanted["static"], spec.threads)
    halves = {name: max(2, size // 2) for name, size in notes.axes.items()}
    other = next((b for b in range(max(2, spec.max_batch // 2), spec.max_batch + 1) if b not in wanted["static"]), None)
    sizes: list[tuple[int, dict[str, int]]] = [(batch, notes.axes) for batch in reversed(wanted["static"])]
    sizes += [(batch, halves) for batch in ((1,) if halves else ()) + ((other,) if other else ())]
    for batch, free in sizes:
        inputs = inductor_package.examples(notes, batch, spec.where, free)
        call = compiled({s.name: tuple(v.shape) for s, v in zip(notes.inputs, inputs, strict=True)})
        with torch.inference_mode():
            call(*inputs)


def _described(
    notes: Notes,
    source: Path,
    folder: Path,
    spec: BuildParams,
    wanted: dict[str, Any],
    made: tuple[tuple[Layer, ...], str | None],
) -> Manifest:
    found, left_out = made
    cuda = spec.where == "cuda"
    return Manifest(
        backend="inductor",
        backend_version=backend_version(wanted),
        device=spec.where,
        built_for={
            "device": spec.where,
            **(gpu_here() if cuda else {"cpu_flags": list(target.fingerprint().cpu_flags)}),
            "form": "package" if left_out is None else "program",
            **({"package": f"left out: {left_out}"} if left_out else {}),
        },
        engine_file=ENGINE,
        inputs=notes.inputs,
        outputs=notes.outputs,
        max_batch=spec.max_batch,
        axes=notes.axes,
        threads=spec.threads,
        settings=wanted,
        preprocessing=notes.preprocessing,
        precision_asked=spec.precision,
        precision_found=layers.found(found),
        operators=dict(sorted(Counter(layer.kind for layer in found).items())),
        engine_sha256=sha256(folder / ENGINE),
        onnx_sha256=None,
        model_sha256=notes.model_sha256,
        calibration_sha256=None,
        rebuild=f"dvc repro build@{folder.name}",
    )


def open(folder: Path, described: Manifest) -> Session:
    """Open an engine; Fault if it was built for another PyTorch, GPU or CPU, Unavailable without device or compiler."""
    wanted, cuda = described.settings, described.device == "cuda"
    if cuda:
        require_gpu(described, folder)
    require(described.device, wanted)
    require_version(described, folder, version=backend_version(wanted))
    engine, names = folder / described.engine_file, tuple(spec.name for spec in described.outputs)
    if described.built_for["form"] == "package":
        with flags("cpu", wanted["precision"], described.threads):
            call = inductor_package.load(engine / inductor_package.FILE)
        return CpuSession(described, lambda *inputs: by_name(call(*inputs), names))
    require_compiler()
    if not cuda:
        make = _opened(engine, described)()
        specs = described.inputs
        return CpuSession(
            described,
            lambda *inputs: make({s.name: tuple(v.shape) for s, v in zip(specs, inputs, strict=True)})(*inputs),
        )
    session: Session = imported("torch_cuda").TorchCudaSession(described, _opened(engine, described))
    return session


def _opened(engine: Path, described: Manifest) -> Callable[[], Compiled]:
    """What loads an engine's program and caches."""

    def make() -> Compiled:
        wanted = described.settings
        with quiet():
            if (engine / CACHE).is_file():
                torch.compiler.load_cache_artifacts((engine / CACHE).read_bytes())
            module = formed(exported.program(engine / exported.FILE), described.device, wanted)
        specs = Notes("", "", "", described.axes, described.inputs, described.outputs)
        return Compiled(module, specs, wanted["static"], described.threads)

    return make


def require_compiler() -> None:
    """Raise Unavailable, in one line, if there is no C++ compiler, which Inductor and Triton call."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        raise Unavailable("Inductor needs a C++ compiler and finds none: install g++") from None

"""The commands `peaks` and `roofline`. What they need is imported when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasks import layout, machine, params
from tasks.errors import Fault, Unavailable

if TYPE_CHECKING:
    from tasks.manifest import Manifest
    from tasks.params import Tree

POOL_BYTES = 64 << 20


def peaks(
    force: Annotated[bool, typer.Option("--force", help="Probe again what is known already.")] = False,
    threads: Annotated[list[int] | None, typer.Option(help="Threads on the CPU; those of the engines without.")] = None,
) -> None:
    """Probe this machine's copy bandwidth and matrix rates once, and keep them with its fingerprint.

    A stage of the line too; a format or device that can't be probed is told, and fails nothing.
    """
    from tasks import peaks as module
    from tasks import roofline_table

    if any(n < 1 for n in threads or ()):
        raise Fault("--threads is none", got=threads, expected="1 or more", do="name a number of threads")
    asked = threads or (_threads(params.load(layout.PARAMS, models=False)) if layout.PARAMS.is_file() else [1])
    with machine.step(alone=True):
        found = module.probe(asked, force)
    layout.failure("peaks").unlink(missing_ok=True)
    roofline_table.show_peaks(found, _console())


def roofline(
    name: Annotated[str, typer.Argument(help="An engine's name in params.yaml.")],
    batch: Annotated[int | None, typer.Option(help="Samples per call; the benchmark's without.", min=1)] = None,
    unit: Annotated[int, typer.Option(help="Rows of the square matrix unit of the column of tiles.", min=1)] = 128,
) -> None:
    """Each layer's operations, bytes and least time on this device, against what it takes."""
    from tasks import manifest, roofline_table
    from tasks import peaks as probing
    from tasks import roofline as module

    tree = params.load(layout.PARAMS, models=False)
    if name not in tree.engines:
        raise Fault("no such engine in params.yaml", got=name, expected=", ".join(tree.engines), do="name one of these")
    described = manifest.read(layout.artifact(name))
    with machine.hold(True):
        probing.probe(_threads(tree) if described.device == "cpu" else [])
        if described.backend == "onnxruntime":
            _profile(tree, name, described, batch)
    found = module.of_engine(tree, name, batch, unit)
    if found is None:
        raise Unavailable(f"{name} is for {described.device}, which isn't here to be probed")
    roofline_table.show(found, _console())


def _profile(tree: Tree, name: str, described: Manifest, batch: int | None) -> None:
    """Keep what each layer takes here; say so in a line if the engine can't run here."""
    from tasks import data, measure, roofline, roofline_profile, target, timing
    from tasks.files import write_json

    many, here = batch or tree.params.benchmark.batch, target.fingerprint().id
    lengths = roofline.lengths_of(tree, described)
    samples = data.read(Path(layout.DATA) / "validation.npz")
    inputs = measure.inputs_of(described.inputs, samples, next(iter(lengths.values()), None))
    try:
        pool = timing.make_pool(inputs, many, POOL_BYTES)
        taken = roofline_profile.layers_ms(layout.artifact(name), described, pool)
    except Unavailable as reason:
        print(f"no times of its layers: {reason}", file=sys.stderr)
        return
    key = roofline.profile_key(described, here, many, lengths)
    write_json(roofline.times_file(name), {"of": key, "layers_ms": taken})


def _threads(tree: Tree) -> list[int]:
    """The numbers of threads of the tree's engines on the CPU."""
    return sorted({build.threads for build in tree.params.build.values() if build.where == "cpu"})


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)

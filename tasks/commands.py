"""The commands that stand beside the pipeline: `bench` and `calibrate`. What they need is imported when they run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks import machine
from tasks.errors import Fault
from tasks.files import atomic, write_json
from tasks.settings import BenchmarkParams


def bench(
    engines: Annotated[list[Path], typer.Argument(help="Engine folders; the first is what others are held against.")],
    data: Annotated[Path | None, typer.Option(help="Inputs by name in an .npz file; random ones without.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per call.", min=1)] = 1,
    length: Annotated[int | None, typer.Option(help="Entries along a dynamic axis.", min=1)] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds for each engine after the first.", min=0.1)] = 8.0,
    clock: Annotated[str, typer.Option(help="host: a call as seen from here; device: the GPU's own time.")] = "host",
    json: Annotated[Path | None, typer.Option(help="Write the report to this file as well.")] = None,
) -> None:
    """Compare engine folders directly, in common rounds, outside the pipeline. Ctrl-C prints what was measured."""
    if clock not in ("host", "device"):
        raise Fault("--clock is none", got=clock, expected="host or device", do="name one of these")
    from tasks import bench as module

    params = BenchmarkParams.model_validate({"batch": batch, "length": length, "budget_s": budget_s, "clock": clock})
    with machine.hold(True):
        report = module.bench(engines, data, params)
    module.show(report, _console())
    if json:
        write_json(json, report)


def calibrate(
    trials: Annotated[int, typer.Option(help="Measurements of the same engine twice.", min=1)] = 200,
    planted: Annotated[int, typer.Option(help="Measurements of each planted difference.", min=1)] = 40,
    quick: Annotated[bool, typer.Option("--quick", help="20 trials, 5 of each difference, one minute.")] = False,
    budget_s: Annotated[float, typer.Option(help="Seconds for all; parts that take longer make fewer.", min=1)] = 540,
    engine: Annotated[Path | None, typer.Option(help="An engine's folder; a tiny one is made without.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the page to this file; it is printed in any case.")] = None,
) -> None:
    """Show on this machine how often the measurement errs, and what it finds. Ctrl-C keeps what is done."""
    from tasks import calibrate as module
    from tasks import calibrate_page

    if quick:
        trials, planted, budget_s = 20, 5, 60.0
    with machine.hold(True), tempfile.TemporaryDirectory() as scratch:
        found = module.calibrate(trials, planted, engine, budget_s, Path(scratch), _tell)
    text = calibrate_page.page(found)
    if write:
        with atomic(write) as part:
            part.write_text(text)
    print(text, end="")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)

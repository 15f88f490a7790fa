"""The commands that stand beside the pipeline, such as `bench` and `sweep`. They import late what they need."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks import layout, machine, params
from tasks.errors import Fault
from tasks.files import atomic, read_json, write_json
from tasks.settings import BenchmarkParams

Clock = Annotated[str, typer.Option(help="host: a call as seen from here; device: the GPU's own time.")]
Openings = Annotated[int, typer.Option(help="Times that each comparison opens its engines.", min=1, max=20)]
ReopenSd = Annotated[
    float | None,
    typer.Option(
        help="How far two openings of an engine differ (standard deviation of their ratio). "
        "Without it 0.007, on a GPU 0.034.",
        min=0,
        max=0.5,
    ),
]


def bench(
    engines: Annotated[list[Path], typer.Argument(help="Engine folders; the first is what others are held against.")],
    data: Annotated[Path | None, typer.Option(help="Inputs by name in an .npz file; random ones without.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per call.", min=1)] = 1,
    length: Annotated[int | None, typer.Option(help="Entries along a dynamic axis.", min=1)] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds for each engine after the first.", min=0.1)] = 8.0,
    clock: Clock = "host",
    openings: Openings = 5,
    reopen_sd: ReopenSd = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file as well.")] = None,
) -> None:
    """Compare engine folders directly, in common rounds, outside the pipeline. Ctrl-C prints what was measured."""
    _check_clock(clock)
    from tasks import bench as module

    asked = {"batch": batch, "length": length, "budget_s": budget_s, "clock": clock, "openings": openings}
    settings = BenchmarkParams.model_validate(asked)
    with machine.hold(True):
        report = module.bench(engines, data, settings, reopen_sd)
    module.show(report, _console())
    if json:
        write_json(json, report)
    if report.broken:
        raise typer.Exit(1)


def calibrate(
    trials: Annotated[int, typer.Option(help="Measurements of the same engine twice.", min=1)] = 200,
    planted: Annotated[int, typer.Option(help="Measurements of each planted difference.", min=1)] = 40,
    quick: Annotated[bool, typer.Option("--quick", help="20 trials, 5 of each difference, one minute.")] = False,
    budget_s: Annotated[float, typer.Option(help="Seconds for all; parts that take longer make fewer.", min=1)] = 580,
    engine: Annotated[Path | None, typer.Option(help="An engine's folder; a tiny one is made without.")] = None,
    openings: Openings = 5,
    anew: Annotated[
        int,
        typer.Option(
            help="If opening takes over 0.1 s: pairs of openings that the trials of the same engine twice share, those "
            "of each difference a quarter of it.",
            min=5,
        ),
    ] = 36,
    reopen_sd: ReopenSd = None,
    clock: Clock = "host",
    write: Annotated[
        Path | None, typer.Option(help="Write the page to this file after each part; it is printed too.")
    ] = None,
) -> None:
    """Show on this machine how often the measurement errs, and what it finds. Ctrl-C keeps whole trials."""
    _check_clock(clock)
    from tasks import calibrate as module
    from tasks import calibrate_page

    if quick:
        trials, planted, budget_s = 20, 5, 60.0

    def keep(found: module.Calibration) -> None:
        if write:
            with atomic(write) as part:
                part.write_text(calibrate_page.page(found))

    with machine.hold(True), tempfile.TemporaryDirectory() as scratch:
        found = module.calibrate(
            trials,
            planted,
            engine,
            budget_s,
            Path(scratch),
            _tell,
            openings=openings,
            anew=anew,
            reopen_sd=reopen_sd,
            clock=clock,
            keep=keep,
        )
    keep(found)
    print(calibrate_page.page(found), end="")


def sweep(
    name: Annotated[str, typer.Argument(help="An engine of params.yaml.")],
    batches: Annotated[str | None, typer.Option(help="Sizes with commas; powers of two without.")] = None,
    streams: Annotated[str, typer.Option(help="Sessions at the same time, with commas.")] = "1,2,4,8",
    max_latency_ms: Annotated[float | None, typer.Option(help="Instead of benchmark.max_latency_ms.", min=0)] = None,
    rounds: Annotated[int, typer.Option(help="Windows of each point.", min=3)] = 5,
) -> None:
    """Latency and throughput over batch sizes and streams; the best under a limit. Ctrl-C keeps what was measured."""
    tree = params.load(layout.PARAMS, models=False)
    if name not in tree.engines:
        raise Fault("sweep: no such engine in params.yaml", got=name, expected=", ".join(tree.engines), do="name one")
    from tasks import manifest, sweep_page
    from tasks import sweep as module

    folder, settings = layout.artifact(name), tree.params.benchmark
    if max_latency_ms is not None:
        settings = BenchmarkParams.model_validate({**settings.model_dump(), "max_latency_ms": max_latency_ms})
    largest = manifest.read(folder).max_batch
    sizes = module.default_batches(largest) if batches is None else _numbers("--batches", batches)
    with machine.hold(True):
        found = module.sweep(folder, layout.DATA, settings, sizes, _numbers("--streams", streams), _tell, rounds)
    write_json(layout.sweep(name), found)
    with atomic(layout.sweep(name).with_suffix(".html")) as part:
        part.write_text(sweep_page.page(found))
    sweep_page.show(found, _console())


def plaster() -> None:
    """Print the PLASTER scorecard of the last run: one row a variant, one column a letter."""
    from tasks import table

    told = summary()
    if not any(variant.get("plaster") for variant in told["variants"]):
        raise Fault(
            "the summary has no scorecards",
            got="one of an earlier version",
            expected="the key plaster",
            do="run `make run` or `dvc repro`",
        )
    table.show_plaster(told, _console())


def summary() -> Any:
    """The summary of the last run; Fault if there is none."""
    if not layout.SUMMARY.is_file():
        raise Fault(
            "no summary yet", got=f"no {layout.SUMMARY}", expected="a finished run", do="run `make run` or `dvc repro`"
        )
    return read_json(layout.SUMMARY)


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise Fault(f"{option} is no list", got=text or "nothing", expected="such as 1,2,4", do="mend it")
    return sorted({int(word) for word in words})


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_clock(clock: str) -> None:
    if clock not in ("host", "device"):
        raise Fault("--clock is none", got=clock, expected="host or device", do="name one of these")


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)

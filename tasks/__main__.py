"""The command line of the steps: `python -m tasks STEP NAME`, as dvc.yaml runs them."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks import accuracy_commands, commands, layout, machine, params, roofline_commands, signing, target
from tasks.errors import Fault, Unavailable
from tasks.files import write_json
from tasks.settings import MODEL_STEPS, SECTIONS

MEASURING = ("benchmark", "compare", "promote")
ENGINE_STEPS = ("evaluate", "benchmark")
FAN_IN = ("compare", "record", "promote", "report")
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Name = Annotated[str, typer.Argument(help="The artifact's name in params.yaml.")]


def run(step: str, name: str | None) -> None:
    """Call a step's function with the paths and settings that its signature names; write its report.

    Reports of artifacts get `wall_s`, the step's seconds with its imports; None if it went on from a killed training.
    """
    tree = params.load(layout.PARAMS, models=step == "data")
    if name is not None:
        _known(step, name, tree)
    made, values = name in tree.nodes and step in SECTIONS, arguments(step, name, tree)
    resumed = made and bool(_states(str(name), tree))
    with machine.step(step in MEASURING):
        start = time.monotonic()
        function = getattr(importlib.import_module(f"tasks.{step}"), step)
        report = function(**{key: values[key]() for key in inspect.signature(function).parameters})
        wall_s = None if resumed else time.monotonic() - start
    write_json(_report_path(step, name), {**asdict(report), "wall_s": wall_s} if made else report)
    if name in tree.nodes:
        _remove_states(name, tree)
    layout.failure(f"{step}@{name}" if name else step).unlink(missing_ok=True)


def _remove_states(name: str, tree: params.Tree) -> None:
    """Remove the states of a finished step's trainings."""
    for file in _states(name, tree):
        file.unlink(missing_ok=True)


def _states(name: str, tree: params.Tree) -> list[Path]:
    """The states of a step's trainings, NAME and NAME-1, NAME-2 …, but for other artifacts of such a name."""
    return [
        file
        for file in layout.resume(name).parent.glob(f"{name}*.pt")
        if re.fullmatch(rf"{re.escape(name)}(-\d+)?", file.stem) and (file.stem == name or file.stem not in tree.nodes)
    ]


def arguments(step: str, name: str | None, tree: params.Tree) -> dict[str, Any]:
    """What a step's parameters may be called, and how each is found."""

    def settings() -> Any:
        if step in SECTIONS:
            return tree.nodes[_known(step, name, tree)].settings
        return getattr(tree.params, step)

    def source() -> Path:
        known = _known(step, name, tree)
        return layout.artifact(known if step in ENGINE_STEPS else str(tree.nodes[known].parent))

    def destination() -> Path:
        if step == "report":
            return layout.LATEST
        if step == "data":
            return layout.DATA
        known = _known(step, name, tree)
        return layout.scores(known) if step == "evaluate" else layout.artifact(known)

    return {
        "tree": lambda: tree,
        "here": target.refresh,
        "params": settings,
        "source": source,
        "target": destination,
        "teacher": lambda: layout.artifact(settings().teacher),
        "baseline": lambda: layout.artifact(tree.params.baseline),
        "workload": lambda: Path(tree.params.workload),
        "data": lambda: layout.DATA,
        "family": lambda: max(1, len(tree.engines) - 1),
    }


def _known(step: str, name: str | None, tree: params.Tree) -> str:
    section = "build" if step in ENGINE_STEPS else step
    names = [n for n, node in tree.nodes.items() if node.step == section]
    if name not in names:
        raise Fault(
            f"{step}: no such artifact in params.yaml",
            got=name,
            expected=", ".join(names) or f"an entry under {section}:",
            do="name one of these",
        )
    return name


def _report_path(step: str, name: str | None) -> Path:
    if step in FAN_IN:
        return Path("reports") / f"{step}.json"
    return layout.report(step, name or step)


def _named(step: str) -> Any:
    def command(name: Name) -> None:
        run(step, name)

    return command


def _nameless(step: str) -> Any:
    def command() -> None:
        run(step, None)

    return command


HELP = {
    "data": "Make the splits of the workload's data.",
    "train": "Train a model from scratch.",
    "prune": "Prune weights, channels, heads or layers; fine-tune.",
    "sparsify": "Make weights 2:4 sparse; fine-tune under the masks.",
    "factorize": "Factorise layers to a lower rank; fine-tune.",
    "share": "Share weights across layers; fine-tune.",
    "distill": "Distil a teacher into a student.",
    "qat": "Train on with fake-quantised weights and activations.",
    "export": "Export to ONNX and prove it equal.",
    "quantize": "Make a numeric format explicit in the ONNX file.",
    "build": "Build an engine and prove that it opens.",
    "evaluate": "Accuracy of a built engine on the test split.",
    "benchmark": "Time a built engine against the baseline.",
    "compare": "Judge all variants; time the finalists head to head.",
    "record": "Record the comparison in MLflow.",
    "promote": "Promote the winner through the gates.",
    "report": "Write summary.json and the report page.",
}
for _step, _help in HELP.items():
    _make = _nameless if _step in (*FAN_IN, "data") else _named
    app.command(_step, help=_help)(_make(_step))


app.command("sign")(signing.sign_command)
app.command("verify")(signing.verify_command)
app.command("accuracy")(accuracy_commands.accuracy)
app.command("bench")(commands.bench)
app.command("calibrate")(commands.calibrate)
app.command("plaster")(commands.plaster)
app.command("peaks")(roofline_commands.peaks)
app.command("roofline")(roofline_commands.roofline)
app.command("sweep")(commands.sweep)


@app.command("target")
def target_command() -> None:
    """Write this machine's fingerprint; a change makes builds and measurements stale."""
    print(target.refresh().id)


@app.command()
def check(path: Annotated[Path, typer.Argument(help="A params file.")] = layout.PARAMS) -> None:
    """Check a params file and print every fault of it."""
    tree = params.load(path)
    print(f"{path}: {len(tree.nodes)} artifacts, {len(tree.engines)} engines, baseline {tree.params.baseline}")


@app.command()
def show(markdown: Annotated[bool, typer.Option(help="As a page of Markdown.")] = False) -> None:
    """Print the table of the last run."""
    from rich.console import Console

    from tasks import table

    summary = commands.summary()
    if markdown:
        print(table.markdown(summary), end="")
        return
    table.show(summary, Console(width=None if sys.stdout.isatty() else 160))


@app.command("account")
def account_command(name: Name) -> None:
    """Parameters, bytes, multiply-adds and activations of a model, layer by layer."""
    from rich.console import Console

    from tasks import account, table

    tree = params.load(layout.PARAMS, models=False)
    models = [n for n, node in tree.nodes.items() if node.step in MODEL_STEPS]
    if name not in models:
        raise Fault(
            "account: no such model in params.yaml", got=name, expected=", ".join(models), do="name one of these"
        )
    table.show_account(
        name, account.account(layout.artifact(name)), Console(width=None if sys.stdout.isatty() else 120)
    )


@app.command("trtexec")
def trtexec_command(
    name: Name,
    release: Annotated[int | None, typer.Option(help="TensorRT's: 10 or 11; that on the PATH, else 11.")] = None,
    execute: Annotated[bool, typer.Option("--run", help="Run it, and tell what was built and measured.")] = False,
) -> None:
    """The trtexec command line of a build from ONNX; with --run, run it."""
    from tasks.engines import trtexec

    tree = params.load(layout.PARAMS, models=False)
    spec = tree.params.build[_known("build", name, tree)]
    with machine.step(alone=True) if execute else nullcontext():
        trtexec.route(name, spec, tree.params.benchmark, release, execute)


@app.command()
def rollback() -> None:
    """Swap this target's champion and previous engine in the registry."""
    from tasks.promote import rollback as swap
    from tasks.workloads.protocol import load_workload

    tree, here = params.load(layout.PARAMS, models=False), target.fingerprint()
    champion, previous = swap(load_workload(Path(tree.params.workload)).NAME, here.id)
    print(f"champion-{here.id} is version {champion} again, previous is version {previous}")


def _fail(reason: str, message: str, status: int) -> None:
    if place := os.environ.get("ENGINESMITH_REASON"):
        Path(place).write_text(" ".join(reason.split()))
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Run a command; faults of input print without a traceback and exit with 2."""
    if parent := os.environ.get("ENGINESMITH_PARENT"):
        machine.die_with(int(parent))
    # A log's last line is shown while a stage runs: not the place for the libraries' deprecations.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except Fault as fault:
        _fail(fault.line, str(fault), 2)
    except (params.ParamsFault, Unavailable) as fault:
        _fail(str(fault), str(fault), 2)
    except Exception as error:
        if place := os.environ.get("ENGINESMITH_REASON"):
            Path(place).write_text(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        raise


if __name__ == "__main__":
    main()

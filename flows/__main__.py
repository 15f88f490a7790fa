"""`python -m flows`: run the main job, or find that there is nothing to do without starting Prefect."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from flows import environment

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Returns the exit status: 0 done, 1 something failed, 2 bad input, 130 interrupted; SIGTERM exits with 143."""
    _usage().parse_args()
    # The terminal shows each stage's end and the reason of a failure; Prefect would tell it all again.
    level = "CRITICAL"
    environment.apply(
        PREFECT_LOGGING_LEVEL=level, PREFECT_SERVER_LOGGING_LEVEL=level, PREFECT_INTERNAL_LOGGING_LEVEL=level
    )
    from flows.orphans import end_orphans
    from flows.plan import console, plan
    from tasks import layout, table
    from tasks.errors import Fault
    from tasks.files import read_json
    from tasks.machine import only_run
    from tasks.params import ParamsFault

    out, start = console(), time.monotonic()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with only_run():
            found = plan()
            if not found.nothing_to_do:
                end_orphans()
        if found.nothing_to_do:
            table.show(read_json(layout.SUMMARY), out)
            out.print(
                f"nothing to do: all {len(found.dag.stages)} stages are up to date ({time.monotonic() - start:.1f} s)"
            )
            out.print(where_next(), soft_wrap=True, highlight=False, markup=False)
            return 0
        out.print(f"{len(found.dag.stages)} stages, {len(found.stale)} to look at; starting Prefect", highlight=False)
        found.dag.close()
        state = _flow()
    except (Fault, ParamsFault) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: what finished is kept; start again to go on", file=sys.stderr)
        return 130
    broken = [step for step in ("compare", "report") if layout.failure(step).is_file()]
    if broken:
        out.print(f"no table: {' and '.join(broken)} failed; {layout.SUMMARY} is of an earlier run")
    elif layout.SUMMARY.is_file():
        table.show(read_json(layout.SUMMARY), out)
    style = "green" if state.is_completed() else "red"
    out.print(
        f"[{style}]{state.name}[/]: {escape(str(state.message))} ({time.monotonic() - start:.0f} s)",
        soft_wrap=True,
        highlight=False,
    )
    out.print(where_next(report=not broken), soft_wrap=True, highlight=False, markup=False)
    return 0 if state.is_completed() else 1


def where_next(report: bool = True) -> str:
    """Lines that say where to look now: the report, unless it wasn't made; MLflow; the logs of the steps."""
    from tasks import layout, tracking

    here, page = Path.cwd(), layout.LATEST / "index.html"
    place = here.relative_to(ROOT).as_posix() if here.is_relative_to(ROOT) else "."
    ui = "make ui" + ("" if place == "." else f" WORKLOAD={place}")
    if tracking.uri() != f"sqlite:///{tracking.EMBEDDED.resolve()}":  # MLflow itself sets the variable to its store.
        ui = "the store that MLFLOW_TRACKING_URI names"
    lines = [f"report:  {page.resolve()}"] if report and page.is_file() else []
    return "\n".join([*lines, f"MLflow:  {ui}: a run for each variant, and the registry", f"logs:    {layout.LOGS}/"])


def _usage() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m flows",
        description="Run every stage of this folder's dvc.yaml that is out of date, measure, judge and promote. "
        "Takes no arguments: what to make stands in params.yaml. Ctrl-C keeps what finished.",
        epilog="Steps one by one: python -m tasks --help. With DVC alone: dvc repro.",
    )


def _terminated(*_: Any) -> None:
    print("\nterminated: what finished is kept; start again to go on", file=sys.stderr)
    sys.exit(143)


def _flow() -> Any:
    from flows.optimize import optimize

    return optimize(return_state=True)


if __name__ == "__main__":
    sys.exit(main())

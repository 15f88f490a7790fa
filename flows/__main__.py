"""`python -m flows`: run the main job, or find that there is nothing to do without starting Prefect."""

from __future__ import annotations

import sys
import time
from typing import Any

from flows import environment

environment.apply()


def main() -> int:
    """Returns the exit status: 0 done, 1 something failed, 2 bad input, 130 interrupted."""
    from flows.plan import console, only_run, plan
    from tasks import layout, table
    from tasks.errors import Fault
    from tasks.files import read_json
    from tasks.params import ParamsFault

    out, start = console(), time.monotonic()
    try:
        with only_run():
            found = plan()
        if found.nothing_to_do:
            table.show(read_json(layout.SUMMARY), out)
            out.print(
                f"nothing to do: all {len(found.dag.stages)} stages are up to date ({time.monotonic() - start:.1f} s)"
            )
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
    if layout.SUMMARY.is_file():
        table.show(read_json(layout.SUMMARY), out)
    style = "green" if state.is_completed() else "red"
    out.print(
        f"[{style}]{state.name}[/]: {state.message} ({time.monotonic() - start:.0f} s)", soft_wrap=True, highlight=False
    )
    out.print(f"report: {layout.LATEST / 'index.html'} · compare in MLflow: make ui", highlight=False)
    return 0 if state.is_completed() else 1


def _flow() -> Any:
    from flows.optimize import optimize

    return optimize(return_state=True)


if __name__ == "__main__":
    sys.exit(main())

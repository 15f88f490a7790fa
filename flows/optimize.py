"""The flow: every stage of dvc.yaml as a named Prefect task, stale ones run, the rest skipped."""

from __future__ import annotations

from typing import Any

from flows import environment

environment.apply()

from prefect import allow_failure, flow, task  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.client.schemas.objects import State  # noqa: E402
from prefect.futures import PrefectFuture  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.states import Completed, Failed  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402

from flows.driver import Ended  # noqa: E402
from flows.plan import Plan, missing_from_store, plan  # noqa: E402
from tasks import layout  # noqa: E402
from tasks.files import read_json  # noqa: E402
from tasks.machine import only_run  # noqa: E402

MAX_WAITING = 512


@flow(name="optimize", task_runner=ThreadPoolTaskRunner(max_workers=MAX_WAITING))  # type: ignore[arg-type]
def optimize() -> State[None]:
    """Bring every stage up to date, promote the best engine, and say what failed.

    Ends as Completed, or as Failed with the failed variants named; the others are finished
    in either case.
    """
    with only_run():
        found = plan()
        if found.nothing_to_do:
            return Completed(message="nothing to do: every stage is up to date")
        return _run(found)


def _run(found: Plan) -> State[None]:
    driver = found.driver(str(flow_run.get_id() or ""))

    @task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
    def stage(name: str) -> State[None]:
        ended = driver.stage(name)
        return (
            Completed(message=ended.how) if ended.ok else Failed(name=ended.how.capitalize(), message=str(ended.reason))
        )

    futures: dict[str, PrefectFuture[State[None]]] = {}
    try:
        with driver.progress:
            for name, one in driver.dag.stages.items():
                needs: list[Any] = [allow_failure(futures[n]) for n in one.needs]
                futures[name] = stage.submit(name, return_state=False, wait_for=needs)
            for future in futures.values():
                future.wait()
    finally:
        driver.children.stop()
    _publish()
    if not driver.failed():
        missing_from_store()  # Notes the store as this run left it, for the next to find.
    return _state(driver.failed(), len(driver.dag.stages))


def _state(failed: list[Ended], stages: int) -> State[None]:
    if failed:
        return Failed(
            message=f"{len(failed)} of {stages} stages failed: " + "; ".join(f"{e.stage}: {e.reason}" for e in failed)
        )
    return Completed(message=f"{stages} stages up to date")


def _publish() -> None:
    """Show the table in Prefect's UI too."""
    from tasks.report import batches, ordered, row

    if not layout.SUMMARY.is_file():
        return
    summary = read_json(layout.SUMMARY)
    rows = [row(v) for v in ordered(summary["variants"])]
    further = (f"speedup_{batch}" for batch in batches(summary))
    columns = ("variant", "accuracy", "speedup", *further, "size", "verdict", "reason")
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(r.get(c, "–").replace("|", "/") for c in columns) + " |" for r in rows),
    ]
    create_markdown_artifact("\n".join(lines), key="variants", description="Every variant with its verdict")

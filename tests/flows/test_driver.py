from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flows.dag import Dag
from flows.driver import Driver, sweep
from tasks import layout

# On a busy machine a tiny engine's latency may not settle.
MEASURED = ("passed", "unstable")


@pytest.fixture
def driver(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that drives all stages of the copied project, with some commands planted."""
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PYTHONPATH", str(copy))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")

    def drive(stop_before: str = "record", **planted: dict) -> Driver:
        dag = Dag()
        for name, changes in planted.items():
            key = name.replace("__", "@").replace("_", "-")
            dag.stages[key] = replace(dag.stages[key], **changes)
        forced = frozenset(k.replace("__", "@").replace("_", "-") for k in planted)
        run = Driver(dag, Console(quiet=True), set(dag.stale()), forced)
        for name in dag.stages:
            if name == stop_before:
                break
            run.stage(name)
        return run

    return drive


def touch(path: str) -> None:
    Path(path).write_text(Path(path).read_text() + "\n")


def verdicts() -> dict[str, tuple[str, str]]:
    return {
        v["name"]: (v["verdict"], "; ".join(v["reasons"]))
        for v in json.loads(layout.COMPARISON.read_text())["variants"]
    }


def test_nothing_runs_when_nothing_changed(driver) -> None:
    run = driver(stop_before="")
    assert {e.how for e in run.ended.values()} == {"up to date"}


def test_a_changed_setting_runs_its_artifact_and_descendants_only(driver, copy: Path, edit) -> None:
    edit(copy, lambda p: p["quantize"]["base-int8"].update(samples=32))
    run = driver()
    ran = {n for n, e in run.ended.items() if e.how == "done"}
    engine = {f"{step}@base-int8-ort" for step in ("build", "evaluate", "benchmark")}
    assert ran == {"quantize@base-int8", "compare"} | engine


def test_a_killed_step_fails_its_variant_only(driver) -> None:
    run = driver(quantize__base_int8={"command": "sh -c 'kill -9 $$'"})
    assert run.ended["quantize@base-int8"].reason == "killed by SIGKILL (out of memory?)"
    assert run.ended["build@base-int8-ort"].how == "skipped"
    assert run.ended["compare"].ok
    found = verdicts()
    assert found["base-int8-ort"] == ("failed", "quantize@base-int8 failed: killed by SIGKILL (out of memory?)")
    assert found["slim-kd-ort"][0] in MEASURED and found["base-ort"][0] in MEASURED


def test_a_step_past_its_timeout_fails_its_variant_only(driver) -> None:
    run = driver(export__slim_kd_onnx={"timeout_s": 0.2})
    assert [e.stage for e in run.failed()] == ["export@slim-kd-onnx"]
    assert "timed out after 0 s" in verdicts()["slim-kd-ort"][1]
    assert verdicts()["base-int8-ort"][0] in MEASURED


def test_a_failed_variant_leaves_no_result_of_an_earlier_run(driver) -> None:
    assert layout.report("benchmark", "base-int8-ort").is_file()
    driver(quantize__base_int8={"command": "false"})
    assert not layout.report("benchmark", "base-int8-ort").exists()
    assert not layout.artifact("base-int8-ort").exists()
    assert layout.report("benchmark", "base-ort").is_file()


def test_a_mended_variant_is_no_longer_failed(driver) -> None:
    driver(quantize__base_int8={"command": "false"})
    run = driver()
    assert not run.failed()
    assert not layout.failure("quantize@base-int8").exists()
    assert verdicts()["base-int8-ort"][0] in MEASURED


def test_a_failed_baseline_leaves_a_comparison_that_says_so(driver) -> None:
    driver(build__base_eager={"command": "false"})
    found = verdicts()
    assert found["base-eager"][0] == "failed"
    assert {v for v, _ in found.values()} <= {"failed", "rejected", "not_run"}


def test_steps_after_a_kill_start_from_what_was_finished(driver, copy: Path) -> None:
    shutil.rmtree("artifacts/slim-kd-onnx")
    run = driver()
    assert run.ended["distill@slim-kd"].how == "up to date"
    assert run.ended["export@slim-kd-onnx"].how in ("restored", "done")
    assert run.ended["build@slim-kd-ort"].how == "up to date"


def test_sweep_removes_scratch_of_dead_processes_only(tmp_path: Path) -> None:
    import os

    dead, mine = tmp_path / ".model.pt.part-999999999", tmp_path / f".model.pt.part-{os.getpid()}"
    dead.mkdir()
    mine.touch()
    assert sweep((tmp_path,)) == 1
    assert not dead.exists() and mine.exists()


def test_an_error_of_dvc_itself_fails_the_stage_and_is_told(
    driver, copy: Path, monkeypatch: pytest.MonkeyPatch, edit
) -> None:
    def broken(self: Dag, name: str) -> bool:
        raise OSError("no space left [here]")

    edit(copy, lambda p: p["quantize"]["base-int8"].update(samples=40))
    monkeypatch.setattr(Dag, "changed", broken)
    run = driver()
    assert run.ended["quantize@base-int8"].how == "failed"
    assert run.ended["quantize@base-int8"].reason == "OSError: no space left [here]"
    assert run.ended["build@base-int8-ort"].how == "skipped"
    assert run.ended["build@base-ort"].how == "up to date"

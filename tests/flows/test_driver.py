from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from flows.dag import Dag
from flows.driver import Driver, sweep
from tasks import layout

# On a busy machine a tiny engine's latency may not settle.
MEASURED = ("passed", "unstable")


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a project the working directory, with its own code."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")


def drive(stop_before: str = "record", **planted: dict) -> Driver:
    """Drive all stages of the project in the working directory, with some commands planted."""
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


@pytest.fixture
def driver(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """`driver(stop_before, planted)` drives the stages of the copied project, its working directory."""
    enter(copy, monkeypatch)
    return drive


@dataclass(frozen=True)
class Spoilt:
    """A project after a run in which one step was killed and another took too long, and its verdicts."""

    folder: Path
    run: Driver
    verdicts: dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def spoilt(built, tmp_path_factory: pytest.TempPathFactory) -> Spoilt:
    folder = tmp_path_factory.mktemp("spoilt") / "project"
    shutil.copytree(built.kept, folder, symlinks=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter(folder, monkeypatch)
        killed, slow = {"command": "sh -c 'kill -9 $$'"}, {"timeout_s": 0.2}
        return Spoilt(folder, drive(quantize__base_int8=killed, export__slim_kd_onnx=slow), verdicts())


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


def test_a_killed_step_fails_its_variant_only(spoilt: Spoilt) -> None:
    ended = spoilt.run.ended
    assert ended["quantize@base-int8"].reason == "killed by SIGKILL (out of memory?)"
    assert ended["build@base-int8-ort"].how == "skipped"
    assert ended["compare"].ok
    told = "quantize@base-int8 failed: killed by SIGKILL (out of memory?)"
    assert spoilt.verdicts["base-int8-ort"] == ("failed", told)
    assert spoilt.verdicts["base-ort"][0] in MEASURED


def test_a_step_past_its_timeout_fails_its_variant_only(spoilt: Spoilt) -> None:
    assert {e.stage for e in spoilt.run.failed()} == {"quantize@base-int8", "export@slim-kd-onnx"}
    verdict, told = spoilt.verdicts["slim-kd-ort"]
    assert verdict == "failed" and "timed out after 0 s" in told
    assert spoilt.verdicts["base-ort"][0] in MEASURED


def test_a_failed_variant_leaves_no_result_of_an_earlier_run(spoilt: Spoilt, built) -> None:
    left = (layout.report("benchmark", "base-int8-ort"), layout.artifact("base-int8-ort"))
    assert all((built.kept / path).exists() for path in left)
    assert not any((spoilt.folder / path).exists() for path in left)
    assert (spoilt.folder / layout.report("benchmark", "base-ort")).is_file()


def test_a_mended_variant_is_no_longer_failed(spoilt: Spoilt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(Path(shutil.copytree(spoilt.folder, tmp_path / "mended", symlinks=True)), monkeypatch)
    assert layout.failure("quantize@base-int8").is_file()
    run = drive()
    assert not run.failed()
    assert not layout.failure("quantize@base-int8").exists()
    assert {verdicts()[name][0] for name in ("base-int8-ort", "slim-kd-ort")} <= set(MEASURED)


def test_a_failed_baseline_leaves_a_comparison_that_says_so(driver) -> None:
    driver(build__base_eager={"command": "false"})
    found = verdicts()
    assert found["base-eager"][0] == "failed"
    assert {v for v, _ in found.values()} <= {"failed", "rejected", "not_run"}


def test_a_probe_that_crashes_keeps_the_earlier_peaks_and_stops_nothing(driver) -> None:
    before = layout.PEAKS.read_bytes()
    run = driver(peaks={"command": "sh -c 'kill -ILL $$'"})
    assert [(e.stage, e.reason) for e in run.failed()] == [("peaks", "killed by SIGILL")]
    assert layout.PEAKS.read_bytes() == before
    assert {e.how for name, e in run.ended.items() if name != "peaks"} == {"up to date"}


def test_another_variant_has_no_device_probed_again(copy: Path, command, edit) -> None:
    before = (copy / layout.PEAKS).read_bytes()
    edit(copy, lambda p: p["build"].update({"twin-ort": {"from": "base-onnx", "backend": "onnxruntime"}}))
    repro = command(copy, "dvc", "repro", "--single-item", "peaks")
    assert repro.returncode == 0 and "Running stage 'peaks'" in repro.stdout, repro.stderr
    assert (copy / layout.PEAKS).read_bytes() == before, "no two probes give the same numbers"


def test_steps_after_a_kill_start_from_what_was_finished(driver, copy: Path) -> None:
    shutil.rmtree("artifacts/slim-kd-onnx")
    run = driver()
    assert run.ended["distill@slim-kd"].how == "up to date"
    assert run.ended["export@slim-kd-onnx"].how in ("restored", "done")
    assert run.ended["build@slim-kd-ort"].how == "up to date"


def test_sweep_removes_scratch_of_dead_processes_only(tmp_path: Path) -> None:
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
    run = driver(stop_before="compare")
    assert run.ended["quantize@base-int8"].how == "failed"
    assert run.ended["quantize@base-int8"].reason == "OSError: no space left [here]"
    assert run.ended["build@base-int8-ort"].how == "skipped"
    assert run.ended["build@base-ort"].how == "up to date"


def test_a_stage_that_can_not_be_kept_spoils_what_it_makes_stale(
    driver, copy: Path, monkeypatch: pytest.MonkeyPatch, edit
) -> None:
    """As on a full disk: what was made of the earlier one must not be judged under the new settings."""
    whole = Dag.commit

    def full(self: Dag, name: str, began: dict[str, str]) -> None:
        if name == "quantize@base-int8":
            raise OSError(28, "No space left on device")
        whole(self, name, began)

    edit(copy, lambda p: p["quantize"]["base-int8"].update(samples=40))
    monkeypatch.setattr(Dag, "commit", full)
    run = driver(stop_before="record")
    assert "No space left on device" in str(run.ended["quantize@base-int8"].reason)
    assert not layout.report("benchmark", "base-int8-ort").exists()
    assert verdicts()["base-int8-ort"][0] == "failed"
    assert verdicts()["base-ort"][0] in MEASURED


def test_settings_that_change_during_a_run_end_in_no_verdict(driver, copy: Path, edit) -> None:
    run = driver(stop_before="compare")
    before = layout.COMPARISON.read_bytes()
    layout.PARAMS.write_text("# Another comment.\n" + layout.PARAMS.read_text())
    run._require_same_settings()
    edit(copy, lambda p: p["train"]["base"].update(epochs=9))
    run.forced = frozenset(["compare"])
    ended = run.stage("compare")
    assert (ended.how, ended.ok) == ("failed", False)
    assert "params.yaml changed during this run" in str(ended.reason)
    assert layout.COMPARISON.read_bytes() == before

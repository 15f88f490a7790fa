"""The whole flow on tiny params, as a person runs it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.orphans import end_orphans
from tasks import tracking

pytestmark = pytest.mark.services

VARIANT_KEYS = {
    "name", "lineage", "also", "backend", "accuracy", "accuracy_change", "latency_ms", "throughput_per_s", "speedup",
    "speedup_at", "throughput_at", "size_bytes", "evidence", "verdict", "reasons", "mlflow_run_id", "engine_sha256",
    "test_sha256", "clock", "energy_mj", "energy_net_mj", "energy_reason", "energy_disturbed", "memory_bytes",
    "host_peak_bytes", "device_peak_bytes", "activation_bytes", "load_s", "first_inference_s", "plaster", "roofline",
    "transfer", "conditions", "latency_bounds_ms", "throughput_bounds",
}  # fmt: skip


def summary(folder: Path) -> dict:
    return json.loads((folder / "reports/latest/summary.json").read_text())


def by_name(folder: Path) -> dict[str, dict]:
    return {v["name"]: v for v in summary(folder)["variants"]}


def test_first_run_ends_with_a_promoted_engine(built) -> None:
    assert built.first.returncode == 0, built.first.stdout + built.first.stderr
    found = summary(built.folder)
    promoted = [v for v in found["variants"] if v["verdict"] == "promoted"]
    assert len(promoted) == 1, {v["name"]: (v["verdict"], v["reasons"]) for v in found["variants"]}
    assert found["champion"]["variant"] == promoted[0]["name"]
    assert promoted[0]["speedup"]["low"] > 1
    assert "Completed" in built.first.stdout and promoted[0]["name"] in built.first.stdout


def test_summary_has_every_key_and_only_finite_numbers(built) -> None:
    found = summary(built.folder)
    assert found["schema"] == 1
    assert {"target", "git_commit", "params_sha256", "data_sha256"} <= set(found)
    assert set(found["data_sha256"]) == {"train", "calibration", "validation", "test"}
    for variant in found["variants"]:
        assert set(variant) == VARIANT_KEYS
        assert variant["mlflow_run_id"]
        if variant["verdict"] != "not_run":
            for key in ("accuracy", "accuracy_change", "speedup"):
                interval = variant[key]
                assert interval["low"] <= interval["value"] <= interval["high"] and math.isfinite(interval["value"])
            assert variant["accuracy"]["n"] == 300
            assert variant["speedup"]["versus"] == "base-eager"
            assert set(variant["latency_ms"]) == {"p50", "p90", "p99", "n", "batch"}


def test_an_engine_that_cannot_run_here_is_out_of_the_ranking(built) -> None:
    rtx = by_name(built.folder)["base-rtx"]
    assert rtx["verdict"] == "not_run"
    assert "built, not run here" in rtx["reasons"][0]
    assert rtx["accuracy"] is None and rtx["speedup"] is None and rtx["size_bytes"]["engine"] > 0


def test_report_page_shows_the_same_numbers(built) -> None:
    page = (built.folder / "reports/latest/index.html").read_text()
    for variant in summary(built.folder)["variants"]:
        assert variant["name"] in page
        if variant["speedup"]:
            assert f"{variant['speedup']['value']:.2f}×" in page
    markup = re.sub(r"<script.*?</script>", "<script></script>", page, flags=re.DOTALL)
    assert "src=" not in markup and "href=" not in markup


def test_the_report_holds_each_engines_layers_against_the_probed_peaks(built) -> None:
    page = (built.folder / "reports/latest/index.html").read_text()
    part = page[page.index("<h2>Roofline</h2>") :]
    for name in ("base-eager", "base-ort", "slim-kd-ort", "base-int8-ort"):
        assert re.search(rf"<b>{name}</b>.*the bound of \d\S* ms, mostly by (compute|memory|cache)", part), name
    assert "not counted" not in part


def test_the_end_of_a_run_says_where_to_look(built, command) -> None:
    page = (built.folder / "reports/latest/index.html").resolve()
    assert page.is_file() and f"report:  {page}\nMLflow:  make ui: " in built.first.stdout
    ask = "import os; from flows.__main__ import where_next; os.chdir('infra/gpu'); print(where_next())"
    elsewhere = command(built.folder, "python", "-c", ask).stdout
    assert elsewhere.startswith("MLflow:  make ui WORKLOAD=infra/gpu: "), "no report is there"


def test_dvc_agrees_after_the_flow(built, command) -> None:
    assert "up to date" in command(built.folder, "dvc", "status").stdout
    repro = command(built.folder, "dvc", "repro")
    assert "Running stage" not in repro.stdout, repro.stdout


def test_dvc_shows_the_variants(built, command) -> None:
    metrics = command(built.folder, "dvc", "metrics", "show").stdout
    assert "results/benchmark/slim-kd-ort.json" in metrics and "speedup.value" in metrics
    plots = command(built.folder, "dvc", "plots", "show")
    assert plots.returncode == 0 and (built.folder / "dvc_plots/index.html").is_file(), plots.stderr


def test_second_run_does_nothing_and_says_so(built, command) -> None:
    before = {p: p.stat().st_mtime_ns for p in built.folder.rglob("artifacts/**/*") if p.is_file()}
    summary_before = (built.folder / "reports/latest/summary.json").read_bytes()
    again = command(built.folder, "python", "-m", "flows")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert "starting Prefect" not in again.stdout and "reports/latest/index.html" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert (built.folder / "reports/latest/summary.json").read_bytes() == summary_before


def test_a_run_that_died_is_closed_by_the_next_start_even_without_work(
    copy: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (copy / ".enginesmith/store.json").is_file(), "the flow looks at the store when it ends"
    monkeypatch.chdir(copy)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy / 'mlflow.db'}")
    store = tracking.client()
    tags = {tracking.OWNER: f"{os.uname().nodename}:999999999:0"}
    run = store.create_run(tracking.experiment(store, "tiny"), tags=tags).info.run_id
    assert store.get_run(run).info.status == "RUNNING"
    again = command(copy, "python", "-m", "flows")
    assert "nothing to do" in again.stdout, again.stdout + again.stderr
    assert store.get_run(run).info.status == "KILLED"


def test_a_fresh_clone_pulls_everything_and_rebuilds_nothing(built, tmp_path: Path, command) -> None:
    folder = built.folder
    for words in (("git", "add", "dvc.lock", ".dvc/config"), ("git", "commit", "-qm", "lock"), ("dvc", "push", "-q")):
        done = command(folder, *words)
        assert done.returncode == 0, done.stderr
    clone = tmp_path / "clone"
    assert command(tmp_path, "git", "clone", "-q", str(folder), str(clone)).returncode == 0
    assert command(clone, "python", "-m", "tasks", "target").returncode == 0
    pulled = command(clone, "dvc", "pull", "-q")
    assert pulled.returncode == 0, pulled.stderr
    assert "up to date" in command(clone, "dvc", "status").stdout
    engine = "artifacts/slim-kd-ort/engine.onnx"
    assert (clone / engine).read_bytes() == (folder / engine).read_bytes()
    ask = "from flows.plan import plan; found = plan(); print(sorted(found.stale), sorted(found.forced))"
    left = command(clone, "python", "-c", ask)
    assert left.stdout.split("\n")[-2] == "[] ['promote', 'record', 'report']", (
        "only the recording into the clone's own, empty MLflow store is left to do: " + left.stdout + left.stderr
    )


def test_a_failing_variant_leaves_the_others_running(copy: Path, command, edit) -> None:
    def impossible(params: dict) -> None:
        params["prune"]["none"] = {"from": "base", "ratio": 0.5, "round_to": 1024}
        params["export"]["none-onnx"] = {"from": "none"}
        params["build"]["none-ort"] = {"from": "none-onnx", "backend": "onnxruntime"}

    edit(copy, impossible)
    run = command(copy, "python", "-m", "flows")
    assert run.returncode == 1
    assert "Failed: 1 of" in run.stdout and "nothing to prune" in run.stdout
    found = by_name(copy)
    assert found["none-ort"]["verdict"] == "failed" and "prune@none failed" in found["none-ort"]["reasons"][0]
    assert found["slim-kd-ort"]["verdict"] in ("promoted", "passed", "unstable")


def stopped(project: Path, number: int, command, edit) -> int:
    """The exit status of a flow that is sent a signal once a changed variant is quantised and its engine is built."""
    edit(project, lambda p: p["quantize"]["base-int8"].update(samples=48))
    log = (project / "out.txt").open("w")
    from_here = {**os.environ, "PYTHONPATH": str(project), "PYTHONUNBUFFERED": "1"}
    from_here["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "300"
    flow = subprocess.Popen([sys.executable, "-c", FLOW], cwd=project, env=from_here, stdout=log, stderr=log)
    steps = wait_for_step(flow, "build", log.name)
    flow.send_signal(number)
    status = flow.wait(60)
    psutil.wait_procs(steps, timeout=10)
    assert not [p for p in steps if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not list(project.rglob(".*.part-*"))
    assert "Traceback" not in (project / "out.txt").read_text()
    assert end_orphans_of(project) == 0
    stale = command(project, "dvc", "status").stdout
    assert "quantize@base-int8:" not in stale, "what was finished before the signal is kept"
    assert "build@base-int8-ort:" in stale and "compare:" in stale
    return status


def test_ctrl_c_ends_all_children_and_keeps_what_was_finished(copy: Path, command, edit) -> None:
    assert stopped(copy, signal.SIGINT, command, edit) == 130


def test_dvc_goes_on_where_sigterm_stopped_a_flow_and_the_flow_agrees(copy: Path, command, edit) -> None:
    assert stopped(copy, signal.SIGTERM, command, edit) == 143
    repro = command(copy, "dvc", "repro")
    assert repro.returncode == 0, repro.stderr
    assert "Running stage 'build@base-int8-ort'" in repro.stdout
    assert not [s for s in ("train@base", "quantize@base-int8") if f"Running stage '{s}'" in repro.stdout]
    again = command(copy, "python", "-m", "flows")
    assert again.returncode == 0 and "nothing to do" in again.stdout, again.stdout


def end_orphans_of(project: Path) -> int:
    """End the temporary servers that a killed run left; the next run does the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(project / ".enginesmith/prefect"))
        return end_orphans()


# A shell that starts a job in the background makes it ignore Ctrl-C; a terminal doesn't.
FLOW = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
os.execv(sys.executable, [sys.executable, "-m", "flows"])
"""


def wait_for_step(flow: subprocess.Popen, step: str, log: str) -> list[psutil.Process]:
    """All descendants of a flow, once it runs a given step."""
    end = time.monotonic() + 400
    while time.monotonic() < end and flow.poll() is None:
        children = psutil.Process(flow.pid).children(recursive=True)
        for child in children:
            try:
                if child.cmdline()[-3:-1] == ["tasks", step] or step in child.cmdline():
                    return [c for c in children if "tasks" in c.cmdline()]
            except psutil.Error:
                continue
        time.sleep(0.05)
    raise AssertionError(Path(log).read_text())


def test_two_runs_in_one_folder_are_refused(copy: Path, command) -> None:
    from filelock import FileLock

    with FileLock(copy / ".enginesmith/run.lock"):
        run = command(copy, "python", "-m", "flows")
    assert run.returncode == 2
    assert "another run is at work" in run.stderr


def test_bad_params_are_refused_before_anything_runs(copy: Path, command, edit) -> None:
    edit(copy, lambda p: p["prune"]["slim"].update(ratio=1.0))
    shutil.rmtree(copy / ".enginesmith/logs")
    run = command(copy, "python", "-m", "flows")
    assert run.returncode == 2
    assert "prune.slim.ratio" in run.stderr and "1.0" in run.stderr
    assert not (copy / ".enginesmith/logs").exists()
    assert (copy / "artifacts/slim/model.pt").is_file()

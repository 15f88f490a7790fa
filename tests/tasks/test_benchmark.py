"""Timing against the baseline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tasks import reopening
from tasks.benchmark import benchmark, each_batch, unstable
from tasks.errors import Fault
from tasks.files import read_json, sha256
from tasks.measure import Timing
from tasks.settings import BenchmarkParams
from tasks.stats import ratio, reopened
from tasks.target import fingerprint
from tasks.timing import Opening, over

ROOT = Path(__file__).resolve().parents[2]
TIMING = Timing(1, "host", 1.0, None, None, 1.0, 30, 1000.0, True, (1.0,) * 12, (12,), 12)


def test_the_speedup_can_be_computed_again_from_the_report(line: Path) -> None:
    report = read_json(line / "results/benchmark/base-ort.json")
    mine, other = report["timing"]["medians"], report["baseline"]["medians"]
    rounds = ratio(np.array(other), np.array(mine), report["confidence"])
    again = reopened(rounds, report["timing"]["reopen_sd"], report["confidence"])
    assert report["speedup"] == {"value": again.value, "low": again.low, "high": again.high}
    assert len(mine) == len(other) == 8
    assert report["versus"] == "base-eager"


def test_the_interval_is_as_sure_as_four_engines_together_have_to_be(line: Path) -> None:
    report = read_json(line / "results/benchmark/base-ort.json")
    assert report["confidence"] == pytest.approx(1 - 0.05 / 4)
    assert report["timing"]["looks"] == [8]
    assert report["timing"]["horizon"] == 8


def test_the_report_names_both_engines_by_digest(line: Path, artifact: Any) -> None:
    report = read_json(line / "results/benchmark/base-ort.json")
    assert report["engine_sha256"] == sha256(artifact("base-ort") / "engine.onnx")
    assert report["baseline_sha256"] == sha256(artifact("base-eager") / "model.pt")
    assert len(report["load_average"]) == 2


def test_the_report_tells_the_conditions_the_energy_and_the_start(line: Path) -> None:
    report = read_json(line / "results/benchmark/base-ort.json")
    conditions, energy, start = report["conditions"], report["energy"], report["footprint"]
    assert conditions["readings"] > 2 * 8
    assert conditions["seconds"] > 0.05
    assert {"before", "after", "steal_share", "switches", "reasons", "missing"} <= set(conditions)
    assert (energy["net_mj_per_inference"] is None) == bool(energy["reason"])
    assert energy["meter"] or energy["reason"]
    assert start["batch"] == report["timing"]["batch"]
    assert 0 < start["first_call_s"] < start["first_inference_s"]
    assert start["host_peak_bytes"] >= start["host_bytes"]


def test_an_engine_that_did_not_run_has_neither(line: Path) -> None:
    report = read_json(line / "results/benchmark/base-rtx.json")
    assert (report["conditions"], report["energy"], report["footprint"]) == (None, None, None)


@pytest.mark.parametrize("name", ["base-ort", "base-rtx"])
def test_the_report_names_the_machine(line: Path, name: str) -> None:
    assert read_json(line / f"results/benchmark/{name}.json")["target_id"] == fingerprint().id


def test_the_baseline_against_itself_is_near_one(artifact: Any, data_folder: Path) -> None:
    params = BenchmarkParams(
        openings=1, rounds=12, max_rounds=12, window_ms=10, warmup_ms=20, max_width=0.9, max_lost=1000
    )
    gain = benchmark(artifact("base-eager"), artifact("base-eager"), data_folder, params).speedup
    assert gain is not None
    assert 0.7 < gain.value < 1.4


def test_an_engine_that_cannot_run_here_has_a_reason_and_no_number(artifact: Any, data_folder: Path) -> None:
    report = benchmark(artifact("base-rtx"), artifact("base-eager"), data_folder, BenchmarkParams())
    assert report.not_run is not None
    assert report.not_run.startswith("built, not run here")
    assert (report.timing, report.baseline, report.speedup) == (None, None, None)


@pytest.mark.parametrize("engine", ["base-eager", "base-rtx"])
def test_a_baseline_that_cannot_run_here_is_a_fault_of_the_baseline(
    artifact: Any, data_folder: Path, engine: str
) -> None:
    with pytest.raises(Fault, match="the baseline base-rtx can't run here") as caught:
        benchmark(artifact(engine), artifact("base-rtx"), data_folder, BenchmarkParams())
    assert str(caught.value.got).startswith("built, not run here")


def wavering(ms: float, spread: float) -> tuple[float, ...]:
    """Twelve medians, half of them above and half below."""
    return tuple(ms * (1 + spread * (-1) ** i * (i + 1) / 12) for i in range(12))


@pytest.mark.parametrize(
    ("spread", "cold", "reason"),
    [
        (0.01, (), None),
        (0.6, (), "by the rounds alone the speed-up's interval is "),
        (0.01, ("engine",), "the engine's latency did not settle during warm-up"),
        (0.01, ("baseline",), "the baseline's latency did not settle during warm-up"),
        (0.01, ("engine", "baseline"), "the engine's and the baseline's latency did not settle during warm-up"),
    ],
)
def test_a_measurement_that_cannot_be_used_says_why(spread: float, cold: tuple[str, ...], reason: str | None) -> None:
    timings = {
        who: replace(TIMING, warm=who not in cold, medians=wavering(1.0, spread if who == "engine" else 0))
        for who in ("engine", "baseline")
    }
    told = unstable([Opening(timings["engine"], timings["baseline"])], BenchmarkParams())
    assert told == reason or (
        spread > 0.5 and told and told.startswith(str(reason)) and told.endswith("wide, 10% is allowed")
    )


def test_disturbed_rounds_are_no_measurement() -> None:
    busy = "only 3 of 20 rounds were undisturbed: other processes took its cores"
    disturbed = Opening(TIMING, replace(TIMING, busy=busy))
    assert unstable([Opening(TIMING, TIMING), disturbed], BenchmarkParams()) == busy


def test_too_few_rounds_for_so_many_engines_are_no_measurement(artifact: Any, data_folder: Path) -> None:
    params = BenchmarkParams(
        openings=1, rounds=8, max_rounds=8, window_ms=2, warmup_ms=20, max_width=0.99, max_lost=1000
    )
    report = benchmark(artifact("base-ort"), artifact("base-eager"), data_folder, params, family=20)
    assert report.unstable is not None
    told = ("8 rounds can't give an interval of confidence 99.750%", "settle", "wide")
    assert any(words in report.unstable for words in told)


def test_other_batches_get_half_the_rounds_and_half_the_time() -> None:
    first, other = each_batch(BenchmarkParams(rounds=20, max_rounds=60, budget_s=8, also=(32,)))
    assert (first.batch, first.rounds, first.max_rounds, first.budget_s) == (1, 20, 60, 8)
    assert (other.batch, other.rounds, other.max_rounds, other.budget_s) == (32, 10, 30, 4)


def test_further_openings_are_made_in_processes_of_their_own(
    artifact: Any, data_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    params = BenchmarkParams(
        openings=3,
        rounds=24,
        max_rounds=24,
        also=(2,),
        window_ms=2,
        warmup_ms=10,
        max_width=0.99,
        max_lost=1000,
        energy=False,
    )
    report = benchmark(artifact("base-ort"), artifact("base-eager"), data_folder, params, family=4)
    assert report.timing is not None and report.baseline is not None
    openings = [Opening(report.timing, report.baseline), *report.again]
    assert [len(o.timing.medians) for o in openings] == [8, 8, 8]
    assert len({o.timing.medians for o in openings}) == 3
    assert report.speedup == over(openings, params.confidence, 4, params.reopen_sd)
    assert [[o.timing.batch for o in at.again] for at in report.also] == [[2, 2]]
    assert "opening 3 of 3" in capfd.readouterr().out
    assert report.conditions is not None and report.conditions.readings > 3 * 2 * 8


def plan(engine: Path, baseline: Path, data: Path, params: BenchmarkParams) -> reopening.Plan:
    return reopening.Plan({"engine": engine, "baseline": baseline}, data / "validation.npz", [params])


@pytest.mark.parametrize("turned", [False, True])
def test_engines_opened_the_other_way_round_take_the_inputs_of_the_same_one(
    artifact: Any, data_folder: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    opened, described = {}, []
    open_engine = reopening.open_engine
    monkeypatch.setattr(reopening, "open_engine", lambda folder: opened.setdefault(folder.name, open_engine(folder)))
    monkeypatch.setattr(reopening.measure, "inputs_of", lambda specs, *_: described.append(specs) or {"x": np.ones(8)})
    monkeypatch.setattr(reopening, "timed", lambda plan, sessions, *_: [dict.fromkeys(sessions)])
    asked = plan(artifact("base-ort"), artifact("base-eager"), data_folder, BenchmarkParams())
    (timings,), _ = reopening.opened(replace(asked, turned=turned))
    assert list(opened) == (["base-eager", "base-ort"] if turned else ["base-ort", "base-eager"])
    assert len(described) == 1 and described[0] is opened["base-ort"].inputs
    assert set(timings) == {"engine", "baseline"}


class Deadly:
    """A folder's name that ends the process that unpickles it."""

    name = "base-ort"

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_process_that_dies_as_it_opens_an_engine_is_a_fault(artifact: Any, data_folder: Path) -> None:
    deadly: Any = Deadly()
    with pytest.raises(Fault, match="a process that opened base-ort, base-eager again died"):
        list(reopening.again(plan(deadly, artifact("base-eager"), data_folder, BenchmarkParams(openings=2))))


def test_what_is_wrong_in_another_process_is_said_as_in_this_one(artifact: Any, data_folder: Path) -> None:
    by_device = BenchmarkParams(openings=2, clock="device")
    with pytest.raises(Fault, match="device needs engines that run on a GPU") as caught:
        list(reopening.again(plan(artifact("base-ort"), artifact("base-eager"), data_folder, by_device)))
    assert str(caught.value.do).startswith("set benchmark.clock to host")


def test_the_process_of_an_opening_ends_with_the_one_that_started_it(
    artifact: Any, data_folder: Path, tmp_path: Path
) -> None:
    long = BenchmarkParams(openings=2, rounds=20, window_ms=5000, budget_s=600)
    folders = [str(folder) for folder in (artifact("base-ort"), artifact("base-eager"), data_folder / "validation.npz")]
    program = f"""
import pathlib, sys
from tasks import reopening
from tasks.settings import BenchmarkParams
if __name__ == "__main__":
    params = BenchmarkParams.model_validate_json({long.model_dump_json()!r})
    engine, baseline, data = map(pathlib.Path, {folders!r})
    list(reopening.again(reopening.Plan({{"engine": engine, "baseline": baseline}}, data, [params])))
"""
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=environment)
    try:
        children = within(60, lambda: [p for p in psutil.Process(parent.pid).children(True) if "spawn_main" in cmd(p)])
        assert children
    finally:
        parent.kill()
        parent.wait()
    assert within(20, lambda: not any(map(running, children)))


def cmd(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def within(seconds: float, found: Callable[[], Any]) -> Any:
    """What is found before the time is over, looked for every tenth of a second."""
    end = time.monotonic() + seconds
    while not (told := found()) and time.monotonic() < end:
        time.sleep(0.1)
    return told


def test_openings_share_the_rounds_and_what_the_mean_may_be_wide() -> None:
    params = BenchmarkParams(openings=1, rounds=30, max_rounds=60, budget_s=9)
    assert reopening.share(params) == params
    each = reopening.share(params.model_copy(update={"openings": 4}))
    assert (each.rounds, each.max_rounds, each.budget_s, each.max_width) == (8, 15, 9 / 4, 2 * params.max_width)
    assert reopening.share(params.model_copy(update={"openings": 20})).rounds == 8
    assert reopening.share(params.model_copy(update={"openings": 20, "confidence": 0.999})).rounds == 11

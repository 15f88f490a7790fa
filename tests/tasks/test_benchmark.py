"""Timing against the baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.benchmark import benchmark, unstable
from tasks.errors import Fault
from tasks.files import read_json, sha256
from tasks.measure import Timing
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, ratio
from tasks.target import fingerprint

TIMING = Timing(1, 1.0, None, None, 1.0, 30, 1000.0, True, (1.0, 1.0))


def test_the_speedup_can_be_computed_again_from_the_report(line: Path) -> None:
    report = read_json(line / "results/benchmark/base-ort.json")
    mine, other = report["timing"]["medians"], report["baseline"]["medians"]
    again = ratio(np.array(other), np.array(mine), 0.95)
    assert report["speedup"] == {"value": again.value, "low": again.low, "high": again.high}
    assert len(mine) == len(other) == 8
    assert report["versus"] == "base-eager"


def test_the_report_names_both_engines_by_digest(line: Path, artifact: Any) -> None:
    report = read_json(line / "results/benchmark/base-ort.json")
    assert report["engine_sha256"] == sha256(artifact("base-ort") / "engine.onnx")
    assert report["baseline_sha256"] == sha256(artifact("base-eager") / "model.pt")
    assert len(report["load_average"]) == 2


@pytest.mark.parametrize("name", ["base-ort", "base-rtx"])
def test_the_report_names_the_machine(line: Path, name: str) -> None:
    assert read_json(line / f"results/benchmark/{name}.json")["target_id"] == fingerprint().id


def test_the_baseline_against_itself_is_near_one(artifact: Any, data_folder: Path) -> None:
    params = BenchmarkParams(rounds=12, max_rounds=12, window_ms=10, warmup_ms=20, max_width=0.9)
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


@pytest.mark.parametrize(
    ("interval", "cold", "reason"),
    [
        (Interval(2.0, 1.95, 2.04), (), None),
        (Interval(2.0, 1.5, 2.5), (), "the speed-up's interval is 50.0% wide, at most 10% is allowed"),
        (Interval(2.0, 1.95, 2.04), ("engine",), "the engine's latency did not settle during warm-up"),
        (Interval(2.0, 1.95, 2.04), ("baseline",), "the baseline's latency did not settle during warm-up"),
        (
            Interval(2.0, 1.95, 2.04),
            ("engine", "baseline"),
            "the engine's and the baseline's latency did not settle during warm-up",
        ),
    ],
)
def test_a_measurement_that_cannot_be_used_says_why(
    interval: Interval, cold: tuple[str, ...], reason: str | None
) -> None:
    timings = {who: replace(TIMING, warm=who not in cold) for who in ("engine", "baseline")}
    assert unstable(interval, timings, BenchmarkParams()) == reason

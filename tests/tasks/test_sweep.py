"""Latency and throughput over batches and streams."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tasks import __main__ as command
from tasks import layout, streams, sweep, sweep_page
from tasks.errors import Fault, Unavailable
from tasks.files import read_json
from tasks.planted import Planted, tiny_engine
from tasks.settings import BenchmarkParams
from tasks.stats import Interval
from tasks.sweep import Point, best, default_batches

POOL = [{"x": np.zeros((1, 64), np.float32)}] * 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("engine"), 64, 2)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sweep, "last_level_cache_bytes", lambda: 100)
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "validation.npz", x=np.zeros((20, 64), np.float32))
    return folder


@pytest.fixture
def params() -> Any:
    return lambda **changes: BenchmarkParams(**{"window_ms": 4, "warmup_ms": 10, "max_lost": 1000, **changes})


class Sleeper(Planted):
    """It sleeps, so that any number of them can do so at the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def run(self, batch: Any) -> Any:
        self.calls += 1
        time.sleep(self.seconds)
        return {}

    def synchronize(self) -> None:
        pass


def test_sessions_at_the_same_time_add_up() -> None:
    one, rate_of_one = streams.together([Sleeper(4e-3)], POOL, 0.1, 0)
    four, rate_of_four = streams.together([Sleeper(4e-3) for _ in range(4)], POOL, 0.1, 0)
    assert min(one + four) >= 4
    assert rate_of_four == pytest.approx(4 * rate_of_one, rel=0.4)
    assert len(four) > 2.5 * len(one)


def test_a_window_goes_on_until_the_calls_are_enough() -> None:
    sessions = [Sleeper(2e-3) for _ in range(2)]
    streams.together(sessions, POOL, 0.002, 13)
    assert [s.calls for s in sessions] == [7, 7]
    slow = Sleeper(0.01)
    streams.together([slow], POOL, 0.001, 1000)
    assert slow.calls <= 3


def test_what_a_session_raises_is_raised_and_ends_the_others() -> None:
    class Broken(Sleeper):
        def run(self, batch: Any) -> Any:
            raise Fault("broken", got="a", expected="b", do="c")

    start, before = time.perf_counter(), threading.active_count()
    with pytest.raises(Fault, match="broken"):
        streams.together([Sleeper(1e-3), Broken(0)], POOL, 5.0, 0)
    assert time.perf_counter() - start < 3
    assert threading.active_count() == before


def test_every_batch_is_measured_in_every_number_of_streams(engine: Path, data: Path, params: Any) -> None:
    told: list[str] = []
    found = sweep.sweep(engine, data, params(max_latency_ms=1e4), [1, 8], [1, 2], told.append, rounds=3)
    assert [(p.batch, p.streams) for p in found.points] == [(1, 1), (8, 1), (1, 2), (8, 2)]
    assert told == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    for point in found.points:
        assert point.throughput_per_s.low <= point.throughput_per_s.value <= point.throughput_per_s.high
        assert point.n >= 11
        assert point.p50 is not None
        assert point.p50 > 0
    by = {(p.batch, p.streams): p.throughput_per_s.value for p in found.points}
    assert by[8, 1] > by[1, 1]
    assert (found.skipped, found.interrupted, found.rounds) == ({}, False, 3)
    assert found.conditions.readings > 12


def point(batch: int, rate: float, within: bool | None, streams: int = 1) -> Point:
    return Point(batch, streams, 1.0, 2.0, None, 99, Interval(rate, rate * 0.9, rate * 1.1), within)


def test_the_best_is_the_most_throughput_within_the_limit() -> None:
    points = [point(1, 10, True), point(8, 50, True), point(16, 60, None), point(32, 90, False)]
    assert best(points, 5.0) is points[1]
    assert best(points, None) is points[3]
    assert best(points[2:], 5.0) is None


def test_a_disturbed_point_is_not_the_best_and_no_rival() -> None:
    points = [point(1, 10, True), replace(point(8, 50, True), disturbed="another process worked on the GPU")]
    assert best(points, None) is best(points, 5.0) is points[0]
    assert best(points[1:], None) is best(points[1:], 5.0) is None
    told = {"engine": "small", "points": points, "interrupted": False}
    found = SimpleNamespace(**told, best=points[0], max_latency_ms=None)
    assert "not told apart" not in sweep_page.verdict(found)
    assert "no point was undisturbed" in sweep_page.verdict(SimpleNamespace(**told, best=None, max_latency_ms=None))
    assert "no undisturbed point is known" in sweep_page.verdict(SimpleNamespace(**told, best=None, max_latency_ms=5.0))


def test_a_window_that_is_used_is_not_counted_as_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "together", lambda *_: ([1.0], 1.0))
    cell, told = sweep.Cell(1, 1, []), iter(["", "busy", "", "busy", "", "busy", "", None])
    watch = SimpleNamespace(disturbed=lambda: next(told))
    for _ in range(2):
        sweep._measure(cell, [SimpleNamespace()], 10**6, BenchmarkParams(), watch, 1)
    assert (cell.discarded, cell.disturbed, len(cell.windows)) == ({"busy": 2}, "busy", 2)


def within(windows: list[np.ndarray], limit: float | None) -> tuple[float | None, bool | None]:
    cell = sweep.Cell(4, 1, [], windows=windows, rates=[10.0, 11.0])
    found = sweep._point(cell, BenchmarkParams(max_latency_ms=limit), 0.95)
    return found.p90, found.within


def test_a_call_slower_than_the_limit_is_out_and_one_with_too_few_calls_is_not_in() -> None:
    alike = [np.full(sweep.calls_of(5, 0.95), 2.0)] * 5
    assert [within(alike, limit)[1] for limit in (1.9, 2.0, None)] == [False, True, None]
    assert within([np.full(12, 2.0)] * 5, 100) == (None, None)


def test_a_limit_within_the_interval_of_p90_is_not_known_to_be_kept() -> None:
    calls = [np.random.default_rng(seed).normal(10, 1, 200) for seed in range(5)]
    p90, told = within(calls, 11.28)
    assert p90 == pytest.approx(11.28, abs=0.15) and told is None
    assert (within(calls, 12.5)[1], within(calls, 10.5)[1]) == (True, False)
    burst = [*calls[:4], calls[4] + 5]
    assert within(burst, 20)[1] is None, "one window is slower as a whole: nothing bounds p90"


def test_a_rate_and_its_interval_are_above_0_and_a_ratio_apart() -> None:
    found = sweep.rate(np.array([10.0, 1000.0]), 0.95)
    assert found.value == pytest.approx(100)
    assert found.low > 0
    assert found.high / found.value == pytest.approx(found.value / found.low)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_batches_are_powers_of_two_up_to_the_largest(largest: int, sizes: list[int]) -> None:
    assert default_batches(largest) == sizes


@pytest.mark.parametrize(
    ("batches", "streams", "fault"),
    [
        ([1, 65], [1], "doesn't take that batch"),
        ([], [1], "doesn't take that batch"),
        ([1], [0, 2], "no such number of streams"),
    ],
)
def test_what_cannot_be_swept_is_refused(
    engine: Path, data: Path, params: Any, batches: list[int], streams: list[int], fault: str
) -> None:
    with pytest.raises(Fault, match=fault):
        sweep.sweep(engine, data, params(), batches, streams, lambda _: None)


def test_streams_that_do_not_fit_are_skipped_with_the_reason(
    engine: Path, data: Path, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = streams.open_engine, []

    def two(folder: Path) -> Any:
        if len(opened) == 2:
            raise Unavailable("no memory for a third")
        opened.append(real(folder))
        return opened[-1]

    monkeypatch.setattr(streams, "open_engine", two)
    found = sweep.sweep(engine, data, params(), [1], [1, 2, 4], lambda _: None, rounds=2)
    assert {p.streams for p in found.points} == {1, 2}
    assert found.skipped == {"4": "no session 3: no memory for a third"}


def test_a_backend_that_forks_is_opened_once(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import ExitStack

    made = []

    class Forking(Sleeper):
        def fork(self) -> Any:
            made.append("fork")
            return Forking(0)

    monkeypatch.setattr(streams, "open_engine", lambda folder: made.append("open") or Forking(0))
    with ExitStack() as stack:
        assert len(streams.opened(engine, [1, 3], stack)[0]) == 3
    assert made == ["open", "fork", "fork"]


def test_an_interruption_keeps_whole_points(
    engine: Path, data: Path, params: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole, done = sweep._measure, []

    def interrupted(*args: Any) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        whole(*args)

    monkeypatch.setattr(sweep, "_measure", interrupted)
    found = sweep.sweep(engine, data, params(), [1, 2], [1], lambda _: None)
    assert found.interrupted
    assert len(found.points) == 2
    sweep_page.show(found, Console(width=160))
    assert "(interrupted)" in capsys.readouterr().out


def test_the_command_writes_json_and_a_page_and_prints_the_best(
    tree: Any, free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    words = ["tasks", "sweep", "base-ort", "--batches", "2,1", "--streams", "1", "--max-latency-ms", "5000"]
    monkeypatch.setattr(sys, "argv", [*words, "--rounds", "3"])
    with pytest.raises(SystemExit) as exited:
        command.main()
    printed = capsys.readouterr().out
    assert not exited.value.code
    assert "samples a second" in printed
    found = read_json(layout.sweep("base-ort"))
    assert [p["batch"] for p in found["points"]] == [1, 2]
    assert found["max_latency_ms"] == 5000
    text = layout.sweep("base-ort").with_suffix(".html").read_text()
    assert "Sweep of base-ort" in text
    assert "plotly" in text
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["nothing"], "no such engine in params.yaml"),
        (["base-ort", "--batches", "1,x"], "--batches is no list"),
        (["base-ort", "--streams", "0"], "--streams is no list"),
        (["base-ort", "--batches", "1000"], "doesn't take that batch"),
    ],
)
def test_the_command_refuses(
    tree: Any, free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], fault: str
) -> None:
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["tasks", "sweep", *words])
    with pytest.raises(SystemExit) as exited:
        command.main()
    assert exited.value.code == 2
    assert fault in capsys.readouterr().err


def test_the_limit_is_judged_at_a_share_of_the_error_for_each_number_of_streams() -> None:
    rng = np.random.default_rng(0)
    windows = [rng.gamma(4.0, 0.5, sweep.calls_of(5, 1 - 0.05 / 4)) for _ in range(5)]
    cell = sweep.Cell(4, 1, [], windows=windows, rates=[10.0, 11.0])
    alone = sweep._point(cell, BenchmarkParams(max_latency_ms=9.0), 0.95).bounds["p90"]
    limit = alone.high + 1e-9
    assert sweep._point(cell, BenchmarkParams(max_latency_ms=limit), 0.95).within is True
    assert sweep._point(cell, BenchmarkParams(max_latency_ms=limit), 1 - 0.05 / 4).within is None

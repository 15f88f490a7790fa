"""Engine folders compared directly."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tasks import __main__ as command
from tasks import commands, manifest, measure, reopening
from tasks.bench import allowed_for, bench, random_inputs, show
from tasks.errors import Fault
from tasks.files import read_json
from tasks.planted import tiny_engine
from tasks.settings import BenchmarkParams
from tasks.target import fingerprint
from tasks.together import Together


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of the same input, one four times as deep, and one of another input."""
    made = {}
    for name, width, layers in (("small", 64, 1), ("deep", 64, 40), ("wide", 128, 1)):
        folder = tmp_path_factory.mktemp(name)
        made[name] = tiny_engine(folder, width, layers).rename(folder / name)
    return made


@pytest.fixture
def params() -> Any:
    quick = {"openings": 1, "rounds": 8, "max_rounds": 10, "window_ms": 3, "warmup_ms": 10, "max_lost": 1000}
    return lambda **changes: BenchmarkParams.model_validate({**quick, **changes})


def test_the_slower_engine_is_told_and_where_it_was_measured(engines: dict[str, Path], params: Any) -> None:
    report = bench([engines["small"], engines["deep"]], None, params())
    first, second = report.rows
    assert (first.engine, first.ratio) == ("small", None)
    assert second.engine == "deep"
    assert second.ratio is not None
    assert second.ratio.high < 1
    assert second.verdict == "slower" or second.verdict.startswith("unstable")
    assert (report.environment.target_id, report.interrupted, report.data) == (fingerprint().id, False, "random")


def test_a_reference_that_had_not_settled_gives_no_verdict(
    engines: dict[str, Path], params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restless(self: measure.Measurement) -> None:
        warm_up(self)
        self.warm["small"] = False

    warm_up = measure.Measurement.warm_up
    monkeypatch.setattr(measure.Measurement, "warm_up", restless)
    small, deep = bench([engines["small"], engines["deep"]], None, params()).rows
    assert small.verdict == "unstable: its latency did not settle during warm-up"
    assert deep.verdict == "unstable: small: its latency did not settle during warm-up"


def test_one_engine_alone_is_timed(engines: dict[str, Path], params: Any) -> None:
    (row,) = bench([engines["small"]], None, params(batch=4)).rows
    assert ([timing.batch for timing in row.timings], row.ratio) == ([4], None)


def test_the_same_engine_twice_has_two_names(engines: dict[str, Path], params: Any) -> None:
    path = engines["small"].as_posix()
    assert [r.engine for r in bench([engines["small"]] * 2, None, params()).rows] == [f"{path} #1", f"{path} #2"]


def test_engines_of_other_inputs_are_refused(engines: dict[str, Path], params: Any) -> None:
    with pytest.raises(Fault, match="wide and small don't take the same inputs"):
        bench([engines["small"], engines["wide"]], None, params())


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        ({"x": np.zeros((5, 63), np.float32)}, "input x doesn't fit"),
        ({"x": np.zeros((5, 64), np.float64)}, "input x doesn't fit"),
        ({"y": np.zeros((5, 64), np.float32)}, "input x doesn't fit"),
        ({"x": np.zeros((0, 64), np.float32)}, "input x is empty"),
    ],
    ids=["shape", "type", "name", "none"],
)
def test_data_that_does_not_fit_is_refused(
    engines: dict[str, Path], params: Any, tmp_path: Path, arrays: dict[str, np.ndarray], fault: str
) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(Fault, match=fault):
        bench([engines["small"]], tmp_path / "own.npz", params())


def test_data_that_is_not_there_and_batches_that_are_too_large_are_refused(
    engines: dict[str, Path], params: Any, tmp_path: Path
) -> None:
    with pytest.raises(Fault, match=r"no data file .*none\.npz"):
        bench([engines["small"]], tmp_path / "none.npz", params())
    with pytest.raises(Fault, match="small doesn't take that batch"):
        bench([engines["small"]], None, params(batch=65))


def test_an_interruption_keeps_what_was_measured(
    engines: dict[str, Path], params: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole = measure.Measurement.round

    def interrupted(self: measure.Measurement) -> None:
        if len(self.rounds) == 3:
            raise KeyboardInterrupt
        whole(self)

    monkeypatch.setattr(measure.Measurement, "round", interrupted)
    report = bench([engines["small"], engines["deep"]], None, params())
    assert report.interrupted
    assert [[len(timing.medians) for timing in row.timings] for row in report.rows] == [[3], [3]]
    assert report.rows[1].verdict.startswith("unstable: 3 rounds can't give an interval")
    show(report, Console(width=160))
    assert "interrupted" in capsys.readouterr().out


def test_random_inputs_have_the_engines_types_and_lengths(artifact: Any) -> None:
    described = manifest.read(artifact("base-ort"))
    drawn = random_inputs(described, None, n=5)
    for spec in described.inputs:
        assert drawn[spec.name].dtype.name == spec.dtype
        assert drawn[spec.name].shape[0] == 5
    text = manifest.TensorSpec("ids", "int64", (None, "length"))
    drawn = random_inputs(manifest.Manifest(**{**vars(described), "inputs": (text,), "axes": {"length": 9}}), None)
    assert drawn["ids"].shape == (64, 9)
    assert set(np.unique(drawn["ids"])) == {0, 1}


def test_the_command_prints_a_table_and_writes_json(
    engines: dict[str, Path], tmp_path: Path, free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Quick(BenchmarkParams):
        rounds: int = 8
        max_rounds: int = 8
        window_ms: float = 3
        warmup_ms: float = 10
        max_lost: float = 1000

    monkeypatch.setattr(commands, "BenchmarkParams", Quick)
    out = tmp_path / "bench.json"
    folders = [str(engines["small"]), str(engines["deep"])]
    asked = ["--budget-s", "0.5", "--openings", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["tasks", "bench", *folders, *asked])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exited:
        command.main()
    printed = capsys.readouterr().out
    assert not exited.value.code
    assert all(word in printed for word in ("p99 ms", "small", "deep", fingerprint().id))
    assert [row["engine"] for row in read_json(out)["rows"]] == ["small", "deep"]


def test_the_command_refuses_another_clock(
    engines: dict[str, Path], free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["tasks", "bench", str(engines["small"]), "--clock", "wall"])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exited:
        command.main()
    assert exited.value.code == 2
    assert "host or device" in capsys.readouterr().err


def test_openings_are_allowed_for_as_far_as_assumed(engines: dict[str, Path], params: Any, capsys: Any) -> None:
    both = [engines["small"], engines["small"]]
    narrow, wide = (bench(both, None, params(), reopen_sd) for reopen_sd in (None, 0.2))
    assert (narrow.reopen_sd, wide.reopen_sd) == (0.007, 0.2)
    assert wide.rows[1].verdict == "not told apart"
    assert wide.rows[1].ratio.high > 1.3 * wide.rows[1].ratio.value
    show(wide, Console(width=160))
    assert "openings that differ by 20.0% (--reopen-sd)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("device", "asked", "allowed"), [("cpu", None, 0.007), ("cuda", None, 0.034), ("cuda", 0.0, 0.0)]
)
def test_more_is_allowed_for_openings_on_a_gpu(
    engines: dict[str, Path], params: Any, device: str, asked: float | None, allowed: float
) -> None:
    described = replace(manifest.read(engines["small"], trusted=False), device=device)
    assert allowed_for([manifest.read(engines["deep"], trusted=False), described], params(), asked) == allowed


@pytest.fixture
def artifacts(artifact: Any) -> list[Path]:
    """Engines that another process opens, too: their backend and signature are of the line."""
    return [artifact("base-eager"), artifact("base-ort")]


def test_engines_are_opened_anew_in_processes_of_their_own(
    artifacts: list[Path], params: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[reopening.Plan] = []
    monkeypatch.setattr(reopening, "_apart", lambda plan, whole=reopening._apart: told.append(plan) or whole(plan))
    monkeypatch.setattr(reopening, "opened", lambda plan: pytest.fail("opened here"))
    report = bench(artifacts, None, params(openings=2))
    assert [plan.turned for plan in told] == [True]
    assert (report.broken, [len(row.timings) for row in report.rows]) == (None, [2, 2])
    first, second = report.rows
    assert len({timing.medians for timing in first.timings}) == 2
    openings = [{"first": a, "other": b} for a, b in zip(first.timings, second.timings, strict=True)]
    assert second.ratio == Together(openings, 0.95, 0.007).gain("other", "first")
    assert report.environment.conditions is not None
    show(report, Console(width=160))
    printed = " ".join(capsys.readouterr().out.split())
    assert "engines were opened 2×" in printed and "or scatter by more in these" in printed


@pytest.mark.parametrize(
    ("ending", "broken"),
    [(KeyboardInterrupt(), None), (Fault("it died", got="status 9", expected="0", do="look"), "it died")],
)
def test_what_ends_a_later_opening_drops_it_and_keeps_the_others(
    engines: dict[str, Path],
    params: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    ending: BaseException,
    broken: str | None,
) -> None:
    def apart(plan: reopening.Plan) -> reopening.Opened:
        if plan.turned:
            return reopening.opened(plan)
        raise ending

    monkeypatch.setattr(reopening, "_apart", apart)
    report = bench([engines["small"], engines["deep"]], None, params(openings=3))
    assert [len(row.timings) for row in report.rows] == [2, 2]
    assert report.interrupted == (broken is None)
    show(report, Console(width=160))
    printed = capsys.readouterr().out
    assert ("a later opening failed" in printed) == bool(broken)
    assert (broken or "interrupted") in printed


def test_what_is_wrong_with_the_first_opening_is_raised(
    engines: dict[str, Path], params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Measurement, "round", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench([engines["small"]], None, params())
    with pytest.raises(Fault, match="device needs engines that run on a GPU"):
        bench([engines["small"]], None, params(clock="device"))

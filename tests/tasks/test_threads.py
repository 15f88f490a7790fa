"""The number of threads by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks import fit, threads
from tasks.settings import FitParams


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def splits(tiny: Any) -> Any:
    arrays, _ = tiny.samples(1)
    return {k: v[:100] for k, v in arrays.items()}, {k: v[100:140] for k, v in arrays.items()}


@pytest.fixture
def model(tiny: Any) -> nn.Module:
    torch.manual_seed(0)
    return tiny.model(width=4)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
        ({1: 1.0, 2: 0.96, 4: 0.97}, 1),
        ({1: 1.0, 2: 5.0, 4: 0.9}, 4),
        ({1: 1.0, 2: 0.6, 3: 0.59}, 2),
        ({1: 1.0}, 1),
    ],
)
def test_the_fastest_is_taken_and_a_larger_one_only_if_it_is_worth_it(seconds: dict[int, float], best: int) -> None:
    assert threads.pick(seconds) == best


def test_counts_are_measured_in_turn_and_the_line_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, order = [0.0], []

    def work() -> None:
        order.append(torch.get_num_threads())
        clock[0] += {1: 0.030, 2: 0.010, 3: 0.020}[order[-1]] + (0.5 if len(order) == 5 else 0)

    monkeypatch.setattr("tasks.threads.time.perf_counter", lambda: clock[0])
    assert threads.choose(work, (1, 2, 3)) == 2 == torch.get_num_threads()
    assert order == [1, 2, 3] * (threads.ROUNDS + 1)
    assert "2 threads" in (told := capsys.readouterr().out) and "1: 30.0 ms, 2: 10.0 ms, 3: 20.0 ms" in told


def test_counts_go_up_to_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 3)
    seen = set()
    threads.choose(lambda: seen.add(torch.get_num_threads()))
    assert seen == {1, 2, 3}


def test_slow_work_is_measured_once_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LIMIT_S", 0.0)
    calls: list[int] = []
    threads.choose(lambda: calls.append(torch.get_num_threads()), (1, 2))
    assert calls == [1, 2]


def test_measuring_leaves_the_training_as_it_is(tiny: Any, splits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    monkeypatch.setattr(threads, "pick", lambda seconds: 1)
    monkeypatch.setattr(threads, "ROUNDS", 1)
    for asked in (1, "auto"):
        torch.manual_seed(0)
        model = tiny.model(width=4)
        params = FitParams(epochs=2, batch=50, threads=asked)
        curve = fit.fit(model, tiny, *splits, params, fit.task_loss(tiny))
        assert {e.threads for e in curve} == {1} == {torch.get_num_threads()}
        states.append((model.state_dict(), [e.loss for e in curve]))
    assert states[0][1] == states[1][1]
    assert all(torch.equal(states[0][0][k], states[1][0][k]) for k in states[0][0])


def test_a_resumed_training_keeps_the_count_it_began_with(
    tiny: Any, model: nn.Module, splits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, file = FitParams(epochs=2, batch=100, threads="auto"), tmp_path / "base.pt"
    monkeypatch.setattr(threads, "pick", lambda seconds: 2)
    monkeypatch.setattr(threads, "ROUNDS", 1)
    fit.fit(model, tiny, *splits, params, fit.task_loss(tiny), resume=file)
    monkeypatch.setattr(threads, "pick", lambda seconds: 1)
    torch.manual_seed(0)
    curve = fit.fit(tiny.model(width=4), tiny, *splits, params, fit.task_loss(tiny), resume=file)
    assert {e.threads for e in curve} == {2} == {torch.get_num_threads()}


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many", "1.5", None])
def test_a_count_is_a_whole_number_or_auto(value: object) -> None:
    with pytest.raises(ValueError, match="a whole number"):
        FitParams(threads=value)
    assert FitParams(threads="auto").threads == "auto" and FitParams(threads="3").threads == 3

"""Ours and another timer's of the same calls: their order, and what their ratio's interval says."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tasks import beside
from tasks.beside import NO, OPEN, YES
from tasks.stats import Interval


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.98, 1.02, YES),
        (0.97, 1.03, YES),
        (0.999, 1.031, OPEN),
        (0.9, 1.1, OPEN),
        (0.96, 0.99, OPEN),
        (1.04, 1.05, NO),
        (0.9, 0.969, NO),
    ],
)
def test_the_whole_interval_is_judged(low: float, high: float, told: str) -> None:
    assert beside._within(Interval((low + high) / 2, low, high)) == told


def test_a_row_is_judged_by_the_interval_of_its_rounds() -> None:
    near, scattered, far = (
        beside._beside("timer", "", [(1.0, by * (1 + off)) for off in spread], 0)
        for by, spread in ((1.01, (-1e-3, 1e-3) * 10), (1.0, (-0.2, 0.2) * 10), (1.2, (-1e-3, 1e-3) * 10))
    )
    assert (near.within, scattered.within, far.within) == (YES, OPEN, NO)


@pytest.mark.parametrize("ours_first", [True, False])
def test_ours_come_first_or_last_as_asked_and_are_told_first(ours_first: bool) -> None:
    called: list[str] = []
    pair = beside._in_order(lambda: called.append("ours") or 1.0, lambda: called.append("theirs") or 2.0, ours_first)
    assert pair == (1.0, 2.0)
    assert called == (["ours", "theirs"] if ours_first else ["theirs", "ours"])


def test_the_order_within_a_round_is_drawn_for_each_timer() -> None:
    drawn: dict[str, list[bool]] = {"a": [], "b": []}

    def timer(name: str) -> Any:
        return lambda batches, ours_first: drawn[name].append(ours_first) or (1.0, 1.0)

    beside._rounds({name: ("", timer(name)) for name in drawn}, [{}], 0.0)
    assert drawn["a"] != drawn["b"]
    for found in drawn.values():
        assert len(found) >= beside.MIN_ROUNDS and {True, False} == set(found)


class Session:
    """Says in which order it is called; `bare` lends a call."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def run(self, batch: Any) -> Any:
        self.called.append("run")
        return {}

    def synchronize(self) -> None:
        pass

    def bare(self, batch: Any) -> Any:
        return contextlib.nullcontext(lambda: self.called.append("bare"))


def test_bare_calls_keep_to_the_order() -> None:
    for ours_first in (True, False):
        session = Session()
        ours, theirs = beside._bare(session)([{}, {}], ours_first)  # type: ignore[arg-type]
        assert session.called == (["run"] * 2 + ["bare"] * 2 if ours_first else ["bare"] * 2 + ["run"] * 2)
        assert ours > 0 and theirs > 0

"""A measurement judged twice from the same rounds: as a benchmark does, and by its rounds alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.measure import Measurement
from tasks.planted import Slowed
from tasks.settings import BenchmarkParams
from tasks.trials import Bed, Trials, judged

PARAMS = BenchmarkParams()
LOOKS = tuple(range(20, 61, 5))


def rounds(shift: float, noise: float, seed: int = 0, n: int = 60) -> tuple[list[float], list[float]]:
    """Paired medians [n], the first ones longer by `shift`."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(0, noise, (2, n)))
    return list((1 + shift) * drawn[0]), list(drawn[1])


def test_openings_that_differ_are_a_verdict_of_the_rounds_alone() -> None:
    pair = rounds(shift=0.005, noise=0.001)
    padded, alone = (judged(*pair, LOOKS, 60, PARAMS, sd) for sd in (0.007, 0.0))
    assert (padded.clear, padded.rounds) == (False, 60)
    assert (alone.clear, alone.rounds) == (True, 20)
    assert alone.ratio.low > 1
    assert padded.ratio.value == pytest.approx(1.005, abs=0.001)


def test_a_clear_answer_that_is_too_wide_does_not_end_the_rounds() -> None:
    pair = rounds(shift=0.5, noise=0.1)
    wide = judged(*pair, LOOKS, 60, PARAMS.model_copy(update={"max_width": 0.01}), 0.0)
    assert (wide.clear, wide.rounds) == (True, 60)


def test_too_few_rounds_are_no_verdict() -> None:
    found = judged(*rounds(shift=0.5, noise=0.001, n=4), (4,), 60, PARAMS, 0.0)
    assert (found.clear, found.rounds) == (False, 4)


def test_equal_openings_give_a_verdict_by_rounds_alone_as_seldom_as_they_say() -> None:
    """Every look counts, as for one that stops there."""
    found = [judged(*rounds(0.0, 0.01, seed), LOOKS, 60, PARAMS, 0.0).clear for seed in range(400)]
    assert 4 <= sum(found) <= 33  # 20, and three standard deviations of a binomial law.


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


QUICK = BenchmarkParams(rounds=8, max_rounds=8, window_ms=3, warmup_ms=5, max_lost=1000, clock="device")


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_difference_planted_on_the_device_is_found_by_its_clock(on_device: Any, share: float) -> None:
    tried = Trials(share, 3, QUICK, 60.0)
    tried.run(Bed(Path(), lambda: on_device(0.1), [{}], True), lambda _: None)
    tally = tried.tally()
    assert tally is not None
    assert (tally.trials, tally.verdicts) == (3, 3)
    assert tally.ratio == pytest.approx(1 + share, rel=1e-3)


def test_both_judgements_are_of_the_same_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a trial is what its measurement says, and what it would without `reopen_sd`."""
    told: list[dict[str, Any]] = []
    whole = Measurement.timings
    monkeypatch.setattr(Measurement, "timings", lambda self: told.append(whole(self)) or told[-1])
    shares, params = iter([0.0, 0.3] * 3), QUICK.model_copy(update={"clock": "host", "reopen_sd": 0.9})
    tried = Trials(0.0, 3, params, 60.0)
    tried.run(Bed(Path(), lambda: Slowed(Host(), next(shares)), [{}], True), lambda _: None)  # type: ignore[arg-type]
    both, alone = tried.tally(), tried.tally_alone()
    assert both is not None and alone is not None
    assert both.trials == alone.trials == len(told) == 3
    assert both.verdicts == 0
    pairs = [(t["slowed"].medians, t["plain"].medians, t["plain"].looks, t["plain"].horizon) for t in told]
    assert tried.alone == [judged(*pair, params, 0.0) for pair in pairs]
    assert alone.verdicts == sum(found.clear for found in tried.alone)


class Host:
    inputs = outputs = ()
    device = "cpu"

    def run(self, batch: Any) -> Any:
        busy(1e-4)
        return {}

    def synchronize(self) -> None:
        pass

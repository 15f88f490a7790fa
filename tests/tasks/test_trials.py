"""A measurement judged twice from the same rounds: as a benchmark does, and by its rounds alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.measure import Measurement
from tasks.planted import Slowed
from tasks.reopening import Timings
from tasks.settings import BenchmarkParams
from tasks.timing import Opening, Timing, over
from tasks.trials import Bed, Trials, by_rounds, judged

PARAMS = BenchmarkParams(openings=1)
LOOKS = tuple(range(20, 61, 5))


def rounds(shift: float, noise: float, seed: int = 0, n: int = 60) -> tuple[list[float], list[float]]:
    """Paired medians [n], the first ones longer by `shift`."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(0, noise, (2, n)))
    return list((1 + shift) * drawn[0]), list(drawn[1])


def opened(pair: tuple[list[float], list[float]], looks: tuple[int, ...] = LOOKS) -> Timings:
    """What one opening of both gave."""
    slow, fast = (
        Timing(1, "host", None, None, None, 1.0, len(ms), 1.0, True, tuple(ms), looks, 60, PARAMS.reopen_sd)
        for ms in pair
    )
    return {"slowed": slow, "plain": fast}


def test_openings_that_differ_are_a_verdict_of_the_rounds_alone() -> None:
    told = opened(rounds(shift=0.005, noise=0.001))
    padded, alone = judged([told], PARAMS), by_rounds(told, PARAMS)
    assert (padded.clear, padded.rounds) == (False, 60)
    assert (alone.clear, alone.rounds) == (True, 20)
    assert alone.ratio.low > 1
    assert padded.ratio.value == pytest.approx(1.005, abs=0.001)


def test_openings_that_scatter_are_no_verdict_however_sure_each_is() -> None:
    """Each opening alone is a verdict, and so would their mean be by what is assumed."""
    told = [opened(rounds(shift, 0.001, seed=n)) for n, shift in enumerate((0.02, 0.06, 0.1))]
    assert all(judged([one], PARAMS).clear for one in told)
    assert over([Opening.of(one, "plain", "slowed") for one in told], 0.95, 1, PARAMS.reopen_sd).low > 1
    assert not judged(told, PARAMS).clear
    assert judged(told, PARAMS).rounds == 180
    assert judged([told[1]] * 3, PARAMS).clear


def test_a_clear_answer_that_is_too_wide_does_not_end_the_rounds() -> None:
    told = opened(rounds(shift=0.5, noise=0.1))
    wide = by_rounds(told, PARAMS.model_copy(update={"max_width": 0.01}))
    assert (wide.clear, wide.rounds) == (True, 60)


def test_too_few_rounds_are_no_verdict() -> None:
    told = opened(rounds(shift=0.5, noise=0.001, n=4), (4,))
    for found in (by_rounds(told, PARAMS), judged([told], PARAMS)):
        assert (found.clear, found.rounds) == (False, 4)


def test_equal_openings_give_a_verdict_by_rounds_alone_as_seldom_as_they_say() -> None:
    """Every look counts, as for one that stops there."""
    found = [by_rounds(opened(rounds(0.0, 0.01, seed)), PARAMS).clear for seed in range(400)]
    assert 4 <= sum(found) <= 33  # 20, and three standard deviations of a binomial law.


def test_equal_engines_whose_openings_scatter_give_a_verdict_as_seldom_as_it_says() -> None:
    """Ten times as far as is assumed: three openings show that, one can't."""
    rng = np.random.default_rng(0)
    trials = [[opened(rounds(rng.normal(0, 0.05), 0.01, 1000 * t + n)) for n in range(3)] for t in range(200)]
    assert sum(judged(trial, PARAMS).clear for trial in trials) <= 19  # 10, and three standard deviations.
    assert sum(judged(trial[:1], PARAMS).clear for trial in trials) > 60


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


QUICK = BenchmarkParams(openings=1, rounds=8, max_rounds=8, window_ms=3, warmup_ms=5, max_lost=1000, clock="device")


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_difference_planted_on_the_device_is_found_by_its_clock(on_device: Any, share: float) -> None:
    tried = Trials(share, 3, QUICK, 60.0)
    tried.run(Bed(Path(), lambda: on_device(0.1), [{}], True), lambda _: None)
    tally = tried.tally()
    assert tally is not None
    assert (tally.trials, tally.verdicts) == (3, 3)
    assert tally.ratio == pytest.approx(1 + share, rel=1e-3)


def test_both_judgements_are_of_the_same_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a trial is what its measurements say, and what each of them would by its rounds."""
    told: list[Timings] = []
    whole = Measurement.timings
    monkeypatch.setattr(Measurement, "timings", lambda self: told.append(whole(self)) or told[-1])
    shares, params = iter([0.0, 0.3] * 6), QUICK.model_copy(update={"clock": "host", "reopen_sd": 0.9, "openings": 2})
    tried = Trials(0.0, 3, params, 60.0)
    tried.run(Bed(Path(), lambda: Slowed(Host(), next(shares)), [{}], True), lambda _: None)  # type: ignore[arg-type]
    both, alone = tried.tally(), tried.tally_alone()
    assert both is not None and alone is not None
    assert (both.trials, both.groups, alone.trials, len(told)) == (3, 3, 6, 6)
    assert both.verdicts == 0
    assert alone.verdicts == sum(by_rounds(timings, params).clear for timings in told)
    assert both.rounds == pytest.approx(2 * np.mean([len(t["plain"].medians) for t in told]))
    # Which of the two is opened first, changes from one pair to the next.
    ratios = [Opening.of(t, "plain", "slowed").plain().speedup(0.95).value for t in told]
    assert [ratio > 1 for ratio in ratios] == [True, False, False, True, True, False]


class Host:
    inputs = outputs = ()
    device = "cpu"

    def run(self, batch: Any) -> Any:
        busy(1e-4)
        return {}

    def synchronize(self) -> None:
        pass

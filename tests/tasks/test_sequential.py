"""Optional stopping and many engines, against simulated measurements and published bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom, norm

from tasks.sequential import clear, confidence_at, speedup, spent, too_few
from tasks.stats import _signed_rank_cut

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
NOISE: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(0, 0.03, shape),
    "heavy tails": lambda rng, shape: 0.02 * rng.standard_t(2, shape),
    "skewed times": lambda rng, shape: np.log(rng.gamma(4, size=shape) / rng.gamma(4, size=shape)),
}


def at_most(share: float, trials: int) -> float:
    """The largest share of simulated trials that is no sign of a true share above `share`, at 99 %."""
    return float(binom.ppf(0.99, trials, share)) / trials


Rule = Callable[[tuple[int, ...]], float]


def repeated(horizon: int, family: int = 1) -> Rule:
    """How sure the interval after some looks has to be, by ours."""
    return lambda looks: confidence_at(looks, horizon, 0.95, family)


def naive(looks: tuple[int, ...]) -> float:
    return 0.95


def decided(logs: np.ndarray, looks: tuple[int, ...], *rules: Rule) -> list[np.ndarray]:
    """By each rule: which measurements [trials, rounds] of no difference give a verdict, at the first clear look.

    By the signed ranks, all trials at once: what `speedup` and `clear` say, as a test below holds.
    """
    found = [np.zeros(len(logs), bool) for _ in rules]
    for k, n in enumerate(looks):
        ranks = np.abs(logs[:, :n]).argsort(axis=1).argsort(axis=1) + 1
        above = (ranks * (logs[:, :n] > 0)).sum(axis=1)
        least = np.minimum(above, n * (n + 1) // 2 - above)
        for verdicts, rule in zip(found, rules, strict=True):
            sure = rule(looks[: k + 1])
            if not too_few(n, sure):
                verdicts |= least <= _signed_rank_cut(n, 1 - sure)
    return found


@pytest.mark.parametrize("noise", NOISE)
def test_false_verdicts_stay_below_one_in_twenty_however_it_is_stopped(noise: str) -> None:
    looks = tuple(range(20, 61, 5))
    logs = NOISE[noise](np.random.default_rng(5), (20_000, 60))
    ours, plain = decided(logs, looks, repeated(60), naive)
    assert ours.mean() <= at_most(0.05, 20_000)
    assert plain.mean() > 0.1


@pytest.mark.parametrize("first", [8, 20])
def test_looking_after_every_round_is_no_way_around(first: int) -> None:
    looks = tuple(range(first, 61))
    logs = NOISE["normal"](np.random.default_rng(6), (2000, 60))
    ours, plain = decided(logs, looks, repeated(60), naive)
    assert ours.mean() <= at_most(0.05, 2000)
    assert plain.mean() > 0.13


def test_one_false_verdict_among_many_engines_stays_below_one_in_twenty() -> None:
    looks, engines = tuple(range(20, 61, 5)), 20
    logs = NOISE["normal"](np.random.default_rng(7), (1000 * engines, 60))
    together, alone = decided(logs, looks, repeated(60, engines), repeated(60))
    assert together.reshape(1000, engines).any(axis=1).mean() <= at_most(0.05, 1000)
    assert alone.reshape(1000, engines).any(axis=1).mean() > 0.4


@pytest.mark.parametrize("n", [12, 20, 35])
def test_the_simulated_verdicts_are_those_of_the_interval(n: int) -> None:
    logs = np.random.default_rng(n).normal(0.015, 0.03, (60, n))
    sure = confidence_at((n,), 60, 0.95)
    said = [clear(speedup(tuple(np.exp(x)), (1.0,) * n, (n,), 60, 0.95), n, sure) for x in logs]
    ranks = np.abs(logs).argsort(axis=1).argsort(axis=1) + 1
    above = (ranks * (logs > 0)).sum(axis=1)
    expected = np.minimum(above, n * (n + 1) // 2 - above) <= _signed_rank_cut(n, 1 - sure)
    assert said == (expected & (too_few(n, sure) is None)).tolist()
    assert 0 < sum(said) < 60


def test_the_interval_holds_the_truth_where_it_stopped() -> None:
    rng, looks, trials, covered = np.random.default_rng(8), (12, 22, 32, 42), 300, 0
    for _ in range(trials):
        slow = np.exp(0.02 + rng.normal(0, 0.03, 42))
        for k, n in enumerate(looks):
            got = speedup(tuple(slow[:n]), (1.0,) * n, looks[: k + 1], 42, 0.95)
            if clear(got, n, confidence_at(looks[: k + 1], 42, 0.95)):
                break
        covered += got.low <= np.exp(0.02) <= got.high
    assert covered / trials >= 0.95


def test_bounds_are_those_of_lan_and_demets_for_five_equal_looks() -> None:
    """Proschan, Lan and Wittes 2006, Statistical Monitoring of Clinical Trials: Pocock-like spending of 5 %."""
    bounds = [norm.ppf((1 + confidence_at(range(1, k + 1), 5, 0.95)) / 2) for k in range(1, 6)]
    assert bounds == pytest.approx([2.438, 2.427, 2.410, 2.397, 2.386], abs=1e-3)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_one_look_at_the_end_needs_no_more_than_was_asked(confidence: float) -> None:
    assert confidence_at((30,), 30, confidence) == pytest.approx(confidence)
    assert confidence_at((30,), 0, confidence) == pytest.approx(confidence)


def test_more_engines_and_more_looks_ask_for_more() -> None:
    assert confidence_at((60,), 60, 0.95, 20) == pytest.approx(1 - 0.05 / 20)
    assert confidence_at((20, 40, 60), 60, 0.95) > 0.95
    assert confidence_at((20,), 60, 0.95) == pytest.approx(1 - spent(1 / 3, 0.05))


def test_all_that_may_be_spent_is_spent_at_the_end() -> None:
    assert [spent(share, 0.05) for share in (0, 1, 2)] == pytest.approx([0, 0.05, 0.05])


@pytest.mark.parametrize("looks", [(), (0, 5), (10, 10), (20, 10)])
def test_looks_that_cannot_be_are_refused(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rising"):
        confidence_at(looks, 60, 0.95)


def test_too_few_rounds_decide_nothing_however_they_agree() -> None:
    slow, fast = (2.0,) * 8, (1.0,) * 8
    assert clear(speedup(slow, fast, (8,), 8, 0.95), 8, 0.95)
    sure = confidence_at((8,), 8, 0.95, 20)
    assert not clear(speedup(slow, fast, (8,), 8, 0.95, 20), 8, sure)
    assert too_few(8, sure) == "8 rounds can't give an interval of confidence 99.750%, 10 can: raise benchmark.rounds"
    assert too_few(10, sure) is None

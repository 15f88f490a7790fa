"""Intervals against slow, obvious references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm, t

from tasks import stats
from tasks.errors import Fault
from tasks.stats import PERCENTILE_CONFIDENCE, Interval, mean_score, needed, paired_change, percentile, quotient, ratio


def binary(ones: int, n: int) -> np.ndarray:
    return np.repeat([1.0, 0.0], [ones, n - ones])


def score_limits(ones: int, n: int, confidence: float) -> tuple[float, float]:
    """Wilson's limits: where |p̂ - p| is z standard errors at p, solved numerically."""
    z, share = norm.ppf((1 + confidence) / 2), ones / n

    def excess(p: float) -> float:
        return (share - p) ** 2 - z**2 * p * (1 - p) / n

    low = 0.0 if ones == 0 else brentq(excess, 1e-12, share - 1e-12 if ones < n else 1 - 1e-9, xtol=1e-14)
    high = 1.0 if ones == n else brentq(excess, share + 1e-12 if ones else 1e-9, 1 - 1e-12, xtol=1e-14)
    return low, high


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("ones", "n"), [(0, 20), (1, 20), (37, 50), (490, 500), (20, 20)])
def test_accuracy_interval_is_wilsons(ones: int, n: int, confidence: float) -> None:
    got, (low, high) = mean_score(binary(ones, n), confidence), score_limits(ones, n, confidence)
    assert got.value == pytest.approx(ones / n)
    assert (got.low, got.high) == pytest.approx((low, high), abs=1e-8)


def test_interval_of_scores_that_are_not_binary_is_students_with_a_0_and_a_1_added() -> None:
    more = np.array([0.2, 0.5, 0.9, 0.4, 0, 1])
    low, high = t.interval(0.9, 5, more.mean(), more.std(ddof=1) / 6**0.5)
    got = mean_score(more[:4], 0.9)
    assert (got.value, got.low, got.high) == pytest.approx((0.5, low, high))


def test_paired_change_counts_gains_and_losses() -> None:
    baseline, scores = np.array([1, 1, 1, 0, 0, 1.0]), np.array([1, 0, 0, 1, 0, 1.0])
    got = paired_change(scores, baseline, 0.95)
    assert got.value == pytest.approx(-1 / 6)
    assert got.low < -1 / 6 < got.high


def test_paired_change_adds_half_to_each_cell_of_the_table() -> None:
    gained, lost, same = 3.5, 9.5, 88.0
    n = gained + lost + same
    center = (gained - lost) / n
    error = np.sqrt((gained + lost) / n - center**2) / np.sqrt(n)
    z = norm.ppf(0.975)
    baseline = np.concatenate([np.zeros(3), np.ones(9), np.ones(87)])
    scores = np.concatenate([np.ones(3), np.zeros(9), np.ones(87)])
    got = paired_change(scores, baseline, 0.95)
    assert (got.low, got.high) == pytest.approx((center - z * error, center + z * error))


def test_paired_change_of_equal_scores_is_not_certain() -> None:
    got = paired_change(binary(90, 100), binary(90, 100), 0.95)
    assert got.value == 0
    assert got.low < 0 < got.high


@pytest.mark.parametrize(("gain", "loss", "n"), [(0.02, 0.04, 200), (0.01, 0.01, 100), (0.1, 0.2, 150)])
def test_paired_change_covers_the_truth(gain: float, loss: float, n: int) -> None:
    rng, trials, covered = np.random.default_rng(0), 2000, 0
    for _ in range(trials):
        change = rng.choice([1, -1, 0], n, p=[gain, loss, 1 - gain - loss])
        baseline = np.where(change == 1, 0.0, 1.0)
        got = paired_change(baseline + change, baseline, 0.95)
        covered += got.low <= gain - loss <= got.high
    assert covered / trials >= 0.94


def test_paired_change_of_scores_that_are_not_binary_adds_the_same_and_is_students() -> None:
    a, b = np.array([0.5, 0.7, 0.9]), np.array([0.4, 0.7, 0.6])
    d, weights = np.array([0.1, 0.0, 0.3, 1.0, -1.0, 0.0]), np.array([1, 1, 1, 0.5, 0.5, 1])
    center = np.average(d, weights=weights)
    error = np.sqrt(np.average((d - center) ** 2, weights=weights) / 5)
    half = t.ppf(0.975, 2) * error
    got = paired_change(a, b, 0.95)
    assert (got.low, got.high) == pytest.approx((center - half, center + half))


def test_a_change_of_a_single_sample_has_no_interval_unless_it_is_right_or_wrong() -> None:
    with pytest.raises(Fault, match=r"1 sample\n.*at least 2"):
        paired_change(np.array([0.9]), np.array([0.8]), 0.95)
    got = paired_change(np.ones(1), np.ones(1), 0.95)
    assert got.low < -0.5 < 0.5 < got.high


def test_paired_change_of_different_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="paired"):
        paired_change(np.ones(3), np.ones(4), 0.95)


def not_refused(logs: np.ndarray, at: float, alpha: float) -> bool:
    """Wilcoxon's exact two-sided test of the centre `at`, by all sign patterns of the ranks."""
    differences = logs - at
    ranks = np.abs(differences).argsort().argsort() + 1
    seen = ranks[differences > 0].sum()
    signs = np.array(list(itertools.product([0, 1], repeat=len(logs))))
    sums = signs @ np.arange(1, len(logs) + 1)
    return (sums <= seen).mean() > alpha / 2 and (sums >= seen).mean() > alpha / 2


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("n", [6, 8, 9, 11])
def test_ratio_interval_is_what_the_signed_rank_test_does_not_refuse(n: int, confidence: float) -> None:
    logs = np.random.default_rng(n).normal(0.2, 0.5, n)
    got = ratio(np.exp(logs), np.ones(n), confidence)
    for limit, outside in ((np.log(got.low), -1e-9), (np.log(got.high), 1e-9)):
        assert not_refused(logs, limit - outside, 1 - confidence)
        assert not not_refused(logs, limit + outside, 1 - confidence)


def test_ratio_is_the_median_of_all_pairwise_means() -> None:
    a, b = np.array([2.0, 3.0, 5.0, 4.0]), np.array([1.0, 2.0, 2.0, 4.0])
    logs = np.log(a / b)
    means = [(logs[i] + logs[j]) / 2 for i in range(4) for j in range(i, 4)]
    assert ratio(a, b, 0.8).value == pytest.approx(np.exp(np.median(means)))


def test_ratio_covers_the_truth_with_shared_disturbances() -> None:
    rng, trials, covered = np.random.default_rng(1), 1500, 0
    for _ in range(trials):
        common = rng.lognormal(0, 0.3, 12)
        a, b = 2 * common * rng.lognormal(0, 0.05, 12), common * rng.lognormal(0, 0.05, 12)
        got = ratio(a, b, 0.95)
        covered += got.low <= 2 <= got.high
    assert 0.94 <= covered / trials <= 0.975


def test_two_disturbed_rounds_do_not_move_the_ratio() -> None:
    a, b = np.full(20, 2.0), np.ones(20)
    b[3], b[11] = 50.0, 80.0
    got = ratio(a, b, 0.95)
    assert (got.value, got.high) == pytest.approx((2, 2))
    assert got.low > 0.25


def test_too_few_rounds_give_the_whole_range() -> None:
    got = ratio(np.array([1.0, 2.0, 4.0]), np.ones(3), 0.99)
    assert (got.low, got.high) == pytest.approx((1, 4))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [[1.0, np.nan], [1.0, 0.0], [1.0, np.inf], [1.0]])
def test_unusable_measurements_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="measurements"):
        ratio(np.array(bad), np.ones(len(bad)), 0.95)


def test_quotient_spreads_as_independent_log_errors() -> None:
    rng = np.random.default_rng(2)
    z, sa, sb = norm.ppf(0.975), 0.04, 0.07
    a = Interval(3.0, 3.0 * np.exp(-z * sa), 3.0 * np.exp(z * sa))
    b = Interval(1.5, 1.5 * np.exp(-z * sb), 1.5 * np.exp(z * sb))
    drawn = 3 * rng.lognormal(0, sa, 400_000) / (1.5 * rng.lognormal(0, sb, 400_000))
    got = quotient(a, b)
    assert got.value == 2
    assert (got.low, got.high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), rel=5e-3)


@pytest.mark.parametrize(("q", "enough"), [(50, 11), (90, 64), (99, 662)])
def test_a_percentile_needs_as_many_samples_as_mlperfs_early_stopping(q: float, enough: int) -> None:
    samples = np.arange(enough, dtype=float)
    assert needed(q) == enough
    assert percentile(samples, q) == pytest.approx(np.percentile(samples, q))
    assert percentile(samples[:-1], q) is None


@pytest.mark.parametrize(("n", "discarded"), [(64, 0), (2048, 172), (2116, 178)])
def test_the_bound_on_a_percentile_is_the_one_of_mlperfs_load_generator(n: int, discarded: int) -> None:
    """Numbers of calls, and of the highest that are passed over, as its published logs hold them for p90."""
    assert binom.cdf(discarded + 1, n, 0.1) <= 1 - PERCENTILE_CONFIDENCE < binom.cdf(discarded + 2, n, 0.1)


def test_the_largest_of_enough_samples_is_above_the_percentile_as_surely_as_said() -> None:
    draws = np.random.default_rng(3).random((20_000, needed(90)))
    second = np.sort(draws, axis=1)[:, -2]
    assert (second >= 0.9).mean() >= 0.985


@pytest.mark.parametrize("scores", [[], [0.5, np.nan, 1.0], [1.0, np.inf]])
def test_scores_that_are_none_or_not_finite_are_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        mean_score(np.array(scores), 0.95)
    with pytest.raises(ValueError, match="finite"):
        paired_change(np.array(scores), np.zeros(len(scores)), 0.95)


def test_an_interval_is_widened_by_what_opening_anew_changes() -> None:
    exact = Interval(1.0, 1.0, 1.0)
    wide = stats.reopened(exact, 0.01, 0.95)
    assert (np.log(wide.low), np.log(wide.high)) == pytest.approx((-0.0196, 0.0196), rel=1e-4)
    skewed = stats.reopened(Interval(2.0, 1.9, 2.4), 0.01, 0.95)
    assert (np.log(2.0 / skewed.low)) ** 2 == pytest.approx(np.log(2 / 1.9) ** 2 + 0.0196**2, rel=1e-3)
    assert stats.reopened(skewed, 0.0, 0.95).low == pytest.approx(skewed.low)


def test_twins_that_differ_from_opening_to_opening_are_told_apart_in_one_of_twenty_at_most() -> None:
    rng = np.random.default_rng(0)
    told = {0.0: 0, 0.005: 0}
    for _ in range(300):
        shift = rng.normal(0, 0.005)
        logs = shift + rng.normal(0, 0.01, 40)
        for sd in told:
            gain = stats.reopened(stats.ratio(np.exp(logs), np.ones(40), 0.95), sd, 0.95)
            told[sd] += gain.low > 1 or gain.high < 1
    assert told[0.0] > 0.4 * 300
    assert told[0.005] <= 0.08 * 300


def test_scores_that_happen_to_be_equal_leave_an_interval() -> None:
    """One sample that is neither 0 nor 1, the same in both, and no difference: that proves no margin."""
    scores = np.r_[0.5, np.ones(99)]
    found = paired_change(scores, scores, 0.95)
    assert found.value == 0 and found.low < -0.015 < 0.015 < found.high
    assert mean_score(np.full(10, 0.5), 0.95).low < 0.4


def test_fractional_scores_miss_the_margin_as_seldom_as_said() -> None:
    """A loss of 1 on 2.1 % of samples, a margin of 2 points: it may pass once in forty times."""
    rng, passed = np.random.default_rng(0), 0
    for _ in range(2000):
        scores = np.r_[0.5, 1.0 - (rng.random(79) < 0.021)]
        passed += paired_change(scores, np.r_[0.5, np.ones(79)], 0.95).low > -0.02
    assert passed / 2000 < 0.025

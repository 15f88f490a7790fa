"""The spread of openings, found again in measurements drawn with a known one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import layout, openings
from tasks.files import read_json
from tasks.openings import spread
from tasks.params import Tree
from tasks.stats import Interval
from tasks.timing import Opening, Timing, over


def drawn(sd: float, noise: float, n: int, shift: float = 0.0, seed: int = 1) -> tuple[list[float], list[float]]:
    """Ratios whose openings differ by `sd` (of the ratio of two), and their rounds by `noise`."""
    rng = np.random.default_rng(seed)
    logs = shift + rng.normal(0, sd, n) + rng.normal(0, noise, n)
    return list(np.exp(logs)), [noise] * n


@pytest.mark.parametrize("sd", [0.007, 0.03])
def test_the_spread_is_found_beside_the_rounds_own_noise(sd: float) -> None:
    found = spread(*drawn(sd, 0.004, 4000))
    assert found is not None
    assert found.sd.value == pytest.approx(sd, rel=0.06)
    assert found.sd.low < sd < found.sd.high
    assert found.noise == pytest.approx(0.004)


def test_its_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(400):
        found = spread(*drawn(0.01, 0.004, 12, seed=seed))
        assert found is not None
        held += found.sd.low <= 0.01 <= found.sd.high
    assert 366 <= held <= 394  # 380, and three standard deviations of a binomial law.


def test_a_few_noisy_trials_hide_nothing() -> None:
    """Seen: of 200 trials some were ten times as noisy, and by plain means of squares openings differed by nothing."""
    rng = np.random.default_rng(3)
    errors = np.where(rng.random(200) < 0.1, 0.05, 0.003)
    logs = rng.normal(0, np.hypot(0.006, 0.5 * errors))  # Half as far off as they say.
    found = spread(list(np.exp(logs)), list(errors))
    assert found is not None
    assert 0.004 < found.sd.value < 0.008
    assert found.noise == pytest.approx(0.003)


def test_openings_that_do_not_differ_have_a_spread_of_zero_in_their_interval() -> None:
    found = spread(*drawn(0.0, 0.004, 100))
    assert found is not None
    assert found.sd.low == 0
    assert found.sd.high < 0.003


def test_a_shift_between_the_first_and_the_second_counts() -> None:
    found = spread(*drawn(0.0, 0.001, 50, shift=0.01))
    assert found is not None
    assert found.sd.value == pytest.approx(0.01, rel=0.1)


def test_rounds_that_all_agree_are_taken_as_very_sure() -> None:
    found = spread([1.0, 1.01, 0.99, 1.0, 1.01], [0.0, 0.01, 0.0, 0.0, 0.01])
    assert found is not None and 0.002 < found.sd.value < 0.05
    same = spread([1.0] * 5, [0.0] * 5)
    assert same is not None and same.sd.value == 0


def test_few_openings_tell_nothing() -> None:
    assert spread([1.0, 1.01, 0.99, 1.0], [0.001] * 4) is None


def test_the_spread_is_of_one_ratio_whatever_the_number_of_openings(tree: Tree) -> None:
    rng = np.random.default_rng(7)
    raw = read_json(layout.report("benchmark", tree.engines[0]))

    def opened(n: int) -> list[Opening]:
        one = openings.of_record({**raw, "again": []})[0]
        flat = replace(one.timing, medians=(1.0,) * 8)
        return [
            Opening(flat, replace(flat, medians=tuple(off * rng.normal(1, 1e-3, 8))))
            for off in np.exp(0.04 * rng.normal(size=n))
        ]

    for n in (2, 3, 5):
        pairs = [
            pair
            for _ in range(400)
            for pair in openings.contrasts([one.plain().speedup(openings.CONFIDENCE) for one in opened(n)])
        ]
        assert len(pairs) == 400 * (n - 1)
        assert np.std(np.log([r for r, _ in pairs])) == pytest.approx(0.04, rel=0.1)


def test_numbers_of_one_opening_are_those_of_its_timing(line: Path) -> None:
    for name in ("base-ort", "slim-kd-ort", "base-eager"):
        raw = read_json(line / layout.report("benchmark", name))
        told = openings.latency(raw)
        assert told == {key: raw["timing"][key] for key in ("p50", "p90", "p99", "n", "batch")}
        assert openings.throughput(raw) == raw["timing"]["throughput_per_s"]


def test_numbers_of_several_openings_are_their_mean_and_their_highest_percentiles(line: Path) -> None:
    raw = read_json(line / layout.report("benchmark", "base-ort"))

    def opened(p50: float, p99: float | None, n: int) -> dict[str, Any]:
        timing = {**raw["timing"], "p50": p50, "p90": 2 * p50, "p99": p99, "n": n, "throughput_per_s": 1 / p50}
        timing["bounds"] = {"p50": {"value": p50, "low": 0.9 * p50, "high": 1.2 * p50}}
        timing["bounds"] |= {"p99": {"value": p99, "low": p99 - 1, "high": p99 + 2}} if p99 else {}
        return {"timing": timing, "baseline": raw["baseline"]}

    record = {**raw, **opened(1.0, 3.0, 900), "again": [opened(4.0, 9.0, 800)]}
    told = openings.latency(record)
    assert told == {"p50": pytest.approx(2.0), "p90": 8.0, "p99": 9.0, "n": 800, "batch": raw["timing"]["batch"]}
    assert openings.throughput(record) == pytest.approx(0.5)
    assert openings.bounds(record) == {"p50": Interval(2.0, 0.9, 4.8), "p99": Interval(9.0, 2.0, 11.0)}
    short = {**record, "again": [opened(4.0, None, 10)]}
    assert openings.latency(short)["p99"] is None and "p99" not in openings.bounds(short)


def test_several_openings_give_their_mean_and_a_narrower_interval(tree: Tree) -> None:
    one = openings.of_record(read_json(layout.report("benchmark", "base-ort")))[0]
    slow, fast = (replace(one.timing, medians=tuple(ms * (1 + 1e-4 * i) for i in range(12))) for ms in (2.0, 1.0))
    pair = Opening(fast, replace(slow, medians=slow.medians))
    same = over([pair] * 4, 0.95, reopen_sd=0.03)
    assert same.value == pytest.approx(2.0)
    assert np.log(same.high / same.low) == pytest.approx(2 * 1.96 * 0.03 / 2, rel=0.01)
    assert over([pair] * 4, 0.95, 9, 0.03).low < same.low
    other = Opening(fast, replace(slow, medians=tuple(1.1 * m for m in slow.medians)))
    assert over([pair, other], 0.95).value == pytest.approx(2 * 1.1**0.5)
    assert over([pair], 0.95, 3, 0.03) == Opening(
        replace(fast, reopen_sd=0.03), replace(pair.baseline, reopen_sd=0.03)
    ).speedup(0.95, 3)


def test_what_openings_scatter_by_widens_an_interval_that_the_rounds_leave_narrow(tree: Tree) -> None:
    one = openings.of_record(read_json(layout.report("benchmark", "base-ort")))[0]
    flat = replace(one.timing, medians=(1.0,) * 8)
    three = [Opening(flat, replace(flat, medians=(2.0,) * 8))] * 3
    found = over(three, 0.95, reopen_sd=0.01, scatter=0.05)
    assert np.log(found.high / found.low) == pytest.approx(2 * 1.96 * 0.05 / 3**0.5, rel=0.01)
    assert over(three, 0.95, reopen_sd=0.05, scatter=0.01) == over(three, 0.95, reopen_sd=0.05)
    assert over(three[:1], 0.95, reopen_sd=0.01, scatter=0.05) == over(three[:1], 0.95, reopen_sd=0.05)


@pytest.mark.parametrize("shift", [0.0, 0.0045])
def test_the_interval_over_openings_holds_the_truth_as_often_as_it_says(line: Path, shift: float) -> None:
    """Three openings as a benchmark makes them: the ratio is off by the order, in turn, and by chance."""
    rng = np.random.default_rng(11)
    flat = openings.of_record({**read_json(line / layout.report("benchmark", "base-ort")), "again": []})[0].timing
    held = 0
    for _ in range(1000):
        found = over(
            [
                Opening(
                    flat_of(flat, 1.0, rng), flat_of(flat, float(np.exp(order * shift + 0.005 * rng.normal())), rng)
                )
                for order in (-1, 1, -1)
            ],
            0.95,
            reopen_sd=float(np.hypot(0.005, shift)),
        )
        held += found.low <= 1 <= found.high
    assert held >= 935


def flat_of(timing: Timing, ms: float, rng: np.random.Generator) -> Timing:
    """Eight rounds of so many milliseconds, with noise of 0.2 %."""
    return replace(timing, medians=tuple(ms * rng.normal(1, 2e-3, 8)))

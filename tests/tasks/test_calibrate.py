"""The calibration command finds what is planted, and says what it found."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import __main__ as command
from tasks import beside, manifest
from tasks import calibrate as module
from tasks import trials as trials_module
from tasks.beside import side_by_side
from tasks.calibrate import calibrate, early
from tasks.calibrate_page import page
from tasks.errors import Fault
from tasks.openings import Openings
from tasks.planted import Slowed, tiny_engine
from tasks.settings import BenchmarkParams
from tasks.stats import Interval
from tasks.target import fingerprint
from tasks.trials import Bed, Judged, Tally, Trials, make_bed

QUICK = BenchmarkParams(openings=1, rounds=8, max_rounds=8, window_ms=3, warmup_ms=5, max_lost=1000)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_bed(tiny_engine(tmp_path_factory.mktemp("tiny"), 128, 4), made=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds, short windows and a small engine."""
    monkeypatch.setattr(module, "SAME", QUICK)
    monkeypatch.setattr(module, "PLANTED", QUICK)
    monkeypatch.setattr(module, "EARLY_MS", 0.5)
    monkeypatch.setattr(module, "tiny_engine", lambda folder, width, _: tiny_engine(folder, width // 4, 2))
    monkeypatch.setattr(beside, "MIN_ROUNDS", 3)


def test_a_planted_half_is_found_and_its_size_too(bed: Any) -> None:
    said: list[str] = []
    trials = Trials(0.5, 6, QUICK, 60.0)
    trials.run(bed, said.append)
    tally = trials.tally()
    assert tally is not None
    assert (tally.trials, tally.asked) == (6, 6)
    assert tally.verdicts >= 4
    assert 1.2 < tally.ratio < 2.2
    assert said[0].startswith("slowed by 50%: 1 of 6, about ")


def test_no_time_left_ends_the_trials_after_one(bed: Any) -> None:
    trials = Trials(0.0, 50, QUICK, 0.0)
    assert trials.tally() is None
    trials.run(bed, lambda _: None)
    tally = trials.tally()
    assert tally is not None
    assert (tally.trials, tally.asked) == (1, 50)


def counted(bed: Bed) -> tuple[Bed, list[int]]:
    opened: list[int] = []
    return replace(bed, open=lambda: (opened.append(1), bed.open())[1]), opened


@pytest.mark.parametrize(
    ("openings", "groups", "pairs", "alike"),
    [(1, None, 6, 6), (3, None, 18, 6), (1, 2, 2, 2), (3, 2, 6, 2), (3, 1, 3, 1)],
)
def test_sessions_are_opened_anew_for_each_trial_or_for_a_group(
    bed: Any, openings: int, groups: int | None, pairs: int, alike: int
) -> None:
    counting, calls = counted(bed)
    trials = Trials(0.0, 6, QUICK.model_copy(update={"openings": openings}), 60.0, groups=groups)
    trials.run(counting, lambda _: None)
    assert len(calls) == 2 * pairs
    tally, alone, found = trials.tally(), trials.tally_alone(), trials.openings()
    assert tally and (tally.trials, tally.groups) == (6, alike)
    assert alone and (alone.trials, alone.groups, alone.asked) == (6 * openings, pairs, 6 * openings)
    assert (found is None) == (pairs < 5)
    if found:
        assert found.trials == pairs and found.sd.low <= found.sd.value <= found.sd.high


def test_trials_of_the_same_openings_count_as_one(bed: Any) -> None:
    trials = Trials(0.0, 200, QUICK, 60.0, groups=2)
    with bed.open() as one, bed.open() as other:
        timings = trials._measured(bed, (one, other))
    yes, no = Judged(True, Interval(1.1, 1.05, 1.15), 8), Judged(False, Interval(1.0, 0.95, 1.05), 8)
    verdicts = iter([yes] * 3 + [no] * 3)
    tally = trials._tally([[(timings,)] * 3] * 2, lambda _: next(verdicts), 200)
    assert tally and (tally.trials, tally.verdicts, tally.told, tally.groups, tally.share.value) == (6, 3, 1, 2, 0.5)
    once = trials._tally([[(timings,)] * 200], lambda _: no, 200)
    assert once and (once.trials, once.groups, once.verdicts) == (200, 1, 0)
    assert once.share.high > 0.7


class Slow:
    """A bed whose first session takes long to open."""

    def __init__(self, bed: Bed) -> None:
        self.whole, self.opened = bed.open, 0

    def __call__(self) -> Any:
        self.opened += 1
        if self.opened == 1:
            time.sleep(1.0)
        return self.whole()


def test_what_a_pair_of_openings_takes_is_shared_out(bed: Any) -> None:
    """The first pair takes more than its share, and has one measurement; those after it have no more to go with it."""
    trials = Trials(0.0, 50, QUICK.model_copy(update={"openings": 3}), 2.9, groups=1)
    trials.run(replace(bed, open=Slow(bed)), lambda _: None)
    assert [len(told) for told in trials.made[0]] == [1, 1, 1]
    assert trials.trials == 1


def test_no_group_is_begun_that_the_time_does_not_hold(bed: Any) -> None:
    trials = Trials(0.0, 50, QUICK.model_copy(update={"openings": 3}), 1.5, groups=5)
    trials.run(replace(bed, open=Slow(bed)), lambda _: None)
    assert len(trials.made) == 1


def test_an_interrupted_trial_does_not_count(bed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Trials._measured

    def interrupted(self: Trials, *given: Any) -> Any:
        if len(self.made) == 2 and len(self.made[-1]) == 3:
            raise KeyboardInterrupt
        return whole(self, *given)

    monkeypatch.setattr(Trials, "_measured", interrupted)
    trials = Trials(0.0, 6, QUICK.model_copy(update={"openings": 3}), 60.0)
    with pytest.raises(KeyboardInterrupt):
        trials.run(bed, lambda _: None)
    tally, found = trials.tally(), trials.openings()
    assert tally and (tally.trials, tally.groups) == (1, 1)
    assert found and found.trials == 5


def test_openings_that_differ_are_told_though_no_round_tells_them(bed: Any) -> None:
    """Each second opening is slower by a share of its own, which all of its rounds have."""
    shares = iter([0.0, 0.0, 0.0, 3.0, 0.0, 0.5, 0.0, 2.0, 0.0, 0.0, 0.0, 4.0])
    with bed.open() as session:
        trials = Trials(0.0, 12, QUICK, 60.0, groups=6)
        trials.run(replace(bed, open=lambda: Slowed(session, next(shares))), lambda _: None)
    found = trials.openings()
    assert found is not None and found.trials == 6
    assert 0.5 < found.sd.value < 3


def test_a_runner_that_returns_early_is_timed_at_its_true_length() -> None:
    found = early(2.0, calls=40)
    assert found.timed_ms >= 2.0
    assert found.returned_ms < found.timed_ms / 4


def test_other_timers_say_what_ours_says(tmp_path: Path) -> None:
    """Of the same calls ours hold theirs, however busy the machine is; others may differ on a busy one."""
    large = make_bed(tiny_engine(tmp_path, 512, 6), made=True)
    found = side_by_side(large.folder, large.open, large.pool[:50], 0.5, tmp_path)
    assert [row.timer for row in found] == ["ONNX Runtime's profiler", "torch.utils.benchmark", "bare calls"]
    assert found[0].low > 0.99
    assert 0.2 < found[2].ratio.value < 5
    assert found[0].ratio.value < 2
    assert 0.2 < found[1].ratio.value < 5
    for row in found:
        assert row.rounds + row.thrown >= 12
        assert row.low <= row.ratio.value <= row.high
        assert row.within == beside._within(row.ratio)


def test_an_interruption_keeps_what_is_done(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Trials._measured

    def interrupted(self: Trials, *given: Any) -> Any:
        if self.planted == 0.05:
            raise KeyboardInterrupt
        return whole(self, *given)

    monkeypatch.setattr(Trials, "_measured", interrupted)
    kept: list[module.Calibration] = []
    found = calibrate(2, 2, None, 4.0, tmp_path, lambda _: None, keep=kept.append)
    assert [(bool(k.beside), bool(k.same), len(k.power)) for k in kept] == [(1, 0, 0), (1, 1, 0), (1, 1, 1)]
    assert found.interrupted and all(k.interrupted for k in kept)
    assert found.same is not None and found.alone is not None
    assert [tally.planted for tally in found.power] == [0.02]
    assert "interrupted: what was found until then" in page(found)


TALLY = Tally(0.0, 200, 200, 6, 200, 6, Interval(0.03, 0.014, 0.064), 1.0, 58.0, 0, 12)


def test_the_page_says_whether_the_limit_holds(tmp_path: Path, quick: None) -> None:
    found = calibrate(1, 1, None, 2.0, tmp_path, lambda _: None)
    text = page(replace(found, same=TALLY))
    assert text.startswith(f"# Calibration of {fingerprint().id}\n")
    assert "| as `bench` judges | 200 | 6 | 3.0% [1.4%, 6.4%] | 1.0000 | 58.0 | 12 |" in text
    assert "At most 5%: holds." in text
    assert str(tmp_path) not in text
    many = replace(TALLY, verdicts=20, share=Interval(0.1, 0.07, 0.15), trials=150)
    assert "At most 5%: DOES NOT HOLD." in page(replace(found, same=many))
    some = replace(TALLY, verdicts=12, share=Interval(0.06, 0.035, 0.102))
    assert "At most 5%: not told: more were found, but the interval reaches below that." in page(
        replace(found, same=some)
    )
    assert "150 of 200, no time for more" in page(replace(found, same=many))
    few = replace(TALLY, verdicts=0, share=Interval(0.0, 0.0, 0.041), trials=89)
    assert "At most 5%: holds, with the whole interval." in page(replace(found, same=few))
    fewer = replace(few, share=Interval(0.0, 0.0, 0.088), trials=40, groups=40)
    assert "At most 5%: 40 trials are too few to say, 100 would do." in page(replace(found, same=fewer))
    never = replace(fewer, verdicts=40, share=Interval(1.0, 0.91, 1.0))
    assert "At most 5%: DOES NOT HOLD." in page(replace(found, same=never))


def test_the_page_has_the_same_trials_by_their_rounds_alone(tmp_path: Path, quick: None) -> None:
    found = calibrate(1, 1, None, 2.0, tmp_path, lambda _: None)
    assert found.alone is not None and found.alone.trials == 5
    text = page(replace(found, same=TALLY, alone=TALLY))
    assert "| each opening by its rounds alone | 200 | 6 | 3.0% [1.4%, 6.4%] | 1.0000 | 58.0 | 12 |" in text
    assert "By the rounds alone, at most 5%: holds." in text
    assert "with nothing allowed for others" in text and "The two are opened 5 times for each trial" in text
    differ = replace(TALLY, verdicts=60, share=Interval(0.3, 0.24, 0.37), groups=36, told=4)
    once = page(replace(found, same=replace(TALLY, groups=12, told=0), alone=differ, reopened=False))
    assert "By the rounds alone, at most 5%: DOES NOT HOLD: the two openings differ by more than the rounds'" in once
    assert "opened 5 times, in one process, for each of 12 groups of trials (16.7 in the mean)" in once
    assert "Verdicts came up in 0 of 12 groups as `bench` judges, in 4 of 36 pairs of openings" in once
    assert "At most 5%: 12 groups of trials are too few to say" in once
    assert "At most 5%: holds." in text


def test_the_page_names_the_code_the_libraries_and_the_engine(tmp_path: Path, quick: None) -> None:
    found = calibrate(1, 1, None, 0.1, tmp_path, lambda _: None)
    text, made = page(found), manifest.read(tmp_path / "tiny-64x2", trusted=False)
    assert f"| engine sha256 | {made.engine_sha256} |" in text
    assert f"| target | {fingerprint().id} |" in text
    assert {"torch", "onnxruntime"} <= found.libraries.keys()
    assert f"onnxruntime {found.libraries['onnxruntime']}" in text
    told = page(replace(found, commit="0123abcd+", libraries={}))
    assert "| git commit | 0123abcd+ |" in told and "| libraries | none |" in told
    assert "| git commit | none |" in page(replace(found, commit=None))


def test_without_git_there_is_no_commit(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert calibrate(1, 1, None, 0.1, tmp_path, lambda _: None).commit is None


def test_the_page_says_by_which_clock_the_planted_rows_are(tmp_path: Path, quick: None) -> None:
    found = replace(calibrate(1, 1, None, 0.1, tmp_path, lambda _: None), power=[replace(TALLY, planted=0.02)])
    assert (found.settings.clock, found.planted_clock) == ("host", "host")
    text = page(found)
    assert "| planted, the host's clock | trials | found |" in text and "\n| 2% | 200 | 6 |" in text
    assert "PyTorch reaches no GPU" not in text
    by_device = found.settings.model_copy(update={"clock": "device"})
    device = page(replace(found, settings=by_device, planted_clock="device"))
    assert "| planted, the device's clock | trials | found |" in device
    assert "The GPU spins after each launch" in device and "busily" not in device
    assert "PyTorch reaches no GPU here" in page(replace(found, settings=by_device))


def test_the_page_says_what_is_within_and_which_timer_there_is_not(tmp_path: Path, quick: None) -> None:
    found = calibrate(1, 1, None, 0.1, tmp_path, lambda _: None)
    text = page(found)
    assert all(f"({row.thrown}) | {row.within} |" in text for row in found.beside)
    assert "bare calls: not available" not in text
    fewer = replace(found, beside=[row for row in found.beside if row.timer != beside.BARE])
    assert "bare calls: not available for this backend" in page(fewer)


def test_what_was_not_reached_is_said(tmp_path: Path, quick: None) -> None:
    bare = calibrate(1, 1, None, 0.1, tmp_path, lambda _: None)
    text = page(replace(bare, same=None, openings=None, power=[], early=None, beside=[], interrupted=True))
    assert text.count("Not reached.") == 4
    assert "Not reached: 5 openings are needed." in text


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.0005, 0.002, "is enough for this engine. So much is allowed for that no trial could give a false verdict"),
        (0.001, 0.006, "is enough for this engine.\n"),
        (0.004, 0.02, "may be too little for this engine.\n"),
        (0.01, 0.03, "is TOO LITTLE for this engine. Several openings show by themselves that they scatter"),
    ],
)
def test_the_page_holds_the_openings_against_what_is_assumed(
    tmp_path: Path, quick: None, low: float, high: float, told: str
) -> None:
    bare = calibrate(1, 1, None, 0.1, tmp_path, lambda _: None)
    text = page(replace(bare, openings=Openings(Interval((low + high) / 2, low, high), 0.002, 12)))
    assert f"[{low:.2%}, {high:.2%}]" in text
    assert f"0.7%, assumed here, {told}" in text


def test_an_engine_slow_to_open_is_opened_anew_for_several_trials(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials_module, "QUICK_OPEN_S", 0.0)
    monkeypatch.setattr(module, "SAME_SHARE", 100.0)  # No end but the number asked for.
    found = calibrate(10, 1, None, 2.0, tmp_path, lambda _: None, anew=10, openings=2)
    assert not found.reopened
    assert found.same is not None and (found.same.trials, found.same.groups) == (10, 5)
    assert found.openings is not None and found.openings.trials == 10
    text = page(found)
    assert "for each of 5 groups of trials (2 in the mean)" in text and "5 groups of trials are too few" in text
    assert "Those of a difference are of 1 groups of openings, at most" in text


@pytest.mark.parametrize(("asked", "allowed"), [(None, 0.007), (0.02, 0.02)])
def test_as_much_is_allowed_for_openings_as_is_asked_for_or_as_bench_does(
    tmp_path: Path, quick: None, asked: float | None, allowed: float
) -> None:
    found = calibrate(1, 1, None, 0.1, tmp_path, lambda _: None, reopen_sd=asked)
    assert found.settings.reopen_sd == allowed
    assert f"allow for openings that differ by {allowed:.1%}" in page(found)


def test_a_clock_that_the_engine_does_not_have_is_said_before_anything_is_measured(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "early", lambda *_: pytest.fail("measured"))
    with pytest.raises(Fault, match="device needs engines that run on a GPU"):
        calibrate(1, 1, None, 1.0, tmp_path, lambda _: None, clock="device")


def test_the_command_writes_its_page(
    tmp_path: Path, quick: None, free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "page.md"
    asked = ["--trials", "1", "--planted", "1", "--budget-s", "1", "--write", str(out)]
    asked += ["--openings", "2", "--reopen-sd", "0.02"]
    monkeypatch.setattr(sys, "argv", ["tasks", "calibrate", *asked])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exited:
        command.main()
    printed = capsys.readouterr()
    assert not exited.value.code
    assert printed.out == out.read_text()
    assert "The two are opened 2 times for each trial" in printed.out and "differ by 2.0%" in printed.out
    assert printed.err.startswith("other timers beside ours\n")

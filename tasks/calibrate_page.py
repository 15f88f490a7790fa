"""A calibration as a page of Markdown, with what it means."""

from __future__ import annotations

from dataclasses import asdict

from tasks import monitor
from tasks.beside import BARE, NO, OPEN, WITHIN, YES, Beside
from tasks.calibrate import PLANTED, Calibration
from tasks.monitor import Conditions
from tasks.openings import FEWEST, Openings
from tasks.reopening import share
from tasks.trials import Tally

ALLOWED = 0.05
ENOUGH = 100


def page(found: Calibration) -> str:
    """The report of a calibration."""
    e = found.environment
    lines = [
        f"# Calibration of {e.target_id}",
        "",
        f"`python -m tasks calibrate`, {found.seconds / 60:.1f} minutes"
        + (", interrupted: what was found until then." if found.interrupted else "."),
        "",
        "| | |",
        "|---|---|",
        f"| machine | {e.name}, {e.cores} cores for this process |",
        f"| target | {e.target_id} |",
        f"| system | {e.system}, Python {e.python} |",
        f"| libraries | {', '.join(f'{name} {version}' for name, version in found.libraries.items()) or 'none'} |",
        f"| git commit | {found.commit or 'none'} |",
        f"| frequency governor | {e.governor or 'not told by the system'} |",
        f"| load average | {e.load_average[0]:.2f} before, {e.load_average[1]:.2f} after |",
        *_conditions(e.conditions),
        f"| engine | {found.engine}, backend {found.backend} |",
        f"| engine sha256 | {found.engine_sha256} |",
        "",
        *_same(found),
        *_openings(found),
        *_power(found),
        *_early(found),
        *_beside(found.beside),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _conditions(found: Conditions | None) -> list[str]:
    """Rows on the CPU and, where it was read, the GPU."""
    told = [line.split(": ", 1) for line in monitor.lines(asdict(found))] if found else []
    return [f"| while it was measured, {who} | {what} |" for who, what in told]


def _same(found: Calibration) -> list[str]:
    s = share(found.settings)
    times = "once" if s.openings == 1 else f"{s.openings} times"
    opened = f"opened {times} for each trial, in one process"
    if not found.reopened and found.same:
        groups, trials = found.same.groups, found.same.trials
        opened = f"opened {times}, in one process, for each of {groups} groups of trials ({trials / groups:.3g} in the "
        opened += "mean), since that takes long"
    lines = [
        "## The same engine twice",
        "",
        f"The two are {opened}. Any verdict on the engine is a false one; at most {ALLOWED:.0%} may be, whatever the "
        f"stopping rule did: {s.rounds} to {s.max_rounds} rounds an opening, windows of {s.window_ms:g} ms, the "
        f"{s.clock}'s clock. Intervals, here and below, allow for openings that differ by {s.reopen_sd:.1%} "
        f"(`reopen_sd`){_seen(s.openings)}. The second row judges each opening with nothing allowed for others, up to "
        "the look that would have ended it: that tests the rounds' own intervals. It may exceed "
        f"{ALLOWED:.0%} where the two openings really differ, which their rounds are right to tell.",
        "",
    ]
    if found.same is None or found.alone is None:
        return [*lines, "Not reached.", ""]
    rows = {"as `bench` judges": found.same, "each opening by its rounds alone": found.alone}
    told = f"At most {ALLOWED:.0%}: {_limit(found.same)}."
    if not found.reopened:
        told = (
            "Trials of a group share what its openings differ by: a group counts as one. Verdicts came up in "
            f"{found.same.told} of {found.same.groups} groups as `bench` judges, in {found.alone.told} of "
            f"{found.alone.groups} pairs of openings by their rounds alone. {told}"
        )
    return [
        *lines,
        *_table("judged", rows, "verdicts"),
        "",
        told,
        "",
        f"By the rounds alone, at most {ALLOWED:.0%}: {_limit(found.alone)}{_meaning(found.alone)}.",
        "",
    ]


def _limit(tally: Tally) -> str:
    """Whether the share of verdicts keeps to the limit."""
    if tally.share.low > ALLOWED:
        return "DOES NOT HOLD"
    if tally.share.high <= ALLOWED:
        return "holds, with the whole interval"
    if tally.groups < ENOUGH:
        what = "trials" if tally.groups == tally.trials else "groups of trials"
        return f"{tally.groups} {what} are too few to say, {ENOUGH} would do"
    return "holds" if tally.share.value <= ALLOWED else "not told: more were found, but the interval reaches below that"


def _meaning(alone: Tally) -> str:
    if alone.share.low <= ALLOWED:
        return ""
    return ": the two openings differ by more than the rounds' noise, or the rounds' intervals are too narrow"


def _openings(found: Calibration) -> list[str]:
    """How far openings differ, beside what is assumed."""
    lines = ["## Openings of one engine", ""]
    o, assumed = found.openings, found.settings.reopen_sd
    if o is None:
        return [*lines, f"Not reached: {FEWEST} openings are needed.", ""]
    covered = "is enough" if o.sd.high <= assumed else "may be too little" if o.sd.low <= assumed else "is TOO LITTLE"
    return [
        *lines,
        f"The ratio of one engine's latencies in two openings in one process differs from 1 by {o.sd.value:.2%} "
        f"[{o.sd.low:.2%}, {o.sd.high:.2%}] (standard deviation, interval at 95 %), beyond the {o.noise:.2%} of "
        f"noise that their rounds tell (standard error, median): {o.trials} pairs of openings. This "
        f"is what `benchmark.reopen_sd` stands for; {assumed:.1%}, assumed here, {covered} for this engine."
        + _beyond(found, o),
        "",
    ]


def _beyond(found: Calibration, seen: Openings) -> str:
    """What follows where openings differ by much more, or less, than is assumed."""
    if seen.sd.low > found.settings.reopen_sd and found.settings.openings > 1:
        return " Several openings show by themselves that they scatter, and intervals allow for that."
    if seen.sd.high < found.settings.reopen_sd / 3:
        return (
            " So much is allowed for that no trial could give a false verdict here, and no small difference is found."
        )
    return ""


def _seen(openings: int) -> str:
    return "" if openings == 1 else f", or for what the {openings} of a trial scatter by, if that is more"


def _power(found: Calibration) -> list[str]:
    if found.planted_clock == "device":
        how = (
            "The GPU spins after each launch, on the engine's own stream: for some 5 µs (200 µs where launches wait "
            "for the GPU, as ONNX Runtime's CUDA graphs do), and after those of one of the two for a known share of "
            "such a call longer. By the device's clock; where the host starts calls more slowly "
            "than the GPU makes them, less of the share shows."
        )
    else:
        how = "One of the two waits, busily, for a known share of each call, by the host's clock."
        how += " PyTorch reaches no GPU here, so not by the device's." if found.settings.clock == "device" else ""
    s = share(PLANTED.model_copy(update={"openings": found.settings.openings}))
    lines = [
        "## Planted differences",
        "",
        f"{how} The share of measurements that find it slower: {s.rounds} to {s.max_rounds} rounds an opening, windows "
        f"of {s.window_ms:g} ms, a third of those of `bench`, which finds rather more.",
        "",
    ]
    if not found.reopened and found.power:
        groups = max(tally.groups for tally in found.power)
        lines[-1:] = [f"Those of a difference are of {groups} groups of openings, at most; a group counts as one.", ""]
    rows = {f"{tally.planted:.0%}": tally for tally in found.power}
    told = _table(f"planted, the {found.planted_clock}'s clock", rows, "found") if rows else ["Not reached."]
    return [*lines, *told, ""]


def _table(which: str, rows: dict[str, Tally], verdict: str) -> list[str]:
    head = (
        f"| {which} | trials | {verdict} | share, 95 % interval | median ratio | rounds, mean | windows thrown away |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, t in rows.items():
        of = f"{t.trials}" + (f" of {t.asked}, no time for more" if t.trials < t.asked else "")
        busy = f", {t.busy} trials with disturbed ones left" if t.busy else ""
        lines.append(
            f"| {name} | {of} | {t.verdicts} | {t.share.value:.1%} [{t.share.low:.1%}, {t.share.high:.1%}] "
            f"| {t.ratio:.4f} | {t.rounds:.1f} | {t.discarded}{busy} |"
        )
    return lines


def _early(found: Calibration) -> list[str]:
    lines = ["## A runner that returns early", ""]
    if found.early is None:
        return [*lines, "Not reached.", ""]
    e = found.early
    told = "its true length" if abs(e.timed_ms / e.true_ms - 1) <= WITHIN else "NOT its true length"
    return [
        *lines,
        f"It returns after {e.returned_ms:.4f} ms and is done after {e.true_ms:g} ms. "
        f"Timed: {e.timed_ms:.4f} ms, {told}.",
        "",
    ]


def _beside(rows: list[Beside]) -> list[str]:
    lines = [
        "## Other timers beside ours",
        "",
        "In one run, in interleaved rounds of 20 calls, ours before or after theirs by chance where the calls aren't "
        f"the same; ours over theirs, by round. {YES}: the whole interval is within {WITHIN:.0%} of 1; {NO}: all of it "
        f"is outside; else {OPEN}. The milliseconds are each timer's own median over the rounds, the ratio is of "
        "pairs: the two needn't divide to it where the machine's speed changed meanwhile.",
        "",
    ]
    if not rows:
        return [*lines, "Not reached."]
    lines += [
        "| timer | what of it | ours, ms | theirs, ms | ratio, 95 % interval | 10 % to 90 % of rounds | rounds (thrown "
        f"away) | within {WITHIN:.0%} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for b in rows:
        lines.append(
            f"| {b.timer} | {b.what} | {b.ours_ms:.4f} | {b.theirs_ms:.4f} "
            f"| {b.ratio.value:.4f} [{b.ratio.low:.4f}, {b.ratio.high:.4f}] | {b.low:.4f} to {b.high:.4f} "
            f"| {b.rounds} ({b.thrown}) | {b.within} |"
        )
    if not any(b.timer == BARE for b in rows):
        lines += ["", f"{BARE}: not available for this backend"]
    return lines

"""A calibration as a page of Markdown, with what it means."""

from __future__ import annotations

from dataclasses import asdict

from tasks import monitor
from tasks.beside import WITHIN, Beside
from tasks.calibrate import PLANTED, SAME, Calibration
from tasks.monitor import Conditions
from tasks.openings import FEWEST
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
        f"| system | {e.system}, Python {e.python} |",
        f"| frequency governor | {e.governor or 'not told by the system'} |",
        f"| load average | {e.load_average[0]:.2f} before, {e.load_average[1]:.2f} after |",
        *_conditions(e.conditions),
        f"| engine | {found.engine}, backend {found.backend} |",
        "",
        *_same(found),
        *_openings(found),
        *_power(found.power),
        *_early(found),
        *_beside(found.beside),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _conditions(found: Conditions | None) -> list[str]:
    """Rows on the CPU and, where it was read, the GPU."""
    told = [line.split(": ", 1) for line in monitor.lines(asdict(found))] if found else []
    return [f"| while it was measured, {who} | {what} |" for who, what in told]


def _same(found: Calibration) -> list[str]:
    opened = "opened anew for each trial" if found.reopened else "opened twice, once for all trials"
    lines = [
        "## The same engine twice",
        "",
        f"The two are {opened}. Any verdict is a false one; at most {ALLOWED:.0%} may be, whatever the stopping rule "
        f"did: {SAME.rounds} to {SAME.max_rounds} rounds, windows of {SAME.window_ms:g} ms, the {found.clock}'s clock; "
        f"here and below intervals allow for openings that differ by {SAME.reopen_sd:.1%} (`reopen_sd`).",
        "",
    ]
    if found.same is None:
        return [*lines, "Not reached.", ""]
    told = "holds" if found.same.share.value <= ALLOWED else "DOES NOT HOLD"
    if found.same.share.high <= ALLOWED:
        told = "holds, with the whole interval"
    elif found.same.trials < ENOUGH:
        told = f"{found.same.trials} trials are too few to say, {ENOUGH} would do"
    return [*lines, *_table([found.same], "false verdicts"), "", f"At most {ALLOWED:.0%}: {told}.", ""]


def _openings(found: Calibration) -> list[str]:
    """How far openings differ, beside what is assumed."""
    lines = ["## Openings of one engine", ""]
    o, assumed = found.openings, SAME.reopen_sd
    if o is None:
        return [*lines, f"Not reached: {FEWEST} openings are needed.", ""]
    if found.reopened:
        how, about = "both opened anew for each", "differs from 1 by"
    else:
        how = "one opened anew for each, the other once, so that a constant shift between the two isn't in it"
        about = "scatters about its mean by"
    covered = "is enough" if o.sd.high <= assumed else "may be too little" if o.sd.low <= assumed else "is TOO LITTLE"
    return [
        *lines,
        f"The ratio of one engine's latencies in two openings in one process {about} {o.sd.value:.2%} "
        f"[{o.sd.low:.2%}, {o.sd.high:.2%}] (standard deviation, interval at 95 %), beyond the {o.noise:.2%} of "
        f"noise that the rounds of one measurement tell (standard error, median): {o.trials} measurements, {how}. This "
        f"is what `benchmark.reopen_sd` stands for; {assumed:.1%}, assumed by default, {covered} for this engine here.",
        "",
    ]


def _power(tallies: list[Tally]) -> list[str]:
    lines = [
        "## Planted differences",
        "",
        "One of the two waits, busily, for a known share of each call, by the host's clock. The share of measurements "
        "that find it slower: "
        f"{PLANTED.rounds} to {PLANTED.max_rounds} rounds, windows of {PLANTED.window_ms:g} ms, a third of a "
        "benchmark's, so that a benchmark finds rather more.",
        "",
    ]
    return [*lines, *(_table(tallies, "found") if tallies else ["Not reached."]), ""]


def _table(tallies: list[Tally], verdict: str) -> list[str]:
    head = (
        f"| planted | trials | {verdict} | share, 95 % interval | median ratio | rounds, mean | windows thrown away |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for t in tallies:
        of = f"{t.trials}" + (f" of {t.asked}, no time for more" if t.trials < t.asked else "")
        busy = f", {t.busy} trials with disturbed ones left" if t.busy else ""
        lines.append(
            f"| {t.planted:.0%} | {of} | {t.verdicts} | {t.share.value:.1%} [{t.share.low:.1%}, {t.share.high:.1%}] "
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
        "In one run, in interleaved rounds of 20 calls; ours over theirs, by round.",
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
            f"| {b.rounds} ({b.thrown}) | {'yes' if b.within else 'NO'} |"
        )
    return lines

"""Time a built engine against the baseline, interleaved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import energy, footprint, manifest, measure, target, transfer
from tasks.data import read
from tasks.energy import Energy
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault, Unavailable
from tasks.files import sha256
from tasks.footprint import Footprint
from tasks.monitor import Conditions, Monitor, merged
from tasks.reopening import Plan, again, share, timed
from tasks.settings import BenchmarkParams, min_rounds
from tasks.stats import Interval
from tasks.timing import Opening, confidence_over, make_pool, over, spoilt, too_few
from tasks.transfer import Transfer


@dataclass(frozen=True)
class AtBatch:
    """The same measurement at another batch size."""

    timing: measure.Timing
    baseline: measure.Timing
    again: list[Opening]
    speedup: Interval
    confidence: float
    unstable: str | None


@dataclass(frozen=True)
class BenchmarkReport:
    """Latency and speed-up over the baseline; all None, with the reason, if the engine can't run here.

    `baseline` is the baseline's own timing of the same rounds, so that the speed-up can be
    computed again from this file; `again` holds what further openings of both gave, `also` the other batch sizes.
    `confidence` is that of the single interval `speedup`, raised for the looks that were taken and the engines that
    were judged together. `length` and `validation_sha256` are of the inputs. `load_average` was read before and after.
    `target_id` is the machine that was measured, `conditions` what it was like meanwhile. `energy` is the engine's at
    `batch`, `footprint` what it took to open, `transfer` what a call takes on a GPU with its copies.
    """

    timing: measure.Timing | None
    baseline: measure.Timing | None
    again: list[Opening]
    speedup: Interval | None
    confidence: float | None
    also: list[AtBatch]
    versus: str
    not_run: str | None
    unstable: str | None
    engine_sha256: str
    baseline_sha256: str
    load_average: tuple[float, float] | None
    target_id: str
    length: int | None
    validation_sha256: str
    conditions: Conditions | None = None
    energy: Energy | None = None
    footprint: Footprint | None = None
    transfer: Transfer | None = None


def benchmark(source: Path, baseline: Path, data: Path, params: BenchmarkParams, family: int = 1) -> BenchmarkReport:
    """Measure the engine in `source` and the one in `baseline` in the same rounds, on validation inputs.

    `family` is the number of engines whose speed-ups are judged together with this one's.
    The baseline against itself is measured with two sessions: its ratio should hold 1. The engine is opened first,
    so that what it takes to open is its own.
    Raises Fault if the baseline can't run here: without it no engine can be timed.
    """
    described, other = manifest.read(source), manifest.read(baseline)
    before = measure.load_average()
    of: dict[str, Any] = {
        "versus": baseline.name,
        "engine_sha256": described.engine_sha256,
        "baseline_sha256": other.engine_sha256,
        "target_id": target.fingerprint().id,
        "length": params.length,
        "validation_sha256": sha256(data / "validation.npz"),
    }
    inputs = measure.inputs_of(described.inputs, read(data / "validation.npz"), params.length)
    with ExitStack() as stack:
        try:
            engine, start = footprint.opened(source, described, make_pool(inputs, params.batch, 0)[0])
            stack.enter_context(engine)
        except Unavailable as reason:
            _open_baseline(baseline).__exit__(None, None, None)
            return _not_run(str(reason), of)
        against = stack.enter_context(_open_baseline(baseline))
        watch = stack.enter_context(Monitor((engine.device, against.device), params))
        metered = energy.prepare(engine.device, watch.card, params)
        batches = each_batch(params)
        plan = Plan(
            {"engine": source, "baseline": baseline}, data / "validation.npz", [share(p) for p in batches], family
        )
        first = timed(plan, {"engine": engine, "baseline": against}, inputs, watch)
        moved = transfer.of(engine, inputs, params, watch.disturbed)
        taken = energy.of(engine, inputs, params, metered, watch.disturbed)
        conditions = watch.conditions()
    further = list(again(plan))
    found = [[Opening.of(timings) for timings in opening] for opening in (first, *(told for told, _ in further))]
    at, *also = (_judged(list(each), p, family) for each, p in zip(zip(*found, strict=True), batches, strict=True))
    return BenchmarkReport(
        timing=at.timing,
        baseline=at.baseline,
        again=at.again,
        speedup=at.speedup,
        confidence=at.confidence,
        also=also,
        not_run=None,
        unstable=at.unstable,
        load_average=(before, measure.load_average()),
        conditions=merged([conditions, *(told for _, told in further)]),
        energy=taken,
        footprint=start,
        transfer=moved,
        **of,
    )


def _not_run(reason: str, of: Mapping[str, Any]) -> BenchmarkReport:
    return BenchmarkReport(
        timing=None,
        baseline=None,
        again=[],
        speedup=None,
        confidence=None,
        also=[],
        not_run=reason,
        unstable=None,
        load_average=None,
        **of,
    )


def each_batch(params: BenchmarkParams) -> list[BenchmarkParams]:
    """The settings at `batch`, and at each of `also` with half the rounds and time, as far as an interval allows."""
    least = min_rounds(params.confidence)
    half = max(least, params.rounds // 2)
    other = {"rounds": half, "max_rounds": max(half, params.max_rounds // 2), "budget_s": params.budget_s / 2}
    return [params, *(params.model_copy(update={"batch": batch, **other}) for batch in params.also)]


def _judged(openings: list[Opening], params: BenchmarkParams, family: int) -> AtBatch:
    first, own = openings[0], [opening.timing for opening in openings]
    sure = confidence_over(own, params.confidence, family)
    reason = unstable(openings, params) or too_few(own, params.confidence, family)
    gain = over(openings, params.confidence, family, params.reopen_sd)
    return AtBatch(first.timing, first.baseline, openings[1:], gain, sure, reason)


def _open_baseline(folder: Path) -> Session:
    try:
        return open_engine(folder)
    except Unavailable as reason:
        raise Fault(
            f"the baseline {folder.name} can't run here",
            got=str(reason),
            expected="an engine that runs on this machine",
            do="name another one as `baseline:` in params.yaml",
        ) from None


def unstable(openings: Sequence[Opening], params: BenchmarkParams) -> str | None:
    """Why a measurement can't be used, or None.

    The width is that of a single interval of what the rounds tell: how precise the measurement is, not how much it has
    to prove.
    """
    width = measure.relative_width(over([opening.plain() for opening in openings], params.confidence))
    wide = f"by the rounds alone the speed-up's interval is {width:.2%} wide, {params.max_width:.0%} is allowed"
    return spoilt(openings) or (wide if width > params.max_width else None)

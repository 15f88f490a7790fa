"""The gates of `params.yaml`: what a variant must prove, as sentences where it doesn't."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tasks.results import Variant
from tasks.settings import Bound, GateParams
from tasks.stats import Interval, needed

# The value of a time, and its interval.
TIMED: dict[str, Callable[[Variant], tuple[float | None, Interval | None]]] = {
    "latency_ms": lambda v: (v.latency_ms["p50"] if v.latency_ms else None, v.latency_bounds_ms.get("p50")),
    "latency_ms_p99": lambda v: (v.latency_ms["p99"] if v.latency_ms else None, v.latency_bounds_ms.get("p99")),
    "throughput_per_s": lambda v: (v.throughput_per_s, v.throughput_bounds.get(v.batch)),
}
POINTS: dict[str, Callable[[Variant], float | None]] = {
    "size_bytes": lambda v: v.size_bytes.get("engine"),
    "memory_bytes": lambda v: v.cost.memory_bytes,
    "first_inference_s": lambda v: v.cost.first_inference_s,
}


def judge(variant: Variant, gates: GateParams, baseline: Variant | None) -> Variant:
    """The variant with its verdict: `passed` or `rejected`, unless it already has another.

    Only complete and finite numbers, measured on the baseline's own test data, can pass.
    """
    if variant.verdict:
        return variant
    if baseline is None or baseline.accuracy is None:
        return replace(variant, verdict="rejected", reasons=("the baseline has no result to compare with",))
    reasons = failures(variant, gates)
    if variant.test_sha256 != baseline.test_sha256:
        reasons.append("it was evaluated on other test data than the baseline")
    if variant.name == baseline.name:
        reasons = ["it is the baseline", *_biased(variant)]
    others = [told for told in variant.reasons if f"as_asked: {told}" not in reasons]
    return replace(variant, verdict="rejected" if reasons else "passed", reasons=(*reasons, *others))


def failures(variant: Variant, gates: GateParams, only: tuple[str, ...] | None = None) -> list[str]:
    """A sentence for each gate that a variant doesn't pass; `only` names the gates to look at."""
    asked = [(n, bound) for n, bound in gates if isinstance(bound, Bound) and (only is None or n in only)]
    faults = [sentence for name, bound in asked for sentence in _gate(name, bound, variant)]
    if gates.as_asked and (only is None or "as_asked" in only):
        faults += _as_asked(variant)
    return faults


def metric(variant: Variant, name: str) -> Interval | None:
    """The interval of a metric that gates can name; of sizes, memory and start, which have none, the point."""
    if name in TIMED:
        return TIMED[name](variant)[1]
    if name in POINTS:
        point = POINTS[name](variant)
        return None if point is None else Interval(point, point, point)
    value = variant.cost.energy_mj if name == "energy_mj" else getattr(variant, name)
    return value if isinstance(value, Interval) else None


def _gate(name: str, bound: Bound, variant: Variant) -> list[str]:
    got = metric(variant, name)
    if got is None or not all(math.isfinite(v) for v in (got.value, got.low, got.high)):
        return [_unknown(name, variant)]
    faults = []
    if name == "energy_mj" and variant.cost.energy_disturbed:
        faults.append(f"{name} was measured in a disturbed window: {variant.cost.energy_disturbed}")
    if bound.min is not None and not got.low > bound.min:
        faults.append(f"{name} {shown(name, got)} is not above {shown(name, bound.min)} with its whole interval")
    if bound.max is not None and not got.high < bound.max:
        faults.append(f"{name} {shown(name, got)} is not below {shown(name, bound.max)} with its whole interval")
    return faults


def _unknown(name: str, variant: Variant) -> str:
    """That a metric has no number, or no interval, and why, as far as it is known."""
    value, interval = TIMED[name](variant) if name in TIMED else (None, None)
    if value is None or not math.isfinite(value) or interval or not variant.latency_ms:
        return f"{name} has no finite number{_why(name, variant)}"
    if not (variant.latency_bounds_ms or variant.throughput_bounds):
        return f"{name} {shown(name, value)} has no interval on record: run `dvc repro -f benchmark@{variant.name}`"
    told = f"{variant.latency_ms['n']} calls in these windows don't bound it"
    return f"{name} {shown(name, value)} has no interval: {told}; raise benchmark.rounds or window_ms"


def _why(name: str, variant: Variant) -> str:
    if name == "energy_mj" and variant.cost.energy_reason:
        return f": {variant.cost.energy_reason}"
    percent = {"latency_ms": 50, "latency_ms_p99": 99}.get(name)
    if percent is None or not variant.latency_ms:
        return ""
    if variant.clock == "device" and percent > 50:
        return ": with clock: device a time is the mean of several calls, which has no p99 of single ones"
    calls = variant.latency_ms["n"]
    return f": it takes {needed(percent)} calls, {calls} were timed; raise benchmark.rounds or window_ms"


def _biased(baseline: Variant) -> list[str]:
    """A warning if the baseline timed against itself isn't as fast as itself."""
    itself = baseline.speedup
    if itself is None or itself.low <= 1 <= itself.high:
        return []
    return [f"timed against itself it is {shown('speedup', itself)}: trust no speed-up of this run to less than that"]


def _as_asked(variant: Variant) -> list[str]:
    """A reason unless the engine is known to run in the precision and sparsity that were asked for."""
    evidence = variant.evidence
    known = evidence is not None and any(precision != "unknown" for precision in evidence.precision_found)
    if evidence is None or not (known or evidence.not_as_asked):
        return [f"as_asked: {variant.backend} doesn't tell in which precision it runs"]
    return [f"as_asked: {evidence.not_as_asked}"] if evidence.not_as_asked else []


def shown(name: str, value: Interval | float) -> str:
    """A metric as people read it: percent, points, times, milliseconds, millijoules, seconds, samples/s or bytes."""
    if isinstance(value, Interval):
        middle = shown(name, value.value)
        if value.low == value.high:
            return middle
        low, high = (_beside_one(v) if name == "speedup" else shown(name, v) for v in (value.low, value.high))
        return f"{middle} [{low}, {high}]"
    forms = {
        "accuracy": f"{value:.1%}",
        "accuracy_change": f"{value * 100:+.2f} pt",
        "speedup": f"{value:.2f}×",
        "latency_ms": f"{value:.3f} ms",
        "latency_ms_p99": f"{value:.3f} ms",
        "energy_mj": f"{value:.3g} mJ",
        "first_inference_s": f"{value:.3g} s",
        "throughput_per_s": f"{value:,.0f}" if value >= 1000 else f"{value:.4g}",
    }
    return forms.get(name, f"{value:,.0f}")


def _beside_one(bound: float) -> str:
    """A bound of a speed-up, with as many digits as tell on which side of 1 it lies, up to 4."""
    texts = [f"{bound:.{digits}f}×" for digits in (2, 3, 4)]
    return next((text for text in texts if bound == 1 or float(text[:-1]) != 1), texts[0])

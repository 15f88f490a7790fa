"""Gates: whole intervals, finite numbers, the baseline's own test data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tasks.costs import Cost
from tasks.gates import judge, metric, shown
from tasks.results import Evidence, Variant
from tasks.settings import Bound, GateParams
from tasks.stats import Interval

BASE = Variant("base", ("base",), "eager", accuracy=Interval(0.9, 0.88, 0.92), test_sha256="t")
GOOD = Variant(
    "good",
    ("base", "good"),
    "onnxruntime",
    accuracy=Interval(0.9, 0.88, 0.92),
    accuracy_change=Interval(0.0, -0.01, 0.01),
    latency_ms={"p50": 2.0, "p90": None, "p99": None, "n": 30, "batch": 1},
    speedup=Interval(2.0, 1.8, 2.2),
    throughput_per_s=500.0,
    latency_bounds_ms={"p50": Interval(2.0, 1.9, 2.1)},
    throughput_bounds={"1": Interval(500.0, 490.0, 510.0)},
    size_bytes={"model": 900, "engine": 1000},
    cost=Cost(energy_mj=Interval(3.0, 2.9, 3.1), first_inference_s=0.5, host_peak_bytes=5000, device_peak_bytes=None),
    verdict="",
    test_sha256="t",
)


def verdict(variant: Variant, **gates: Bound | None) -> tuple[str, tuple[str, ...]]:
    judged = judge(variant, GateParams(**gates), BASE)
    return judged.verdict, judged.reasons


def test_a_variant_within_all_gates_passes() -> None:
    assert verdict(GOOD) == ("passed", ())


@pytest.mark.parametrize(
    ("low", "passes"), [(-0.0201, False), (-0.02, False), (-0.0199, True)], ids=["below", "at", "above"]
)
def test_accuracy_must_not_be_inferior_by_the_margin_with_its_whole_interval(low: float, passes: bool) -> None:
    got, reasons = verdict(replace(GOOD, accuracy_change=Interval(0.0, low, 0.05)))
    assert (got == "passed") is passes
    if not passes:
        assert reasons == (
            f"accuracy_change +0.00 pt [{low * 100:+.2f} pt, +5.00 pt] is not above -2.00 pt with its whole interval",
        )


@pytest.mark.parametrize(("low", "passes"), [(0.99, False), (1.0, False), (1.01, True)])
def test_the_whole_interval_of_the_speedup_must_lie_above_one(low: float, passes: bool) -> None:
    assert (verdict(replace(GOOD, speedup=Interval(1.5, low, 2.0)))[0] == "passed") is passes


@pytest.mark.parametrize(
    ("gates", "named"),
    [
        ({"accuracy": Bound(min=0.885)}, "accuracy 90.0% [88.0%, 92.0%] is not above 88.5%"),
        ({"accuracy": Bound(max=0.91)}, "is not below 91.0%"),
        ({"latency_ms": Bound(max=2.05)}, "latency_ms 2.000 ms [1.900 ms, 2.100 ms] is not below 2.050 ms"),
        ({"size_bytes": Bound(max=1000)}, "size_bytes 1,000 is not below 1,000"),
        ({"throughput_per_s": Bound(min=495)}, "throughput_per_s 500 [490, 510] is not above 495"),
        ({"memory_bytes": Bound(max=4999)}, "memory_bytes 5,000 is not below 4,999"),
        ({"first_inference_s": Bound(max=0.5)}, "first_inference_s 0.5 s is not below 0.5 s"),
        ({"energy_mj": Bound(max=3.05)}, "energy_mj 3 mJ [2.9 mJ, 3.1 mJ] is not below 3.05 mJ with its whole"),
        ({"speedup": Bound(min=1.0, max=2.1)}, "speedup 2.00× [1.80×, 2.20×] is not below 2.10×"),
    ],
)
def test_each_gate_says_what_it_refused(gates: dict[str, Bound], named: str) -> None:
    got, reasons = verdict(GOOD, **gates)
    assert got == "rejected"
    assert len(reasons) == 1
    assert named in reasons[0]


def test_numbers_within_the_gates_of_energy_memory_and_start_pass() -> None:
    gates = {
        "energy_mj": Bound(max=3.2),
        "memory_bytes": Bound(max=5001),
        "first_inference_s": Bound(max=0.6),
        "throughput_per_s": Bound(min=489),
        "latency_ms": Bound(max=2.2),
    }
    assert verdict(GOOD, **gates) == ("passed", ())
    times = {"p50": 2.0, "p90": 2.2, "p99": 2.5, "n": 700, "batch": 1}
    p99 = replace(GOOD, latency_ms=times, latency_bounds_ms={"p99": Interval(2.5, 2.3, 2.6)})
    assert verdict(p99, latency_ms_p99=Bound(max=2.7)) == ("passed", ())
    assert verdict(p99, latency_ms_p99=Bound(max=2.55))[0] == "rejected"
    assert verdict(replace(p99, latency_bounds_ms={}), latency_ms_p99=Bound(max=9)) == (
        "rejected",
        (
            "latency_ms_p99 2.500 ms has no interval: 700 calls in these windows don't bound it; "
            "raise benchmark.rounds or window_ms",
        ),
    )
    old = replace(p99, latency_bounds_ms={}, throughput_bounds={})
    told = "latency_ms_p99 2.500 ms has no interval on record: run `dvc repro -f benchmark@good`"
    assert verdict(old, latency_ms_p99=Bound(max=9)) == ("rejected", (told,))
    endless = replace(p99, latency_bounds_ms={"p99": Interval(2.5, 2.3, math.inf)})
    assert verdict(endless, latency_ms_p99=Bound(max=9))[1][0].startswith("latency_ms_p99 has no finite number")


def test_memory_is_that_of_the_device_that_the_engine_runs_on() -> None:
    on_gpu = replace(GOOD, cost=Cost(host_peak_bytes=100, device_peak_bytes=9000))
    assert metric(on_gpu, "memory_bytes") == Interval(9000, 9000, 9000)
    assert metric(GOOD, "memory_bytes") == Interval(5000, 5000, 5000)


@pytest.mark.parametrize(
    ("change", "gate", "reason"),
    [
        (
            {"cost": Cost(energy_reason="no RAPL here")},
            {"energy_mj": Bound(max=9)},
            "energy_mj has no finite number: no RAPL here",
        ),
        ({"cost": Cost()}, {"memory_bytes": Bound(max=9)}, "memory_bytes has no finite number"),
        ({"cost": Cost()}, {"first_inference_s": Bound(max=9)}, "first_inference_s has no finite number"),
        (
            {"throughput_per_s": None, "throughput_bounds": {}},
            {"throughput_per_s": Bound(min=1)},
            "throughput_per_s has no finite number",
        ),
        (
            {},
            {"latency_ms_p99": Bound(max=9)},
            "latency_ms_p99 has no finite number: it takes 662 calls, 30 were timed; "
            "raise benchmark.rounds or window_ms",
        ),
        (
            {"clock": "device"},
            {"latency_ms_p99": Bound(max=9)},
            "latency_ms_p99 has no finite number: with clock: device a time is the mean of several calls, which has "
            "no p99 of single ones",
        ),
        (
            {
                "clock": "device",
                "latency_ms": {"p50": None, "p90": None, "p99": None, "n": 9, "batch": 1},
                "latency_bounds_ms": {},
            },
            {"latency_ms": Bound(max=9)},
            "latency_ms has no finite number: it takes 11 calls, 9 were timed; raise benchmark.rounds or window_ms",
        ),
    ],
    ids=["no meter", "no memory", "no start", "no throughput", "too few calls", "means of calls", "too few for p50"],
)
def test_a_number_that_is_missing_fails_its_gate_with_the_reason(
    change: dict[str, Any], gate: dict[str, Bound], reason: str
) -> None:
    assert verdict(replace(GOOD, **change), **gate) == ("rejected", (reason,))


def test_an_energy_of_a_disturbed_window_fails_its_gate() -> None:
    disturbed = replace(GOOD, cost=replace(GOOD.cost, energy_disturbed="power limit"))
    assert verdict(disturbed) == ("passed", ()), "without the gate it is told elsewhere"
    assert verdict(disturbed, energy_mj=Bound(max=9)) == (
        "rejected",
        ("energy_mj was measured in a disturbed window: power limit",),
    )


def test_every_gate_that_fails_gives_a_reason() -> None:
    slow = replace(GOOD, speedup=Interval(0.5, 0.4, 0.6), accuracy_change=Interval(-0.1, -0.2, 0.0))
    assert len(verdict(slow)[1]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy_change": None},
        {"speedup": None},
        {"speedup": Interval(math.nan, math.nan, math.nan)},
        {"speedup": Interval(math.inf, 2.0, math.inf)},
        {"accuracy_change": Interval(0.0, 0.0, math.nan)},
    ],
)
def test_only_finite_and_complete_numbers_pass(change: dict[str, Interval | None]) -> None:
    got, reasons = verdict(replace(GOOD, **change))
    assert (got, reasons) == ("rejected", (f"{next(iter(change))} has no finite number",))


EVIDENCE = Evidence("cpu", "int8", {"int8": 3}, None, None, (), 9, 5, False)
FLOAT = "asked for int8, found in 0 of 3 products (3 fp32)"


@pytest.mark.parametrize(
    ("evidence", "reasons"),
    [
        (EVIDENCE, ()),
        (replace(EVIDENCE, precision_found={"fp32": 3}, not_as_asked=FLOAT), (f"as_asked: {FLOAT}",)),
        (
            replace(EVIDENCE, precision_found={}, not_as_asked="asked for 2:4 kernels, found none"),
            ("as_asked: asked for 2:4 kernels, found none",),
        ),
        (replace(EVIDENCE, precision_found={}), ("as_asked: onnxruntime doesn't tell in which precision it runs",)),
        (
            replace(EVIDENCE, precision_found={"unknown": 3}),
            ("as_asked: onnxruntime doesn't tell in which precision it runs",),
        ),
        (None, ("as_asked: onnxruntime doesn't tell in which precision it runs",)),
    ],
    ids=["as asked", "in floating point", "not sparse", "no products", "not told", "no record"],
)
def test_a_gate_refuses_what_is_not_as_asked(evidence: Evidence | None, reasons: tuple[str, ...]) -> None:
    told = (evidence.not_as_asked,) if evidence and evidence.not_as_asked else ()
    variant = replace(GOOD, evidence=evidence, reasons=told)
    judged = judge(variant, GateParams(as_asked=True), BASE)
    assert (judged.verdict, judged.reasons) == ("rejected" if reasons else "passed", reasons)
    assert judge(variant, GateParams(), BASE).reasons == told, "without the gate it is told, and passes"
    assert judge(variant, GateParams(), BASE).verdict == "passed"


def test_other_test_data_is_rejected() -> None:
    got, reasons = verdict(replace(GOOD, test_sha256="u"))
    assert (got, reasons) == ("rejected", ("it was evaluated on other test data than the baseline",))


def test_the_baseline_is_never_promoted() -> None:
    even = replace(GOOD, name="base", speedup=Interval(1.01, 0.99, 1.03))
    assert verdict(even) == ("rejected", ("it is the baseline",))


def test_a_baseline_that_is_not_as_fast_as_itself_is_told() -> None:
    told = verdict(replace(GOOD, name="base", speedup=Interval(1.02, 1.004, 1.04)))[1]
    assert told[1].startswith("timed against itself it is 1.02× [1.004×, 1.04×]: trust no speed-up")


@pytest.mark.parametrize("baseline", [None, replace(BASE, accuracy=None)])
def test_without_a_baseline_nothing_passes(baseline: Variant | None) -> None:
    assert judge(GOOD, GateParams(), baseline).verdict == "rejected"


@pytest.mark.parametrize("kept", ["failed", "not_run", "unstable"])
def test_an_earlier_verdict_stays(kept: str) -> None:
    variant = replace(GOOD, verdict=kept, reasons=("because",))
    assert judge(variant, GateParams(), BASE) == variant


def test_a_variant_without_measurements_has_no_metric() -> None:
    bare = Variant("bare", ("bare",), "eager")
    assert [metric(bare, name) for name, _ in GateParams() if name != "as_asked"] == [None] * 10


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.987, "98.7%"),
        ("accuracy_change", -0.0123, "-1.23 pt"),
        ("speedup", 1.5, "1.50×"),
        ("latency_ms", 0.1234, "0.123 ms"),
        ("size_bytes", 12345, "12,345"),
        ("latency_ms_p99", 1.5, "1.500 ms"),
        ("energy_mj", 0.012345, "0.0123 mJ"),
        ("first_inference_s", 1.2345, "1.23 s"),
        ("throughput_per_s", 12345.6, "12,346"),
        ("throughput_per_s", 0.4321, "0.4321"),
        ("speedup", Interval(1.5, 1.4, 1.6), "1.50× [1.40×, 1.60×]"),
        ("latency_ms", Interval(2.0, 2.0, 2.0), "2.000 ms"),
    ],
)
def test_numbers_are_shown_as_people_read_them(name: str, value: float | Interval, text: str) -> None:
    assert shown(name, value) == text

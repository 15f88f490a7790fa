"""The scorecards as text and as a plot."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tasks.plaster_page import BY_DEVICE, bytes_text, cells, duration, notes, rate
from tasks.plaster_plot import AXES, Scale, axes, figure, parallel
from tasks.report_plot import COLORS
from tasks.table import show_plaster

INTERVAL = {"value": 0.9, "low": 0.88, "high": 0.92}


def variant(name: str, verdict: str = "passed", p50: float | None = 2.0, **letters: Any) -> dict[str, Any]:
    """An entry of the summary, as far as scorecards are shown of it; without a p50 it was not run."""
    card = {
        "programmability": {"steps": 4, "settings": 9, "backends": ["onnxruntime", "tensorrt"]},
        "latency": {"p50_ms": p50, "p99_ms": None, "batch": 1} if p50 else None,
        "accuracy": INTERVAL if p50 else None,
        "size": {"engine_bytes": 2048, "memory_bytes": 3 << 20},
        "throughput": {"1": 500.0, "32": 9000.0} if p50 else {},
        "energy_efficiency": {"inferences_per_joule": None, "reason": "no meter" if p50 else "not run here"},
        "rate_of_learning": {"seconds": 61.0, "at_least": False, "reason": None, "by_stage": {}},
        **letters,
    }
    latency = {"p50": p50, "p90": None, "p99": None, "n": 30, "batch": 1} if p50 else None
    times = {"latency_ms": latency, "latency_bounds_ms": {}, "throughput_bounds": {}}
    return {"name": name, "also": [], "verdict": verdict, "speedup": None, "plaster": card, **times}


def summary(*variants: dict[str, Any]) -> dict[str, Any]:
    return {"workload": "tiny", "target": {"name": "a machine"}, "baseline": "base", "variants": list(variants)}


def test_a_card_as_text() -> None:
    bounds = {"p50": {"value": 2.0, "low": 1.9, "high": 2.25}}
    rates = {"32": {"value": 9000.0, "low": 8700.4, "high": 9100.0}}
    card = cells({**variant("best"), "latency_bounds_ms": bounds, "throughput_bounds": rates})
    assert card == {
        "variant": "best",
        "steps": "4",
        "settings": "9",
        "backends": "onnxruntime, tensorrt",
        "latency": "2.000 ms [1.900, 2.250]",
        "latency_p99": "–",
        "accuracy": "90.0% [88.0%, 92.0%]",
        "size": "2 KiB",
        "memory": "3.0 MiB",
        "throughput_1": "500/s",
        "throughput_32": "9,000/s [8,700, 9,100]",
        "energy": "–",
        "learning": "61 s",
        "verdict": "passed",
    }


def test_a_lower_bound_is_shown_as_one_and_a_missing_number_as_a_dash() -> None:
    learning = {"seconds": 130.0, "at_least": True, "reason": None, "by_stage": {}}
    assert cells(variant("v", rate_of_learning=learning))["learning"] == "≥ 2.2 min"
    unknown = {**learning, "seconds": None, "at_least": False, "reason": "no time is recorded of build@v"}
    assert cells(variant("v", rate_of_learning=unknown))["learning"] == "–"
    assert cells(variant("v"))["latency"] == "2.000 ms"
    p99 = {"p99": {"value": 3.0, "low": 2.5, "high": 4.0}}
    assert cells({**variant("v"), "latency_bounds_ms": p99})["latency"] == "2.000 ms, not bounded"
    bare = cells(variant("v", p50=None))
    assert (bare["latency"], bare["accuracy"], bare.get("throughput_1")) == ("–", "–", None)


def test_notes_tell_why_letters_are_missing_each_once_and_of_what_ran_only() -> None:
    told = notes(summary(variant("a"), variant("b"), variant("rtx", "not_run", p50=None)))
    assert told == ["No energy efficiency: no meter."]
    part = {"seconds": 1.0, "at_least": True, "reason": None, "by_stage": {}}
    none = {"seconds": None, "at_least": False, "reason": "no time is recorded of build@b", "by_stage": {}}
    told = notes(summary(variant("a", rate_of_learning=part), variant("b", rate_of_learning=none)))
    assert told[1:] == [
        "No rate of learning: no time is recorded of build@b.",
        "≥: of some steps only a part is recorded; such a sum isn't drawn.",
    ]


def test_times_of_the_gpus_clock_are_said_to_be_its_own() -> None:
    card = variant("v")["plaster"]
    timed = {**variant("v"), "clock": "device", "latency_ms": {"p50": None}, "plaster": card}
    card["latency"]["p50_ms"] = None
    assert notes(summary(timed))[0] == BY_DEVICE
    assert "Latency<br>p50" not in [axis.heading for axis, _ in axes([card])], "the note says why"
    assert BY_DEVICE not in notes(summary({**timed, "clock": "host"}, {**timed, "latency_ms": None}))


def test_a_lower_bound_is_not_drawn() -> None:
    """It would stand higher, which is better, than what is known in full."""
    part = {"seconds": 1.0, "at_least": True, "reason": None, "by_stage": {}}
    lines = {
        line.hovertemplate: line for line in figure(summary(variant("a", rate_of_learning=part), variant("b"))).data
    }
    assert [line.y[-1] for name, line in lines.items() if "<b>a</b>" in name] == [None]
    assert [line.y[-1] for name, line in lines.items() if "<b>b</b>" in name] == [0.5]


@pytest.mark.parametrize(
    ("scale", "values", "places"),
    [
        (Scale(1.0, 5.0, True), (1.0, 3.0, 5.0), (0.0, 0.5, 1.0)),
        (Scale(1.0, 5.0, False), (1.0, 3.0, 5.0), (1.0, 0.5, 0.0)),
        (Scale(1.0, 100.0, True), (1.0, 10.0, 100.0), (0.0, 0.5, 1.0)),
        (Scale(1.0, 100.0, False), (1.0, 10.0, 100.0), (1.0, 0.5, 0.0)),
        (Scale(0.0, 100.0, True), (0.0, 50.0, 100.0), (0.0, 0.5, 1.0)),
        (Scale(7.0, 7.0, False), (7.0,), (0.5,)),
    ],
    ids=["more is better", "less is better", "decades", "decades, less is better", "from zero", "all the same"],
)
def test_up_is_better_and_decades_are_logarithmic(scale: Scale, values: Any, places: Any) -> None:
    assert [scale.place(v) for v in values] == pytest.approx(list(places))
    assert scale.ticks() == pytest.approx(list(values))


def test_each_axis_points_to_what_is_better() -> None:
    poor = variant(
        "poor",
        p50=9.0,
        programmability={"steps": 9, "settings": 9, "backends": []},
        accuracy={**INTERVAL, "value": 0.5},
        size={"engine_bytes": 9000, "memory_bytes": None},
        throughput={"1": 5.0},
        energy_efficiency={"inferences_per_joule": {"value": 1.0}, "reason": None},
        rate_of_learning={"seconds": 900.0, "at_least": False, "reason": None, "by_stage": {}},
    )["plaster"]
    good = {**variant("good")["plaster"], "energy_efficiency": {"inferences_per_joule": {"value": 9.0}}}
    placed = axes([poor, good])
    assert len(placed) == len(AXES) == 7
    for axis, scale in placed:
        worse, better = axis.value(poor), axis.value(good)
        assert worse is not None and better is not None
        assert (scale.place(worse), scale.place(better)) == (0.0, 1.0), axis.heading


def test_an_axis_that_nothing_was_measured_on_is_left_out() -> None:
    assert [a.heading for a, _ in axes([variant("v")["plaster"]])] == [
        a.heading for a in AXES if a.heading != "Energy<br>efficiency"
    ]


def test_the_plot_has_a_line_for_each_variant_coloured_by_verdict() -> None:
    told = summary(variant("base", "rejected", 9.0), variant("best", "promoted"), variant("rtx", "not_run", None))
    lines = {line.hovertemplate.split("<b>")[1].split("</b>")[0]: line for line in figure(told).data}
    assert set(lines) == {"base", "best", "rtx"}
    assert {name: line.line.color for name, line in lines.items()} == {
        "base": COLORS["rejected"],
        "best": COLORS["promoted"],
        "rtx": COLORS["not_run"],
    }
    assert (lines["base"].line.dash, lines["best"].line.dash) == ("dash", "solid")
    assert lines["best"].text[:2] == ("4", "2 ms") and lines["base"].y[1] == 0.0 and lines["best"].y[1] == 1.0
    assert lines["rtx"].y[1] is None and lines["rtx"].y[3] == 0.5, "a gap where nothing was measured"
    assert figure(told).data[-1].name == "promoted", "drawn over the others"
    assert "<script" in parallel(told) and len(parallel(told)) < 100_000, "without plotly's script"


def test_the_terminal_prints_every_card_and_the_notes() -> None:
    stream = io.StringIO()
    odd = variant("odd[red]", "unstable")
    show_plaster(
        summary(variant("best", "promoted"), odd, {**odd, "name": "old", "plaster": None}),
        Console(file=stream, width=220),
    )
    text = stream.getvalue()
    best = next(line for line in text.splitlines() if "best" in line)
    for part in (" 4 ", " 9 ", "2.000 ms", "90.0% [88.0%, 92.0%]", "3.0 MiB", "9,000/s", "61 s"):
        assert part in best
    assert "efficiency" not in text.splitlines()[3], "no column without a meter"
    assert "odd[red]" in text and "old" not in text and "No energy efficiency: no meter." in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (bytes_text(None), "–"),
        (bytes_text(1024), "1 KiB"),
        (bytes_text(5 << 20), "5.0 MiB"),
        (rate(12.345), "12.3"),
        (rate(12345.6), "12,346"),
        (duration(9.94), "9.9 s"),
        (duration(119.0), "119 s"),
        (duration(120.0), "2.0 min"),
    ],
)
def test_numbers_are_short(text: str, shown: str) -> None:
    assert text == shown


def test_with_a_meter_energy_has_a_column_and_an_axis() -> None:
    metered = {"inferences_per_joule": {"value": 250.0, "low": 200.0, "high": 500.0}, "reason": None}
    stream, told = io.StringIO(), summary(variant("best", energy_efficiency=metered), variant("other"))
    show_plaster(told, Console(file=stream, width=220))
    assert "efficiency" in stream.getvalue().splitlines()[3] and "250/J [200, 500]" in stream.getvalue()
    assert list(figure(told).layout.xaxis.ticktext) == [axis.heading for axis in AXES]

"""The PLASTER scorecards of a summary as text, and as parallel coordinates: one axis a letter, up is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.gates import shown
from tasks.report_plot import COLORS
from tasks.stats import Interval

DECADE = 10.0


def bytes_text(value: float | None) -> str:
    """Bytes in KiB or MiB, a dash without."""
    if value is None:
        return "–"
    return f"{value / 1024:,.0f} KiB" if value < 2**20 else f"{value / 2**20:,.1f} MiB"


def rate(value: float) -> str:
    """A rate to three digits, or whole above a thousand."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds to a tenth below ten; minutes from two on."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def batches(summary: dict[str, Any]) -> list[str]:
    """Batch sizes of the scorecards' throughput, as text, in rising order."""
    cards = [v["plaster"] for v in summary["variants"] if v.get("plaster")]
    return sorted({batch for card in cards for batch in card["throughput"]}, key=int)


def cells(variant: dict[str, Any]) -> dict[str, str]:
    """A scorecard's letters as text; dashes where nothing was measured, throughput as `throughput_BATCH`."""
    card = variant["plaster"]
    steps, latency, learning = card["programmability"], card["latency"], card["rate_of_learning"]
    efficiency, p99 = card["energy_efficiency"]["inferences_per_joule"], latency["p99_ms"] if latency else None
    return {
        "variant": " = ".join((variant["name"], *variant["also"])),
        "steps": str(steps["steps"]),
        "settings": str(steps["settings"]),
        "backends": ", ".join(steps["backends"]),
        "latency": f"{latency['p50_ms']:.3f} ms" if latency and latency["p50_ms"] is not None else "–",
        "latency_p99": f"{p99:.3f} ms" if p99 is not None else "–",
        "accuracy": shown("accuracy", Interval(**card["accuracy"])) if card["accuracy"] else "–",
        "size": bytes_text(card["size"]["engine_bytes"]),
        "memory": bytes_text(card["size"]["memory_bytes"]),
        **{f"throughput_{batch}": f"{rate(value)}/s" for batch, value in card["throughput"].items()},
        "energy": f"{rate(efficiency['value'])}/J" if efficiency else "–",
        "learning": _learning(learning),
        "verdict": variant["verdict"],
    }


def _learning(learning: dict[str, Any]) -> str:
    if learning["seconds"] is None:
        return "–"
    return ("≥ " if learning["at_least"] else "") + duration(learning["seconds"])


def metered(summary: dict[str, Any]) -> bool:
    """Whether at least one scorecard has an energy efficiency."""
    cards = [v["plaster"] for v in summary["variants"] if v.get("plaster")]
    return any(card["energy_efficiency"]["inferences_per_joule"] for card in cards)


def notes(summary: dict[str, Any]) -> list[str]:
    """Why letters have no number, each reason once."""
    cards = [v["plaster"] for v in summary["variants"] if v.get("plaster")]
    measured = [card for card in cards if card["latency"]]
    energy = dict.fromkeys(c["energy_efficiency"]["reason"] for c in measured if c["energy_efficiency"]["reason"])
    learning = dict.fromkeys(c["rate_of_learning"]["reason"] for c in cards if c["rate_of_learning"]["reason"])
    partly = any(card["rate_of_learning"]["at_least"] for card in cards)
    return [
        *(f"No energy efficiency: {reason}." for reason in energy),
        *(f"No rate of learning: {reason}." for reason in list(learning)[:1]),
        *(["≥: of some steps only the training's own time is recorded."] if partly else []),
    ]


def section(summary: dict[str, Any]) -> dict[str, Any]:
    """What the page's template takes: the plot, rows, batch sizes and notes; no rows without scorecards."""
    scored = [v for v in summary["variants"] if v.get("plaster")]
    if not scored:
        return {"rows": []}
    rows = [cells(v) for v in scored]
    shown_by = {"batches": batches(summary), "metered": metered(summary), "notes": notes(summary)}
    return {"plot": parallel(summary), "rows": rows, **shown_by}


@dataclass(frozen=True)
class Axis:
    """One letter: its heading, a card's value or None, whether more is better, and the value as text."""

    heading: str
    value: Callable[[dict[str, Any]], float | None]
    more: bool
    text: Callable[[float], str]


def _latency(card: dict[str, Any]) -> float | None:
    return card["latency"]["p50_ms"] if card["latency"] else None


def _accuracy(card: dict[str, Any]) -> float | None:
    return card["accuracy"]["value"] if card["accuracy"] else None


def _efficiency(card: dict[str, Any]) -> float | None:
    found = card["energy_efficiency"]["inferences_per_joule"]
    return found["value"] if found else None


AXES = (
    Axis("Programmability<br>steps", lambda c: c["programmability"]["steps"], False, lambda v: f"{v:.3g}"),
    Axis("Latency<br>p50", _latency, False, lambda v: f"{v:.3g} ms"),
    Axis("Accuracy", _accuracy, True, lambda v: f"{v:.1%}"),
    Axis("Size<br>engine", lambda c: c["size"]["engine_bytes"], False, bytes_text),
    Axis(
        "Throughput<br>best batch",
        lambda c: max(c["throughput"].values(), default=None),
        True,
        lambda v: f"{rate(v)}/s",
    ),
    Axis("Energy<br>efficiency", _efficiency, True, lambda v: f"{rate(v)}/J"),
    Axis("Rate of<br>learning", lambda c: c["rate_of_learning"]["seconds"], False, duration),
)


@dataclass(frozen=True)
class Scale:
    """Places values of an axis in 0 … 1, up is better: logarithmic where they span a decade."""

    low: float
    high: float
    more: bool

    @property
    def logarithmic(self) -> bool:
        return self.low > 0 and self.high / self.low >= DECADE

    def place(self, value: float) -> float:
        """The height of a value; a half where all are the same."""
        if self.high == self.low:
            return 0.5
        if self.logarithmic:
            height = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            height = (value - self.low) / (self.high - self.low)
        return height if self.more else 1 - height

    def ticks(self) -> list[float]:
        """The values at the foot, the middle and the top; one where all are the same."""
        if self.high == self.low:
            return [self.low]
        middle = math.sqrt(self.low * self.high) if self.logarithmic else (self.low + self.high) / 2
        return [self.low, middle, self.high]


def axes(cards: Sequence[dict[str, Any]]) -> list[tuple[Axis, Scale]]:
    """The axes that at least one scorecard has a value of, with their scales."""
    found = []
    for axis in AXES:
        values = [value for card in cards if (value := axis.value(card)) is not None]
        if values:
            found.append((axis, Scale(min(values), max(values), axis.more)))
    return found


def parallel(summary: dict[str, Any]) -> str:
    """The figure as HTML that needs plotly's script on the page."""
    return str(figure(summary).to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def figure(summary: dict[str, Any]) -> Any:
    """All scorecards as lines over the letters, coloured by verdict; with gaps where something wasn't measured."""
    import plotly.graph_objects as go

    made, variants = go.Figure(), [v for v in summary["variants"] if v.get("plaster")]
    drawn = sorted(variants, key=lambda v: (-list(COLORS).index(v["verdict"]), v["name"] == summary["baseline"]))
    placed, told = axes([v["plaster"] for v in variants]), set[str]()
    for variant in drawn:
        verdict, baseline = variant["verdict"], variant["name"] == summary["baseline"]
        values = [axis.value(variant["plaster"]) for axis, _ in placed]
        made.add_scatter(
            name=verdict,
            legendgroup=verdict,
            legendrank=list(COLORS).index(verdict),
            showlegend=verdict not in told,
            x=list(range(len(placed))),
            y=[None if v is None else scale.place(v) for v, (_, scale) in zip(values, placed, strict=True)],
            mode="lines+markers",
            line={
                "color": COLORS[verdict],
                "width": 4 if verdict == "promoted" else 1.5,
                "dash": "dash" if baseline else "solid",
            },
            marker={"size": 8 if verdict == "promoted" else 5},
            opacity=1 if verdict == "promoted" or baseline else 0.6,
            text=["–" if v is None else axis.text(v) for v, (axis, _) in zip(values, placed, strict=True)],
            hovertemplate=f"<b>{variant['name']}</b><br>%{{text}}<extra></extra>",
        )
        told.add(verdict)
    _draw_axes(made, placed)
    return made


def _draw_axes(made: Any, placed: Sequence[tuple[Axis, Scale]]) -> None:
    for x, (axis, scale) in enumerate(placed):
        made.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, line={"color": "#57606a", "width": 1}, layer="below")
        for tick in scale.ticks():
            made.add_annotation(
                x=x,
                y=scale.place(tick),
                text=axis.text(tick),
                showarrow=False,
                xanchor="left",
                xshift=6,
                font={"size": 11, "color": "#57606a"},
                bgcolor="rgba(255,255,255,0.8)",
            )
    made.update_layout(
        template="plotly_white",
        height=460,
        margin={"t": 60, "b": 20, "l": 50, "r": 90},
        hovermode="closest",
        xaxis={
            "side": "top",
            "tickvals": list(range(len(placed))),
            "ticktext": [axis.heading for axis, _ in placed],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
        yaxis={"visible": False, "range": [-0.06, 1.06], "fixedrange": True},
    )

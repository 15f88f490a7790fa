"""The PLASTER scorecards on the report's page: a table, and parallel coordinates, one axis a letter, up is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.plaster_page import batches, bytes_text, cells, duration, metered, notes, rate
from tasks.report_plot import COLORS

DECADE = 10.0


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


def _learned(card: dict[str, Any]) -> float | None:
    """The seconds; None where they are a lower bound, which would look better than it is."""
    found = card["rate_of_learning"]
    return None if found["at_least"] else found["seconds"]


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
    Axis("Rate of<br>learning", _learned, False, duration),
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

"""The plot of the report page: accuracy over speed-up, and the Pareto front."""

from __future__ import annotations

import math
from typing import Any

TICKS = [0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100]
SLANT = 35
COLORS = {
    "promoted": "#1a7f37",
    "passed": "#0969da",
    "rejected": "#8c959f",
    "unstable": "#bf8700",
    "failed": "#cf222e",
    "not_run": "#8c959f",
}


def pareto(summary: dict[str, Any]) -> str:
    """Accuracy over speed-up, with intervals, and the front of what passed, as HTML."""
    import plotly.graph_objects as go

    figure = go.Figure()
    drawn = sorted(
        (v for v in summary["variants"] if v["accuracy"] and v["speedup"]), key=lambda v: v["speedup"]["value"]
    )
    for verdict in sorted({v["verdict"] for v in drawn}, key=list(COLORS).index):
        group = [v for v in drawn if v["verdict"] == verdict]
        figure.add_scatter(
            name=verdict,
            x=[v["speedup"]["value"] for v in group],
            y=[v["accuracy"]["value"] for v in group],
            error_x=_bars(group, "speedup"),
            error_y=_bars(group, "accuracy"),
            text=[v["name"] for v in group],
            mode="markers",
            marker={
                "size": 10,
                "color": COLORS[verdict],
                "symbol": ["diamond" if v["name"] == summary["baseline"] else "circle" for v in group],
            },
            hovertemplate="%{text}<br>%{x:.2f}× · %{y:.1%}<extra></extra>",
        )
    front = _front([v for v in drawn if v["verdict"] in ("promoted", "passed")])
    figure.add_scatter(
        name="front",
        x=[v["speedup"]["value"] for v in front],
        y=[v["accuracy"]["value"] for v in front],
        mode="lines",
        line={"dash": "dot", "color": "#57606a", "shape": "vh"},
    )
    for place, variant in enumerate(drawn):
        figure.add_annotation(_label(variant, up=place % 2 == 0))
    figure.update_layout(
        template="plotly_white",
        height=520,
        margin={"t": 60, "r": 160},
        xaxis_title=f"speed-up over {summary['baseline']} (log)",
        yaxis_title=summary["metric"],
        xaxis_type="log",
        xaxis_tickvals=TICKS,
        yaxis_tickformat=".1%",
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}))


def _label(variant: dict[str, Any], up: bool) -> dict[str, Any]:
    """A variant's name beside its point, slanted, so that close ones don't cover each other."""
    return {
        "x": math.log10(variant["speedup"]["value"]),
        "y": variant["accuracy"]["value"],
        "text": variant["name"],
        "textangle": -SLANT if up else SLANT,
        "xanchor": "left",
        "yanchor": "bottom" if up else "top",
        "xshift": 4,
        "yshift": 4 if up else -4,
        "showarrow": False,
        "font": {"size": 11},
    }


def _bars(group: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [v[key]["high"] - v[key]["value"] for v in group],
        "arrayminus": [v[key]["value"] - v[key]["low"] for v in group],
        "thickness": 1,
        "color": "#8c959f",
    }


def _front(passed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    front: list[dict[str, Any]] = []
    for variant in sorted(passed, key=lambda v: -v["speedup"]["value"]):
        if not front or variant["accuracy"]["value"] > front[-1]["accuracy"]["value"]:
            front.append(variant)
    return front

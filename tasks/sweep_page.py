"""A sweep as a table in the terminal and as a page with its plot."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from rich.console import Console
from rich.table import Table

from tasks import monitor
from tasks.clustered import in_two_lines
from tasks.sweep import JUDGED, Point, Sweep, fit

PALETTE = ("#0969da", "#1a7f37", "#bf8700", "#cf222e", "#8250df", "#57606a")
RIVALS = 4
STYLE = "font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1240px; margin: 2rem auto; padding: 0 1rem"


def show(found: Sweep, console: Console) -> None:
    """Print all points, the best, and the conditions."""
    limit = found.max_latency_ms
    table = Table("streams", "batch", "p50 ms", "p90 ms", "p99 ms", "calls", "samples a second", "thrown away", "")
    for point in found.points:
        cells = (in_two_lines(getattr(point, key), point.bounds.get(key), 3) for key in ("p50", "p90", "p99"))
        t = point.throughput_per_s
        thrown = str(sum(point.discarded.values()))
        table.add_row(
            *(str(point.streams), str(point.batch), *cells, str(point.n)),
            *(f"{t.value:,.0f}\n[{t.low:,.0f}, {t.high:,.0f}]", thrown, _mark(point, found)),
        )
    console.print(table)
    console.print(verdict(found), highlight=False)
    for streams, why in found.skipped.items():
        console.print(f"{streams} streams weren't measured: {why}", highlight=False)
    console.print(*monitor.lines(asdict(found.conditions)), sep="\n", highlight=False)
    if limit is None:
        console.print("benchmark.max_latency_ms sets a limit", highlight=False)


def verdict(found: Sweep) -> str:
    """The best point in a sentence."""
    limit = "" if found.max_latency_ms is None else f" with p{JUDGED} within {found.max_latency_ms:g} ms"
    if found.best is None and found.max_latency_ms is None:
        return f"{found.engine}: no point was undisturbed; measure again when the machine is quiet"
    if found.best is None:
        return f"{found.engine}: no undisturbed point is known to have p{JUDGED} within {found.max_latency_ms:g} ms"
    b = found.best
    t = b.throughput_per_s
    fitting = fit(found.points, found.max_latency_ms)
    alike = [p for p in fitting if p is not b and p.throughput_per_s.high >= t.low]
    named = [f"batch {p.batch} in {p.streams}" for p in sorted(alike, key=lambda p: -p.throughput_per_s.value)]
    rivals = ", ".join(named[:RIVALS]) + (f" and {len(named) - RIVALS} more" if len(named) > RIVALS else "")
    return (
        f"{found.engine}: the most throughput{limit} is {t.value:,.0f} samples a second [{t.low:,.0f}, {t.high:,.0f}], "
        f"at batch {b.batch} in {b.streams} stream{'s' if b.streams > 1 else ''}"
        + (f"; not told apart from it: {rivals}" if rivals else "")
        + (" (interrupted)" if found.interrupted else "")
    )


def page(found: Sweep) -> str:
    """A page that needs no network: throughput over latency, one line a number of streams."""
    words = "".join(f"<p>{escape(line)}</p>" for line in (verdict(found), *monitor.lines(asdict(found.conditions))))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sweep of {escape(found.engine)}</title>'
        f'</head><body style="{STYLE}"><h1>Sweep of {escape(found.engine)}</h1>'
        f"<p>Each point is a batch size; latency is of a call, p{JUDGED}, from arrays to arrays; bars are intervals "
        f"of the throughput over {found.rounds} rounds.</p>{plot(found)}{words}</body></html>\n"
    )


def plot(found: Sweep) -> str:
    """Throughput over latency as HTML, with the limit."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for number, streams in enumerate(sorted({p.streams for p in found.points})):
        line = [p for p in found.points if p.streams == streams and p.p90 is not None]
        figure.add_scatter(
            name=f"{streams} stream{'s' if streams > 1 else ''}",
            x=[p.p90 for p in line],
            y=[p.throughput_per_s.value for p in line],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [p.throughput_per_s.high - p.throughput_per_s.value for p in line],
                "arrayminus": [p.throughput_per_s.value - p.throughput_per_s.low for p in line],
                "thickness": 1,
                "color": "#8c959f",
            },
            text=[str(p.batch) for p in line],
            mode="lines+markers+text",
            textposition="top left",
            line={"color": PALETTE[number % len(PALETTE)]},
            hovertemplate="batch %{text}<br>%{x:.3f} ms · %{y:,.0f}/s<extra></extra>",
        )
    if found.max_latency_ms is not None:
        rates = [p.throughput_per_s.value for p in found.points]
        figure.add_scatter(
            name="limit",
            x=[found.max_latency_ms] * 2,
            y=[min(rates, default=1), max(rates, default=1)],
            mode="lines",
            line={"dash": "dot", "color": "#cf222e"},
        )
    figure.update_layout(
        template="plotly_white",
        height=520,
        margin={"t": 20, "r": 90},
        xaxis_title=f"latency p{JUDGED}, ms (log)",
        yaxis_title="samples a second (log)",
        xaxis_type="log",
        yaxis_type="log",
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}))


def _mark(point: Point, found: Sweep) -> str:
    told = {True: "within", False: "too slow", None: "" if found.max_latency_ms is None else "not known"}
    words = ["best" if point == found.best else told[point.within], "disturbed" if point.disturbed else ""]
    return ", ".join(word for word in words if word)

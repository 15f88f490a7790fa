"""The summary as a table in the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tasks import conditions_table, plaster_page
from tasks.gates import shown
from tasks.report import batches, metered, ordered, reopened, row, unmetered
from tasks.stats import Interval

if TYPE_CHECKING:
    from tasks.account import AccountReport
    from tasks.closed_form import ClosedForm

LIBRARIES = ("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13")
STYLES = {
    "promoted": "bold green",
    "passed": "green",
    "rejected": "dim",
    "unstable": "yellow",
    "failed": "red",
    "not_run": "dim",
}
ALWAYS = ("variant", "accuracy", "speedup", "verdict")
IF_ROOM = ("accuracy_change", "precision", "energy", "size", "memory")
GAP = 2


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the numbers of every variant that the width has room for, the reasons below, then the champion."""
    headings, variants = _headings(summary), ordered(summary["variants"])
    rows = [row(variant) for variant in variants]
    numbers, widths = rows, _fitting(headings, rows, console.width)
    if _total(widths) > console.width:
        numbers = [{key: cell.replace(" [", "\n[") for key, cell in cells.items()} for cells in rows]
        widths = _fitting(headings, numbers, console.width)
    title = f"{summary['workload']} on {summary['target']['name']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.padding = (0, GAP - 1, 0, 0)
    shown = [key for key in headings if key in widths]
    for key in shown:
        justify: Literal["left", "right"] = "right" if key in ("size", "memory") else "left"
        table.add_column(headings[key], width=widths[key], justify=justify, overflow="fold")
    for variant, cells in zip(variants, numbers, strict=True):
        styles = {"verdict": STYLES[variant["verdict"]]}
        table.add_row(*(Text(cells.get(key, "–"), styles.get(key, "")) for key in shown))
    console.print(table)
    if out := ", ".join(heading for key, heading in headings.items() if key not in widths):
        told = f"no room here for {out}: in the report and in `python -m tasks show --markdown`"
        console.print(told, style="dim", highlight=False, markup=False)
    if why := unmetered(summary):
        console.print(f"no energy: {escape(why)}", style="dim", highlight=False)
    if told := reopened(summary):
        console.print(escape(told), style="dim", highlight=False)
    console.print()
    for cells, reason in zip(rows, _reasons(rows), strict=True):
        text = Text(textwrap.fill(reason, console.width, subsequent_indent="    ", break_on_hyphens=False))
        text.stylize("bold", 0, len(cells["variant"]))
        console.print(text)
    console.print()
    _show_champion(summary["champion"], console)


def _headings(summary: dict[str, Any]) -> dict[str, str]:
    """The heading of each column, in order, by its key in a `row`."""
    return {
        "variant": "variant",
        "accuracy": summary["metric"],
        "accuracy_change": "change",
        "speedup": f"speed-up over {summary['baseline']}",
        **{f"speedup_{batch}": f"at batch {batch}" for batch in batches(summary)},
        "precision": "precision",
        "size": "engine",
        "memory": "memory",
        **({"energy": "energy"} if metered(summary) else {}),
        "verdict": "verdict",
    }


def _fitting(headings: dict[str, str], rows: list[dict[str, str]], room: int) -> dict[str, int]:
    """The widths of the columns shown in `room` characters: those of ALWAYS, speed-ups at further batch sizes, IF_ROOM.

    Of the last two, each that still fits. Headings may break between words, and variants of several names as well.
    """
    ranked = [*ALWAYS, *(key for key in headings if key.startswith("speedup_")), *IF_ROOM]
    widths: dict[str, int] = {}
    for key in (key for key in ranked if key in headings):
        lines = [line for cells in rows for line in cells.get(key, "–").split(None if key == "variant" else "\n")]
        width = max(cell_len(line) for line in (*lines, *headings[key].split()))
        if key in ALWAYS or _total({**widths, key: width}) <= room:
            widths[key] = width
    whole, spare = max((cell_len(cells["variant"]) for cells in rows), default=0), max(0, room - _total(widths))
    return {**widths, "variant": max(widths["variant"], min(whole, widths["variant"] + spare))}


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _reasons(rows: list[dict[str, str]], mark: str = "") -> list[str]:
    """Why each variant has its verdict, a line a variant; `mark` stands on both sides of the name."""
    return [f"{mark}{cells['variant']}{mark}: {cells['reason']}" for cells in rows]


def _show_champion(champion: dict[str, Any] | None, console: Console) -> None:
    if champion is None:
        console.print("[bold red]promotion did not run:[/] see the stages that failed; the registry is as it was")
    elif not champion["version"]:
        console.print("[bold red]no champion:[/] nothing here should be deployed", soft_wrap=True)
    else:
        console.print(
            f"champion: [bold]{champion['variant']}[/], version {champion['version']} of "
            f"models:/{champion['model']}@{champion['alias']}",
            soft_wrap=True,
        )
        if not champion["promoted"]:
            console.print(f"it is not of this tree; {escape('; '.join(champion['reasons']))}", soft_wrap=True)


def markdown(summary: dict[str, Any]) -> str:
    """Every number of each variant as a page of Markdown, with the environment and the digests above it."""
    target, headings = summary["target"], _headings(summary)
    rows = [row(v) for v in ordered(summary["variants"])]
    versions = ", ".join(f"{name} {target['libraries'][name]}" for name in LIBRARIES if name in target["libraries"])
    driver = f", driver {target['driver']}" if target.get("driver") else ""
    return "\n".join(
        [
            f"# A run of `{summary['workload']}`",
            "",
            f"{target['name']}{driver}, {target['cores']} cores, Python {target['python']}, {versions}; commit "
            f"{summary['git_commit']}, settings sha256 {summary['params_sha256'][:12]}…, test split sha256 "
            f"{summary['data_sha256']['test'][:12]}….",
            "",
            "| " + " | ".join(headings.values()) + " |",
            "|" + "---|" * len(headings),
            *("| " + " | ".join(cells.get(key, "–") for key in headings) + " |" for cells in rows),
            "",
            *((f"No energy: {why}.", "") if (why := unmetered(summary)) else ()),
            *((f"{told[0].upper()}{told[1:]}.", "") if (told := reopened(summary)) else ()),
            *(f"- {reason}" for reason in _reasons(rows, "`")),
            "",
            *_scorecards(summary),
            *conditions_table.rows(summary),
        ]
    )


def _scorecards(summary: dict[str, Any]) -> list[str]:
    """The PLASTER scorecards as lines of Markdown, with the roofline's bound and the engine's digest beside each."""
    scored = [v for v in ordered(summary["variants"]) if v.get("plaster")]
    if not scored:
        return []
    headings = {
        "variant": "variant",
        "steps": "steps",
        "settings": "settings",
        "latency": "p50",
        "latency_p99": "p99",
        **{f"throughput_{batch}": f"throughput at {batch}" for batch in plaster_page.batches(summary)},
        **({"energy": "energy efficiency", "net": "energy above idle"} if plaster_page.metered(summary) else {}),
        **({"whole": "end to end", "copies": "copies in, out"} if any(v.get("transfer") for v in scored) else {}),
        "learning": "rate of learning",
        "bound": "over its roofline",
        "digest": "engine sha256",
    }
    rows = [
        {**plaster_page.cells(v), **_bound(v), **_moved(v), "digest": (v["engine_sha256"] or "–")[:8]} for v in scored
    ]
    return [
        "PLASTER, by docs/plaster.md; accuracy and size stand above. Over its roofline: the time of a call over what "
        "its operations and bytes take at this machine's probed peaks, and which of the two limits (docs/roofline.md).",
        "",
        "| " + " | ".join(headings.values()) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(cells.get(key, "–") for key in headings) + " |" for cells in rows),
        "",
        *(line for note in (*plaster_page.notes(summary), *_unclear(scored)) for line in (note, "")),
    ]


def _unclear(scored: list[dict[str, Any]]) -> list[str]:
    """Why an engine whose energy is known has none above idle."""
    return [
        f"`{v['name']}`: {v['energy_reason']}."
        for v in scored
        if v.get("energy_mj") and not v.get("energy_net_mj") and v.get("energy_reason")
    ]


def _moved(variant: dict[str, Any]) -> dict[str, str]:
    """A call's milliseconds from arrays to arrays, and those of its copies, as text, for an engine on a GPU."""
    found = variant.get("transfer")
    if not found:
        return {}
    whole, load, fetch = (
        "{value:.3f} [{low:.3f}, {high:.3f}]".format(**found[f"{part}_ms"]) for part in ("whole", "load", "fetch")
    )
    told = " (disturbed)" if found.get("disturbed") else ""
    return {"whole": f"{whole} ms{told}", "copies": f"{load}, {fetch} ms{told}"}


def _bound(variant: dict[str, Any]) -> dict[str, str]:
    """An engine's energy above idle and its distance from the roofline as text, where they are known."""
    net, bound = variant.get("energy_net_mj"), variant.get("roofline")
    told = {"net": shown("energy_mj", Interval(**net))} if net else {}
    if bound and bound["over"]:
        told["bound"] = f"{bound['over']:.1f} × of {bound['bound_ms']:.3g} ms, {bound['limit']}"
    return told


def show_plaster(summary: dict[str, Any], console: Console) -> None:
    """Print the PLASTER scorecard of every variant, a column a letter, and why letters have no number."""
    scored = [v for v in ordered(summary["variants"]) if v.get("plaster")]
    title = f"PLASTER: {summary['workload']} on {summary['target']['name']}"
    table, further = Table(title=title, title_justify="left"), plaster_page.batches(summary)
    headings = {
        "variant": "variant",
        "steps": "steps",
        "settings": "settings",
        "latency": "latency\np50",
        "latency_p99": "latency\np99",
        "accuracy": "accuracy",
        "size": "size",
        "memory": "memory",
        **{f"throughput_{batch}": f"throughput\nat {batch}" for batch in further},
        **({"energy": "energy\nefficiency"} if plaster_page.metered(summary) else {}),
        "learning": "rate of\nlearning",
    }
    for key, heading in headings.items():
        table.add_column(heading, justify="left" if key == "variant" else "right", overflow="fold")
    for variant in scored:
        cells = plaster_page.cells(variant)
        table.add_row(*(escape(cells.get(key, "–")) for key in headings), style=STYLES[variant["verdict"]])
    console.print(table)
    for note in plaster_page.notes(summary):
        console.print(note, style="dim", highlight=False, markup=False)


def show_account(name: str, found: AccountReport, console: Console) -> None:
    """Print what a model costs for one sample, layer by layer and in total, and the closed form of a BERT."""
    table = Table(title=f"{name}, one sample", title_justify="left", show_footer=True)
    columns: list[tuple[str, str]] = [
        ("layer", "total"),
        ("kind", ""),
        ("calls", ""),
        ("parameters", f"{found.parameters:,}"),
        ("bytes", f"{found.bytes:,}"),
        ("multiply-adds", f"{found.multiply_adds:,}"),
        ("activation bytes", f"{found.activation_bytes:,}"),
    ]
    for index, (heading, footer) in enumerate(columns):
        table.add_column(heading, footer=footer, justify="left" if index < 2 else "right", no_wrap=index > 1)
    for layer in found.layers:
        counts = (layer.calls, layer.parameters, layer.bytes, layer.multiply_adds, layer.activation_bytes)
        table.add_row(layer.name or "(model)", layer.kind, *(f"{n:,}" for n in counts))
    console.print(table)
    console.print(f"at least {found.peak_activation_bytes:,} bytes of activations are held at once")
    if found.closed_form is not None:
        _show_closed_form(found.closed_form, console)


def _show_closed_form(form: ClosedForm, console: Console) -> None:
    dimensions = ", ".join(f"{letter} {size:,}" for letter, size in form.dimensions.items())
    table = Table(title=f"closed form of a BERT of {dimensions}", title_justify="left", show_footer=True)
    parts = form.parts
    columns = [
        ("part", "total"),
        ("parameters =", ""),
        ("closed form", f"{sum(part.parameters_closed_form for part in parts):,}"),
        ("counted", f"{sum(part.parameters_counted for part in parts):,}"),
        ("multiply-adds =", ""),
        ("closed form", f"{sum(part.multiply_adds_closed_form for part in parts):,}"),
        ("counted", f"{sum(part.multiply_adds_counted for part in parts):,}"),
    ]
    for heading, footer in columns:
        table.add_column(heading, footer=footer, justify="right" if heading in ("closed form", "counted") else "left")
    for part in parts:
        one = (part.parameters_formula, f"{part.parameters_closed_form:,}", f"{part.parameters_counted:,}")
        two = (part.multiply_adds_formula, f"{part.multiply_adds_closed_form:,}", f"{part.multiply_adds_counted:,}")
        table.add_row(part.name, *one, *two)
    console.print(table)
    same = all(
        (p.parameters_closed_form, p.multiply_adds_closed_form) == (p.parameters_counted, p.multiply_adds_counted)
        for p in parts
    )
    console.print("they agree" if same else "they differ: the closed form is of the model before compression")

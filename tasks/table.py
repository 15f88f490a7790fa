"""The summary as a table in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tasks import plaster_page
from tasks.report import batches, metered, ordered, row, unmetered

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


def show(summary: dict[str, Any], console: Console) -> None:
    """Print every variant with its numbers, intervals, verdict and reason, then the champion."""
    table = Table(title=f"{summary['workload']} on {summary['target']['name']}", title_justify="left", show_lines=False)
    further, energy = batches(summary), ["energy"] if metered(summary) else []
    columns: tuple[tuple[str, dict[str, Any]], ...] = (
        ("variant", {"overflow": "fold"}),
        (f"{summary['metric']}", {"no_wrap": True}),
        (f"speed-up over {summary['baseline']}", {"no_wrap": True}),
        *((f"at batch {batch}", {"no_wrap": True}) for batch in further),
        ("precision", {"overflow": "fold"}),
        ("size", {"justify": "right", "no_wrap": True}),
        ("memory", {"justify": "right", "no_wrap": True}),
        *((heading, {"no_wrap": True}) for heading in energy),
        ("verdict", {"no_wrap": True}),
        ("reason", {"ratio": 1}),
    )
    for heading, options in columns:
        table.add_column(heading, **options)
    for variant in ordered(summary["variants"]):
        cells, style = row(variant), STYLES[variant["verdict"]]
        table.add_row(
            cells["variant"],
            cells["accuracy"],
            cells["speedup"],
            *(cells.get(f"speedup_{batch}", "–") for batch in further),
            cells["precision"],
            cells["size"],
            cells["memory"],
            *(cells[key] for key in energy),
            f"[{style}]{cells['verdict']}[/]",
            escape(cells["reason"]),
        )
    console.print(table)
    if why := unmetered(summary):
        console.print(f"no energy: {escape(why)}", style="dim", highlight=False)
    champion = summary["champion"]
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
    """The same as a page of Markdown, with the environment and the digests above it."""
    target, further, energy = summary["target"], batches(summary), ["energy"] if metered(summary) else []
    columns = [
        *("variant", summary["metric"], "change", f"speed-up over {summary['baseline']}"),
        *(f"at batch {batch}" for batch in further),
        *("precision", "engine", "memory", *energy, "verdict"),
    ]
    numbers = ["accuracy", "accuracy_change", "speedup", *(f"speedup_{b}" for b in further)]
    keys = ["variant", *numbers, "precision", "size", "memory", *energy, "verdict"]
    cells = [row(v) for v in ordered(summary["variants"])]
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
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
            *("| " + " | ".join(r.get(key, "–") for key in keys) + " |" for r in cells),
            "",
            *((f"No energy: {why}.", "") if (why := unmetered(summary)) else ()),
            *(f"- `{r['variant']}`: {r['reason']}" for r in cells),
            "",
        ]
    )


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

"""The summary as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tasks.report import ordered, row

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
    for heading, options in (
        ("variant", {"overflow": "fold"}),
        (f"{summary['metric']}", {"no_wrap": True}),
        (f"speed-up over {summary['baseline']}", {"no_wrap": True}),
        ("size", {"justify": "right", "no_wrap": True}),
        ("verdict", {"no_wrap": True}),
        ("reason", {"ratio": 1}),
    ):
        table.add_column(heading, **options)
    for variant in ordered(summary["variants"]):
        cells, style = row(variant), STYLES[variant["verdict"]]
        table.add_row(
            cells["variant"],
            cells["accuracy"],
            cells["speedup"],
            cells["size"],
            f"[{style}]{cells['verdict']}[/]",
            escape(cells["reason"]),
        )
    console.print(table)
    champion = summary["champion"]
    if champion and champion["version"]:
        console.print(
            f"champion: [bold]{champion['variant']}[/], version {champion['version']} of "
            f"models:/{champion['model']}@{champion['alias']}",
            soft_wrap=True,
        )
    else:
        console.print("[bold red]no champion:[/] nothing here should be deployed")

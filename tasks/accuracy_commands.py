"""The command `accuracy`. What it needs is imported when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tasks import layout, params
from tasks.errors import Fault


def accuracy(
    name: Annotated[str, typer.Argument(help="An engine's name in params.yaml.")],
    versus: Annotated[str | None, typer.Option(help="Another engine; the baseline and its parent without.")] = None,
) -> None:
    """An engine's accuracy by class, McNemar's test, non-inferiority, agreement, and the samples that changed."""
    from rich.console import Console

    from tasks import accuracy_table
    from tasks.accuracy import of_engine

    tree = params.load(layout.PARAMS, models=False)
    for asked in (name, versus):
        if asked is not None and asked not in tree.engines:
            expected = ", ".join(tree.engines)
            raise Fault("no such engine in params.yaml", got=asked, expected=expected, do="name one of these")
    if versus == name:
        raise Fault("nothing to compare", got=f"{name} twice", expected="two engines", do="name another after --versus")
    found = of_engine(tree, name, versus)
    accuracy_table.show(found, Console(width=None if sys.stdout.isatty() else 160))

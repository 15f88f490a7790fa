"""README against the code: its tables name every setting and every command, and nothing that isn't there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from tasks.__main__ import HELP, app
from tasks.settings import SECTIONS, FitParams, Params, SearchParams, Settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MODELS: dict[str, type[Settings]] = {
    name: SECTIONS.get(name) or field.annotation  # type: ignore[misc]
    for name, field in Params.model_fields.items()
    if name not in ("workload", "baseline")
}
# Words of a row that are no settings of its section.
OTHERS = {
    "gates": {"min", "max", "true"},
    "quantize": set(SearchParams.model_fields),
    "prune": {"train"},
    "export": {"inductor"},
    "benchmark": {"sweep"},
}
# Their choices are in docs/engines.md.
ELSEWHERE = ("compute_capabilities",)


def row(section: str) -> str:
    """The cell of a section's settings."""
    found = re.findall(rf"^\| `{section}` \| (.+) \|$", README, re.M)
    assert len(found) == 1, f"one row for {section} in README's table"
    return str(found[0])


def told(cell: str) -> set[str]:
    """The words in backticks of a cell."""
    return {word.strip(":") for words in re.findall(r"`([^`]+)`", cell) for word in words.split()}


def choices(annotation: Any) -> set[str]:
    """The strings that a setting may be one of."""
    if get_origin(annotation) is Literal:
        return {str(value) for value in get_args(annotation)}
    return set().union(*(choices(inner) for inner in get_args(annotation) if inner is not Ellipsis))


def own(section: str) -> set[str]:
    """The settings of a section, but for what every step and every training has."""
    model = MODELS[section]
    common = set(FitParams.model_fields) if section != "train" and issubclass(model, FitParams) else set()
    return set(model.model_fields) - common - {"parent"}


@pytest.mark.parametrize("section", MODELS)
def test_the_table_names_every_setting_of_a_section(section: str) -> None:
    missing = own(section) - told(row(section))
    assert not missing, f"README's row of {section} lacks {', '.join(sorted(missing))}"
    if section != "train" and issubclass(MODELS[section], FitParams):
        assert "and training" in row(section), f"{section} trains, with the settings of train"


@pytest.mark.parametrize("section", MODELS)
def test_the_table_names_nothing_else(section: str) -> None:
    wrong = told(row(section)) - own(section) - OTHERS.get(section, set())
    assert not wrong, f"README's row of {section} names {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("section", MODELS)
def test_the_choices_in_the_table_are_those_of_the_settings(section: str) -> None:
    for name, listed in re.findall(r"`(?:[\w ]+ )?(\w+)` \(([^`()]+)\)", row(section)):
        expected = choices(MODELS[section].model_fields[name].annotation)
        if expected and ":" not in listed and name != "threads":
            assert {word.strip() for word in listed.split(",")} == expected, f"{section}.{name} ({listed})"


@pytest.mark.parametrize("section", MODELS)
def test_every_choice_is_in_the_table(section: str) -> None:
    for name in own(section) - set(ELSEWHERE):
        for choice in choices(MODELS[section].model_fields[name].annotation):
            assert re.search(rf"\b{re.escape(choice)}\b", row(section)), f"{section}.{name}: {choice}"


def test_every_command_beside_the_steps_is_in_the_table() -> None:
    commands = {str(command.name or command.callback.__name__) for command in app.registered_commands}  # type: ignore[union-attr]
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    beside = commands - set(HELP) - {"target"}
    assert {"sweep", "peaks", "roofline", "bench", "calibrate"} <= beside
    missing = {name for name in beside if not re.search(rf"`(python -m tasks )?{name}\b", table)}
    assert not missing, f"README's table of commands lacks {', '.join(sorted(missing))}"


def test_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "infra/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not lost, "\n".join(lost)

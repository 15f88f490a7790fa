"""Loading a workload file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.errors import Fault
from tasks.workloads.protocol import REQUIRED, load_workload

COMPLETE = "\n".join(f"{name} = {{}}" if name == "INPUTS" else f"{name} = {name!r}" for name in REQUIRED)


def test_a_file_with_every_name_is_a_workload(write_workload: Any) -> None:
    assert load_workload(write_workload(COMPLETE)).NAME == "NAME"


def test_two_files_of_one_name_are_two_workloads(write_workload: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = load_workload(write_workload(COMPLETE))
    second = load_workload(write_workload(COMPLETE.replace("'NAME'", "'second'"), "other/own.py"))
    assert (first.NAME, second.NAME) == ("NAME", "second")


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_name_is_named(write_workload: Any, name: str) -> None:
    text = "\n".join(line for line in COMPLETE.splitlines() if not line.startswith(f"{name} "))
    with pytest.raises(Fault, match=f"got:      no {name}\n"):
        load_workload(write_workload(text))


@pytest.mark.parametrize(
    ("text", "got"),
    [("import nothing_of_this_name", "ModuleNotFoundError"), ("1 / 0", "ZeroDivisionError"), ("(", "SyntaxError")],
)
def test_a_file_that_fails_to_import_is_a_fault(write_workload: Any, text: str, got: str) -> None:
    with pytest.raises(Fault, match=got):
        load_workload(write_workload(text))


@pytest.mark.parametrize("name", ["README.md", "workload"])
def test_a_file_that_is_no_python_file_is_a_fault(write_workload: Any, name: str) -> None:
    with pytest.raises(Fault, match="workload is no Python file") as caught:
        load_workload(write_workload(COMPLETE, name))
    assert "ends in .py" in str(caught.value.expected)


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no workload"):
        load_workload(tmp_path / "none.py")

"""Digests, JSON, and writes that are whole or absent."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.files import atomic, atomic_folder, digest_of, read_json, sha256, size_bytes, write_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "deep").mkdir(parents=True)
    (made / "a").write_bytes(b"one")
    (made / "deep" / "b").write_bytes(b"three")
    return made


def test_digest_of_a_file_is_its_sha256(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (tmp_path / "file").write_bytes(content)
    assert sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_digest_of_a_folder_depends_on_names_and_contents_alone(folder: Path, tmp_path: Path) -> None:
    before = sha256(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert sha256(moved) == before
    (moved / "a").rename(moved / "c")
    renamed = sha256(moved)
    (moved / "c").write_bytes(b"two")
    assert len({before, renamed, sha256(moved)}) == 3


def test_size_counts_everything_below_a_folder(folder: Path) -> None:
    assert (size_bytes(folder), size_bytes(folder / "a")) == (8, 3)


def test_digest_of_a_value_ignores_the_order_of_keys() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic(target) as scratch:
        scratch.write_text("new")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_folder_leaves_what_was_there(folder: Path) -> None:
    with pytest.raises(RuntimeError), atomic_folder(folder) as scratch:
        (scratch / "new").write_text("new")
        raise RuntimeError
    assert sorted(p.name for p in folder.iterdir()) == ["a", "deep"]
    assert [p.name for p in folder.parent.iterdir()] == ["folder"]


def test_a_folder_is_replaced_as_a_whole(folder: Path) -> None:
    with atomic_folder(folder) as scratch:
        (scratch / "new").write_text("new")
        assert (folder / "a").exists()
    assert [p.name for p in folder.iterdir()] == ["new"]


def test_parents_of_a_target_are_made(tmp_path: Path) -> None:
    with atomic(tmp_path / "x" / "y" / "file") as scratch:
        scratch.write_text("text")
    assert (tmp_path / "x" / "y" / "file").read_text() == "text"


@dataclass(frozen=True)
class Report:
    name: str
    values: tuple[float, ...]


def test_a_dataclass_survives_json(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", Report("a", (0.1, 2.0)))
    assert read_json(tmp_path / "report.json") == {"name": "a", "values": [0.1, 2.0]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_refuses_what_is_not_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "report.json", {"value": value})
    assert list(tmp_path.iterdir()) == []

"""Files: digests, JSON, and writes that are either whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, or of a folder: relative names and contents, in sorted order."""
    digest = hashlib.sha256()
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """Hex SHA-256 of a JSON-like value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Yield a scratch path; it becomes `target`, file or folder, only if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        yield scratch
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.replace(scratch, target)
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """As `atomic`, with the scratch folder already made."""
    with atomic(target) as scratch:
        scratch.mkdir()
        yield scratch


def write_json(path: Path, value: Any) -> None:
    """Write a dataclass or a JSON-like value; NaN and infinity are refused (ValueError)."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps(plain, indent=2, allow_nan=False, default=_plain)
    with atomic(path) as scratch:
        scratch.write_text(text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())

"""Reads back, sample by sample, what `evaluate` recorded of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zipfile import BadZipFile

import numpy as np

from tasks import layout, manifest
from tasks.data import read
from tasks.errors import Fault, Unavailable
from tasks.files import read_json
from tasks.stats import binary
from tasks.workloads.protocol import Arrays

STORED = ("scores", "predictions", "labels")
SAME = {"metric": "metric", "test_sha256": "test data", "preprocessing": "preprocessing", "target_id": "machine"}
KEYS = (*SAME, "engine_sha256", "n", "not_run")


@dataclass(frozen=True)
class Scored:
    """What `evaluate` recorded of an engine: its report, scores [n], and predictions and labels [n] or None."""

    name: str
    record: dict[str, Any]
    scores: np.ndarray
    predictions: np.ndarray | None = None
    labels: np.ndarray | None = None


def scored(name: str) -> Scored:
    """Read what `evaluate` recorded of an engine.

    Raises Unavailable if it wasn't run, and Fault with the command to run again if records are missing, of another
    engine or an older version, or not finite.
    """
    record, arrays = _recorded(name)
    if record["not_run"]:
        raise Unavailable(record["not_run"])
    scores, predictions, labels = (arrays[key] for key in STORED)
    digest = manifest.read(layout.artifact(name)).engine_sha256
    if record["engine_sha256"] != digest:
        what = f"the accuracy of {name} was recorded of another engine"
        raise Fault(what, got=record["engine_sha256"][:12], expected=digest[:12], do=_again(name))
    sizes = (len(scores), len(predictions), len(labels))
    if sizes not in ((record["n"],) * 3, (record["n"], 0, 0)) or not record["n"]:
        what = f"the scores of {name} are not those of its report"
        got = ", ".join(f"{size} {key}" for size, key in zip(sizes, STORED, strict=True))
        raise Fault(what, got=got, expected=f"{record['n']} of each", do=_again(name))
    if bad := int((~np.isfinite(scores)).sum()):
        what = f"the scores of {name} aren't finite"
        raise Fault(what, got=f"{bad} of {len(scores)} NaN or infinite", expected="finite numbers", do=_again(name))
    return Scored(name, record, scores, *((predictions, labels) if len(labels) else ()))


def check_pair(one: Scored, other: Scored) -> None:
    """Raise Fault unless two engines were evaluated on the same samples, prepared alike, by one metric and machine."""
    do = _again(one.name, other.name)
    for key, what in SAME.items():
        if (got := one.record[key]) != (expected := other.record[key]):
            what = f"{one.name} and {other.name} were evaluated with different {what}"
            raise Fault(what, got=str(got)[:40], expected=str(expected)[:40], do=do)
    unlike = one.labels is not None and other.labels is not None and not np.array_equal(one.labels, other.labels)
    if len(one.scores) != len(other.scores) or unlike:
        got = f"{len(one.scores)} and {len(other.scores)} samples{', of other labels' if unlike else ''}"
        raise Fault(f"{one.name} and {other.name} aren't paired", got=got, expected="the same samples", do=do)


def classes(one: Scored) -> list[tuple[int, np.ndarray]]:
    """Each label with the mask [n] of its samples, by label; nothing without classes."""
    labels = one.labels
    return [] if labels is None else [(int(label), labels == label) for label in np.unique(labels)]


def enough(*scores: np.ndarray) -> bool:
    """Whether there is an interval of these: a spread can't be had of one sample, unless scores are 0 or 1."""
    return len(scores[0]) > 1 or binary(*scores)


def _recorded(name: str) -> tuple[dict[str, Any], Arrays]:
    """The report and the arrays of an evaluation; Fault if either is missing, can't be read or lacks a key."""
    path, file = layout.report("evaluate", name), layout.scores(name)
    if not path.is_file() or not file.is_file():
        what = f"{name} isn't evaluated"
        raise Fault(what, got="no record", expected="its scores on the test split", do=_again(name))
    try:
        record, arrays = read_json(path), read(file)
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        what = f"the scores of {name} can't be read"
        raise Fault(what, got=error, expected="the files of evaluate", do=_again(name)) from error
    missing = [key for key in KEYS if key not in record]
    missing += [] if record.get("not_run") else [key for key in STORED if key not in arrays]
    if missing:
        what = f"the scores of {name} are of an older run"
        raise Fault(what, got=f"no {', no '.join(missing)}", expected=", ".join(STORED), do=_again(name))
    return record, arrays


def _again(*names: str) -> str:
    return f"run `dvc repro {' '.join(f'evaluate@{name}' for name in names)}`"

"""Splits of a workload's samples: train, calibration (drawn from train), validation, test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.errors import Fault
from tasks.files import atomic, sha256
from tasks.settings import DataParams
from tasks.workloads.protocol import Arrays, load_workload

SPLITS = ("train", "calibration", "validation", "test")


@dataclass(frozen=True)
class DataReport:
    """Sample counts and file digests of each split; duplicates found and left out."""

    workload: str
    samples: dict[str, int]
    sha256: dict[str, str]
    duplicates: int
    unused: int


def data(workload: Path, target: Path, params: DataParams) -> DataReport:
    """Write `target/SPLIT.npz` for each split.

    Test, validation and train are disjoint by content, and calibration is a part of train;
    both are checked on what is written. Raises Fault if there are too few samples.
    """
    arrays, keys = load_workload(workload).samples(params.seed)
    indices, duplicates = split(keys, params)
    check_disjoint({name: [keys[i] for i in index] for name, index in indices.items()})
    digests = {}
    for name, index in indices.items():
        path = target / f"{name}.npz"
        write(path, {key: value[index] for key, value in arrays.items()})
        digests[name] = sha256(path)
    used = sum(len(indices[n]) for n in SPLITS if n != "calibration")
    return DataReport(
        workload=workload.as_posix(),
        samples={name: len(index) for name, index in indices.items()},
        sha256=digests,
        duplicates=duplicates,
        unused=len(keys) - duplicates - used,
    )


def split(keys: list[str], params: DataParams) -> tuple[dict[str, np.ndarray], int]:
    """Indices of each split, and the number of samples left out as duplicates by content."""
    _, first = np.unique(np.array(keys), return_index=True)
    order = np.random.default_rng(params.seed).permutation(np.sort(first))
    need = params.test + params.validation + params.train
    if need > len(order):
        raise Fault(
            "too few samples",
            got=f"{len(order)} distinct ones",
            expected=f"{need} (train {params.train} + validation {params.validation} + test {params.test})",
            do="lower the counts under data: in params.yaml",
        )
    test, validation, train = np.split(order[:need], [params.test, params.test + params.validation])
    return {"train": train, "calibration": train[: params.calibration], "validation": validation, "test": test}, len(
        keys
    ) - len(first)


def check_disjoint(keys: dict[str, list[str]]) -> None:
    """Raise Fault if two of train, validation and test share content, or calibration leaves train."""
    sets = {name: set(values) for name, values in keys.items()}
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        shared = len(sets[a] & sets[b])
        if shared:
            raise Fault(
                f"splits {a} and {b} overlap",
                got=f"{shared} samples in both",
                expected="none",
                do="give equal samples equal keys in the workload",
            )
    stray = len(sets["calibration"] - sets["train"])
    if stray:
        raise Fault(
            "calibration leaves the training split",
            got=f"{stray} samples from elsewhere",
            expected="none",
            do="draw calibration from train",
        )


def write(path: Path, arrays: Arrays) -> None:
    """Write arrays as .npz; equal arrays give equal bytes."""
    with atomic(path) as scratch, scratch.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read(path: Path) -> Arrays:
    """Read a split: the workload's inputs and "label", each [n, …]."""
    if not path.is_file():
        raise Fault(f"no data {path}", got="nothing there", expected="a split", do="run `dvc repro data` or `dvc pull`")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}

"""Splits: disjoint by content, calibration from train, the same bytes each time."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.data import SPLITS, check_disjoint, data, read, split, write
from tasks.errors import Fault
from tasks.settings import DataParams

PARAMS = DataParams(seed=1, train=40, calibration=10, validation=20, test=30)


@pytest.fixture(scope="module")
def splits(workload_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    data(workload_path, folder, PARAMS)
    return folder


def contents(path: Path) -> set[bytes]:
    return {image.tobytes() for image in read(path)["image"]}


def test_splits_have_the_sizes_asked_for(splits: Path) -> None:
    assert {n: len(read(splits / f"{n}.npz")["label"]) for n in SPLITS} == {
        "train": 40,
        "calibration": 10,
        "validation": 20,
        "test": 30,
    }


def test_splits_are_disjoint_by_content(splits: Path) -> None:
    train, validation, test = (contents(splits / f"{n}.npz") for n in ("train", "validation", "test"))
    assert len(train | validation | test) == 90


def test_calibration_is_a_part_of_train(splits: Path) -> None:
    assert contents(splits / "calibration.npz") < contents(splits / "train.npz")


def test_labels_stay_with_their_samples(splits: Path, tiny: Any) -> None:
    for name in SPLITS:
        arrays = read(splits / f"{name}.npz")
        assert (tiny.oracle(arrays["image"]) == arrays["label"]).all()


def test_the_same_seed_gives_the_same_bytes(workload_path: Path, splits: Path, tmp_path: Path) -> None:
    data(workload_path, tmp_path, PARAMS)
    assert all((tmp_path / f"{n}.npz").read_bytes() == (splits / f"{n}.npz").read_bytes() for n in SPLITS)


def test_no_time_of_day_is_written(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", {"x": np.ones(3)})
    assert {entry.date_time[0] for entry in zipfile.ZipFile(tmp_path / "a.npz").infolist()} == {1980}


def test_another_seed_gives_other_splits(workload_path: Path, splits: Path, tmp_path: Path) -> None:
    data(workload_path, tmp_path, PARAMS.model_copy(update={"seed": 2}))
    assert contents(tmp_path / "test.npz") != contents(splits / "test.npz")


def test_duplicates_are_left_out_and_counted() -> None:
    keys = [str(i // 2) for i in range(200)]
    indices, duplicates = split(keys, PARAMS)
    assert duplicates == 100
    used = [keys[i] for name in ("train", "validation", "test") for i in indices[name]]
    assert len(used) == len(set(used)) == 90


def test_the_report_counts_every_sample(workload_path: Path, tmp_path: Path) -> None:
    report = data(workload_path, tmp_path, PARAMS)
    assert (report.duplicates, report.unused) == (0, 900 - 90)


def test_too_few_samples_are_refused_before_anything_is_written(workload_path: Path, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="too few samples") as caught:
        data(workload_path, tmp_path / "data", PARAMS.model_copy(update={"test": 900}))
    assert "900 distinct" in str(caught.value)
    assert "960" in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("validation", "t1", "splits train and validation overlap"),
        ("test", "t1", "splits train and test overlap"),
        ("test", "v1", "splits validation and test overlap"),
        ("calibration", "v1", "calibration leaves the training split"),
    ],
)
def test_overlaps_are_faults(name: str, key: str, message: str) -> None:
    keys = {"train": ["t1", "t2"], "calibration": ["t1"], "validation": ["v1"], "test": ["e1"]}
    check_disjoint(keys)
    keys[name].append(key)
    with pytest.raises(Fault, match=message):
        check_disjoint(keys)


def test_a_missing_split_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="dvc repro data"):
        read(tmp_path / "train.npz")


def test_pickled_objects_are_never_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", label=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        read(tmp_path / "bad.npz")

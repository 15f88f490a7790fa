"""The lock of this user's stages: who waits for whom, and how waiting ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.machine import hold


class Enough(Exception):
    """Ends the waiting of a test."""


def stop() -> None:
    raise Enough


def test_measuring_waits_for_those_that_compute_and_they_for_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with hold(False, lock), hold(False, lock), pytest.raises(Enough), hold(True, lock, stop):
        pass
    with hold(True, lock), pytest.raises(Enough), hold(False, lock, stop):
        pass
    with hold(True, lock, stop):
        pass


def test_waiting_goes_on_until_the_lock_is_free(tmp_path: Path) -> None:
    first, asked = hold(True, tmp_path / "lock"), []
    first.__enter__()

    def free() -> None:
        asked.append(True)
        first.__exit__(None, None, None)

    with hold(True, tmp_path / "lock", free):
        assert asked == [True]


def test_another_users_lock_file_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "lock").touch(mode=0o444)
    with hold(True, tmp_path / "lock"), pytest.raises(Enough), hold(False, tmp_path / "lock", stop):
        pass

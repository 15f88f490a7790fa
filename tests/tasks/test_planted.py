"""Sessions of known behaviour do what they say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import manifest
from tasks.engines.protocol import open_engine
from tasks.planted import Early, Profiled, Slowed, tiny_engine
from tasks.timing import timed_call


class Fixed:
    """A session that computes until its time is over."""

    inputs = outputs = ()
    device = "cpu"

    def run(self, batch: Any) -> Any:
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            pass
        return {"y": 1}

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_a_slowed_session_takes_its_share_longer_and_returns_the_same(share: float) -> None:
    session: Any = Slowed(Fixed(), share)  # type: ignore[arg-type]
    assert session.run({}) == {"y": 1}
    fastest = min(timed_call(session, {}) for _ in range(30))
    assert fastest == pytest.approx(2 * (1 + share), rel=0.02)


def test_an_early_session_returns_at_once_and_is_done_in_time() -> None:
    session = Early(3e-3)
    start = time.perf_counter()
    session.run({})
    returned = time.perf_counter() - start
    session.synchronize()
    assert returned < 1e-3
    assert time.perf_counter() - start >= 3e-3


def test_a_tiny_engine_is_an_engine_and_its_profile_counts_its_runs(tmp_path: Path) -> None:
    folder = tiny_engine(tmp_path, 32, 2)
    batch = {"x": np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)}
    profiled = Profiled(folder, manifest.read(folder), tmp_path / "profile")
    with open_engine(folder) as session:
        expected = session.run(batch)["y"]
    for _ in range(5):
        assert np.array_equal(profiled.run(batch)["y"], expected)
    times = profiled.milliseconds()
    assert len(times) == 5
    assert all(0 < t < 1000 for t in times)
    assert (expected >= 0).all()
    assert expected.any()

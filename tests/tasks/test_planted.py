"""Sessions of known behaviour do what they say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from tasks import manifest, planted
from tasks.engines.protocol import open_engine
from tasks.errors import Fault
from tasks.planted import BASE_CYCLES, Early, Profiled, Slowed, SlowedOnDevice, slowed, spins, tiny_engine
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


CYCLES_PER_MS = 2e6


@pytest.mark.parametrize("ms", [0.05, 2.0, 70.0])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_session_slowed_on_the_device_takes_its_share_longer_there(on_device: Any, ms: float, share: float) -> None:
    base = BASE_CYCLES / CYCLES_PER_MS
    both = [SlowedOnDevice(on_device(ms), 0.0), SlowedOnDevice(on_device(ms), share)]
    plain, slow = [timed_call(session, {}, "device") for session in both]
    assert plain == pytest.approx(ms + base)
    assert slow / plain == pytest.approx(1 + share, rel=1e-4)


def test_where_launches_wait_what_the_host_does_meanwhile_hides_no_share(
    on_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch ends with the GPU's work; the next takes the host 20 µs, in which what was enqueued after it runs."""

    def waiting(waits: bool) -> Any:
        session, queued = on_device(0.5), [0.0]
        session.waits = waits
        monkeypatch.setattr(planted, "spinner", lambda _: lambda cycles: queued.__setitem__(0, cycles / 2e6))

        def launch() -> None:
            session.work(max(0.02, queued[0]))
            queued[0] = 0.0
            session.work(session.ms)

        monkeypatch.setattr(session, "load", lambda batch: setattr(session, "_enqueue", launch))
        monkeypatch.setattr(session, "synchronize", lambda: session.work(queued[0]) or queued.__setitem__(0, 0.0))
        return session

    def told(waits: bool) -> float:
        slow = SlowedOnDevice(waiting(waits), 0.02)
        slowly = timed_call(slow, {}, "device")
        return slowly / timed_call(SlowedOnDevice(waiting(waits), 0.0), {}, "device")

    assert told(True) == pytest.approx(1.02, abs=0.003)
    assert told(False) == pytest.approx(1.0, abs=0.005)


def test_each_load_slows_its_launches_once_and_leaves_the_session_as_it_was(on_device: Any) -> None:
    inner = on_device(1.0)
    session = SlowedOnDevice(inner, 0.5)
    first, *others = [timed_call(session, {}, "device") for _ in range(4)]
    assert others == pytest.approx([first] * 3)
    start = inner.now
    assert session.run({}) == {"y": 1}
    assert inner.now - start == pytest.approx(first)
    assert session.memory_bytes == 5
    assert timed_call(inner, {}, "device") == pytest.approx(1.0)


def test_a_device_that_does_not_wait_is_a_fault(on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = on_device(1.0)
    monkeypatch.setattr(planted, "spinner", lambda _: lambda cycles: None)
    with pytest.raises(Fault, match="doesn't wait as long as it is told"):
        SlowedOnDevice(inner, 0.5).load({})


def test_the_clock_says_how_a_session_is_slowed(on_device: Any) -> None:
    assert isinstance(slowed(on_device(1.0), 0.1, "device"), SlowedOnDevice)
    assert isinstance(slowed(on_device(1.0), 0.1, "host"), Slowed)


@pytest.mark.gpu
@pytest.mark.skipif(not spins(), reason="PyTorch reaches no GPU here")
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_real_gpu_takes_its_share_longer_by_its_own_clock(tmp_path: Path, share: float) -> None:
    """The engine copies 256 MiB on the device, which takes longer than to start it."""
    import pycuda.driver as driver

    from tasks.engines.cuda import CudaSession

    class Copying(CudaSession):
        def prepare(self, shapes: Any, outputs: Any) -> Callable[[], None]:
            self.held = [driver.mem_alloc(256 << 20) for _ in range(2)]
            source, target = map(int, self.held)
            return lambda: driver.memcpy_dtod_async(target, source, 256 << 20, self.stream)

        def release(self) -> None:
            for memory in self.__dict__.pop("held", []):
                memory.free()

    described = replace(manifest.read(tiny_engine(tmp_path, 32, 1), trusted=False), device="cuda")
    batch = {"x": np.ones((1, 32), np.float32)}
    with Copying(described) as session:
        plain, slow = SlowedOnDevice(session, 0.0), SlowedOnDevice(session, share)
        pairs = [[timed_call(session, batch, "device") for session in (plain, slow)] for _ in range(40)]
        assert median(b / a for a, b in pairs[5:]) == pytest.approx(1 + share, abs=0.01)
        bare = median(timed_call(session, batch, "device") for _ in range(20))
        assert bare < median(a for a, _ in pairs[5:])
        slow.synchronize()

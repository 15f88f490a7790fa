"""The CUDA device layer, on a real GPU; without one, that it says so in one line."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tasks import target
from tasks.errors import Fault, Unavailable
from tasks.manifest import Manifest, TensorSpec

if TYPE_CHECKING:
    from tasks.engines.cuda import CudaSession


def described(max_batch: int = 4, axes: dict[str, int] | None = None, dtype: str = "float32") -> Manifest:
    """A manifest of an engine x [n, length or 3] → y, of the same shape."""
    shape = (None, *(axes or (3,)))
    return Manifest(
        backend="copy",
        backend_version="1",
        device="cuda",
        built_for={},
        engine_file="none",
        inputs=(TensorSpec("x", dtype, shape),),
        outputs=(TensorSpec("y", dtype, shape),),
        max_batch=max_batch,
        axes=axes or {},
        threads=1,
        settings={},
        preprocessing=None,
        precision_asked="as the model",
        precision_found={},
        operators={},
        engine_sha256="",
        onnx_sha256=None,
        model_sha256=None,
        calibration_sha256=None,
        rebuild="dvc repro",
    )


LATE = """
import sys
sys.modules["pycuda"] = None
from tasks.engines.protocol import imported
from tasks.errors import Unavailable
try:
    imported("cuda")
except Unavailable as reason:
    print(reason)
import tasks.engines.onnxruntime
print([name for name in sys.modules if name.startswith("tasks.engines.cuda")])
"""


def test_without_pycuda_it_says_so_in_one_line_and_the_cpu_does_not_miss_it() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, loaded = done.stdout.splitlines()
    assert said.startswith("pycuda isn't installed here (") and "pip install -e '.[cuda]'" in said
    assert loaded == "[]"


@pytest.fixture
def copying() -> Callable[..., CudaSession]:
    """`copying(manifest)`: a session whose engine copies its input to its output, on the device."""
    import pycuda.driver as driver

    from tasks.engines.cuda import CudaSession

    class Copying(CudaSession):
        prepared = 0
        released = 0

        def prepare(self, shapes: dict[str, Any], outputs: dict[str, Any]) -> Callable[[], None]:
            self.prepared += 1
            (source,), (target,) = self.inputs_on_device.values(), self.outputs_on_device.values()
            size = int(np.prod(outputs["y"])) * source.dtype.itemsize
            return lambda: driver.memcpy_dtod_async(target.ptr, source.ptr, size, self.stream)

        def release(self) -> None:
            self.released += 1

    return Copying


def batch(n: int, length: int = 3, dtype: str = "float32") -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).normal(0, 20, size=(n, length)).astype(dtype)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "int8", "bool"])
def test_what_goes_in_comes_out_at_every_batch(copying: Any, dtype: str) -> None:
    with copying(described(dtype=dtype)) as session:
        assert session.device == "cuda"
        for n in (1, 4, 3, 1):
            got = session.run(batch(n, dtype=dtype))["y"]
            assert got.dtype == dtype and np.array_equal(got, batch(n, dtype=dtype)["x"])
        assert session.prepared == 3


@pytest.mark.gpu
def test_a_dynamic_axis_is_cut_to_what_was_loaded(copying: Any) -> None:
    with copying(described(axes={"length": 8})) as session:
        for n, length in ((2, 8), (4, 5), (1, 1)):
            assert np.array_equal(session.run(batch(n, length))["y"], batch(n, length)["x"])


@pytest.mark.gpu
def test_loading_launching_and_fetching_are_apart(copying: Any) -> None:
    with copying(described()) as session:
        for early in (session.launch, session.fetch, lambda: session.device_ms(1)):
            with pytest.raises(Fault, match="nothing is loaded"):
                early()
        session.load(batch(2))
        session.launch()
        first = session.fetch()["y"]
        session.load(batch(3))
        session.launch()
        assert session.fetch()["y"].shape == (3, 3)
        assert np.array_equal(first, batch(2)["x"])
        assert 0 < session.device_ms(5) < 10


@pytest.mark.gpu
def test_a_batch_that_does_not_fit_is_refused_and_the_session_goes_on(copying: Any) -> None:
    with copying(described()) as session:
        with pytest.raises(Fault, match="batch out of range"):
            session.load(batch(5))
        with pytest.raises(Fault, match="doesn't fit"):
            session.load(batch(2, dtype="float64"))
        assert np.array_equal(session.run(batch(2))["y"], batch(2)["x"])


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1])
def test_two_sessions_at_once_close_in_any_order(copying: Any, first: int) -> None:
    sessions = [copying(described()) for _ in range(2)]
    sessions[first].run(batch(1))
    sessions[first].close()
    assert np.array_equal(sessions[1 - first].run(batch(4))["y"], batch(4)["x"])
    sessions[1 - first].close()
    for session in sessions:
        session.close()
        assert session.released == 1
        with pytest.raises(Fault, match="the session is closed"):
            session.run(batch(1))


@pytest.mark.gpu
def test_another_thread_may_use_and_close_a_session(copying: Any) -> None:
    session = copying(described())
    got: list[np.ndarray] = []

    def work() -> None:
        got.append(session.run(batch(2))["y"])
        session.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert np.array_equal(got[0], batch(2)["x"])
    with copying(described()) as again:
        assert np.array_equal(again.run(batch(3))["y"], batch(3)["x"])


@pytest.mark.gpu
def test_all_memory_comes_back_also_after_an_exception(copying: Any) -> None:
    from tasks.engines.cuda_memory import current, driver

    big = described(max_batch=1 << 22)

    def free() -> int:
        with current():
            return int(driver.mem_get_info()[0])

    with copying(described()) as session:
        session.run(batch(1))
    before = free()
    with pytest.raises(ZeroDivisionError), copying(big) as session:
        assert session.memory_bytes >= 2 * 3 * 4 * (1 << 22)
        assert free() < before
        raise ZeroDivisionError
    assert free() == before
    assert session.memory_bytes == 0


@pytest.mark.gpu
def test_a_session_that_does_not_fit_in_memory_says_so_and_holds_nothing(copying: Any) -> None:
    from tasks.engines.cuda_memory import current, driver

    with current():
        before = driver.mem_get_info()[0]
    with pytest.raises(Fault, match="not enough memory") as caught:
        copying(described(max_batch=1 << 40))
    assert "max_batch" in caught.value.do
    with current():
        assert driver.mem_get_info()[0] == before


@pytest.mark.gpu
def test_pytorch_reads_and_writes_the_same_memory(copying: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    with copying(described()) as session:
        session.load(batch(4))
        seen = torch.as_tensor(session.inputs_on_device["x"], device="cuda")
        assert seen.data_ptr() == session.inputs_on_device["x"].ptr
        assert np.array_equal(seen.view(4, 3).cpu().numpy(), batch(4)["x"])
        with torch.cuda.stream(torch.cuda.ExternalStream(session.stream.handle)):
            seen.mul_(2)
        session.launch()
        assert np.array_equal(session.fetch()["y"], 2 * batch(4)["x"])
    assert float(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.gpu
def test_bfloat16_is_seen_as_integers(copying: Any) -> None:
    with copying(described(dtype="bfloat16")) as session:
        buffer = session.inputs_on_device["x"]
        assert buffer.nbytes == 2 * 12 and buffer.__cuda_array_interface__["typestr"].endswith("i2")


def test_with_pycuda_and_without_a_gpu_there_is_no_context() -> None:
    if target.fingerprint().gpu_name:
        pytest.skip("there is a GPU here")
    memory = pytest.importorskip("tasks.engines.cuda_memory", reason="no PyCUDA, or no driver", exc_type=ImportError)
    with pytest.raises(Unavailable, match="no usable NVIDIA GPU here: ") as caught:
        memory.context()
    assert "\n" not in str(caught.value)

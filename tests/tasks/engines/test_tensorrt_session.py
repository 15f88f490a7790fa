"""Sessions of TensorRT and TensorRT for RTX on a GPU that they run on: where the package and the GPU are both here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import manifest, target
from tasks.data import read
from tasks.engines import protocol
from tasks.settings import BuildParams

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """`opened(**settings)`: an open session of an engine of the tiny model, built for this GPU."""
    pytest.importorskip("pycuda")
    pytest.importorskip(request.param)
    artifact = request.getfixturevalue("artifact")
    here = target.fingerprint().compute_capability
    sessions = []

    def build(**settings: Any) -> Any:
        backend = protocol.backend(request.param)
        if request.param == "tensorrt_rtx":
            if here not in backend.RUNS_ON:  # type: ignore[attr-defined]
                pytest.skip(f"TensorRT for RTX doesn't run on compute capability {here}")
            settings |= {"compute_capabilities": [here]}
        folder = tmp_path / f"engine-{len(sessions)}"
        folder.mkdir()
        spec = BuildParams(**{"from": "base-onnx", "backend": request.param, **settings})
        built = backend.build(artifact("base-onnx"), folder, spec)
        manifest.write(folder, built.manifest)
        assert built.layers and built.manifest.precision_found
        sessions.append(protocol.open_engine(folder))
        return sessions[-1]

    yield build
    for session in sessions:
        session.__exit__(None, None, None)


@pytest.fixture
def expected(artifact: Any, data_folder: Path) -> Any:
    """`expected(n)`: n images, and what ONNX Runtime makes of them on the CPU."""

    def run(n: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        batch = {"image": read(data_folder / "test.npz")["image"][:n]}
        with protocol.open_engine(artifact("base-ort")) as session:
            return batch, session.run(batch)["logits"]

    return run


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_every_batch_gives_its_outputs_and_in_any_order(opened: Any, expected: Any, cuda_graph: bool) -> None:
    session = opened(cuda_graph=cuda_graph)
    for n in (1, 64, 7, 1, 64):
        batch, want = expected(n)
        np.testing.assert_allclose(session.run(batch)["logits"], want, rtol=1e-3, atol=1e-3)
    assert session.activation_bytes > 0 and session.memory_bytes >= session.activation_bytes
    assert session.device_ms(10) > 0


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("share_memory", [False, True])
def test_forks_run_at_the_same_time_on_one_engine(
    opened: Any, expected: Any, share_memory: bool, cuda_graph: bool
) -> None:
    session = opened(cuda_graph=cuda_graph)
    first, want_first = expected(64)
    second, want_second = expected(3)
    with session.fork(share_memory) as other:
        assert other.stream.handle != session.stream.handle
        session.load(first)
        other.load(second)
        for _ in range(20):
            session.launch()
            other.launch()
        np.testing.assert_allclose(session.fetch()["logits"], want_first, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(other.fetch()["logits"], want_second, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(session.run(first)["logits"], want_first, rtol=1e-3, atol=1e-3)

"""Sessions of known behaviour, to calibrate the measurement with, and a tiny engine made on the spot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from tasks import manifest
from tasks.engines.protocol import Session
from tasks.errors import Fault
from tasks.manifest import Manifest, TensorSpec
from tasks.settings import BuildParams
from tasks.timing import DEVICE_CALLS
from tasks.workloads.protocol import Arrays

if TYPE_CHECKING:
    from tasks.engines.cuda import CudaSession

# Some 5 µs of a GPU: what spins for less is partly hidden by the start of the next kernel.
BASE_CYCLES = 10_000
# Some 200 µs, in which the host starts the next call of an engine whose launches wait for the GPU.
WAITING_CYCLES = 400_000
# Some 2 ms, which the host's clock can tell.
LONG_CYCLES = 4_000_000
REPEATS = 5


class Planted:
    """What the sessions below have in common: they hold nothing that has to be closed."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    device = "cpu"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Slowed(Planted):
    """A session whose calls take a known share longer: it waits, busily, after each. It doesn't own the session."""

    def __init__(self, inner: Session, share: float) -> None:
        self.inner, self.share = inner, share
        self.inputs, self.outputs, self.device = inner.inputs, inner.outputs, inner.device

    def run(self, batch: Arrays) -> Arrays:
        start = time.perf_counter()
        results = self.inner.run(batch)
        self.inner.synchronize()
        now = time.perf_counter()
        end = now + self.share * (now - start)
        while time.perf_counter() < end:
            pass
        return results

    def synchronize(self) -> None:
        self.inner.synchronize()


class SlowedOnDevice(Planted):
    """A session on a GPU whose launches take a known share longer by the GPU's clock. It doesn't own the session.

    One thread of the GPU spins after each launch, on the session's own stream, and `device_ms` is the session's own.
    With a share of 0 it spins for some 5 µs, which count as the call's, so that both of a pair start as many kernels.
    Where launches wait for the GPU it is 200 µs: while it spins, the host is starting the next call, which would hide
    less. How long a cycle is, the host's clock tells. Where the host takes longer to start a call than the GPU to make
    it, the GPU would be idle meanwhile, and less of the share shows.
    """

    device = "cuda"

    def __init__(self, inner: CudaSession, share: float) -> None:
        self.inner, self.share = inner, share
        self.inputs, self.outputs, self.memory_bytes = inner.inputs, inner.outputs, inner.memory_bytes
        self._spin, self._base = spinner(inner), WAITING_CYCLES if inner.waits else BASE_CYCLES
        self._cycles: int | None = None

    def load(self, batch: Arrays) -> None:
        """As the session's; the first one also measures how long the share is, of all calls from then on."""
        self.inner.load(batch)
        own = self.inner._loaded()
        if self._cycles is None:
            self._cycles = self._base + self._extra(own)
        self.inner._enqueue = self._followed(own, self._cycles)

    def launch(self) -> None:
        self.inner.launch()

    def fetch(self) -> Arrays:
        return self.inner.fetch()

    def run(self, batch: Arrays) -> Arrays:
        self.load(batch)
        self.launch()
        return self.fetch()

    def device_ms(self, calls: int) -> float:
        return self.inner.device_ms(calls)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def _followed(self, own: Callable[[], None], cycles: int) -> Callable[[], None]:
        def both() -> None:
            own()
            self._spin(cycles)

        return both

    def _extra(self, own: Callable[[], None]) -> int:
        """The cycles in the share of a call; what is measured first, with its start-up, is thrown away."""
        if not self.share:
            return 0
        self.inner._enqueue = self._followed(own, self._base)
        taken = median([self.inner.device_ms(DEVICE_CALLS) for _ in range(1 + REPEATS)][1:])
        longer = median([self._waited_ms(2) - self._waited_ms(1) for _ in range(1 + REPEATS)][1:])
        if longer <= 0:
            raise Fault(
                "the GPU doesn't wait as long as it is told to",
                got=f"{longer:.4f} ms for {LONG_CYCLES} cycles more",
                expected="more than 0",
                do="calibrate by the host's clock",
            )
        return round(self.share * taken * LONG_CYCLES / longer)

    def _waited_ms(self, times: int) -> float:
        start = time.perf_counter()
        self._spin(times * LONG_CYCLES)
        self.inner.synchronize()
        return (time.perf_counter() - start) * 1e3


def slowed(inner: Session, share: float, clock: str) -> Session:
    """A session that is slower by a share of each call, by the `host`'s clock or the `device`'s."""
    return SlowedOnDevice(cast("CudaSession", inner), share) if clock == "device" else Slowed(inner, share)


def spins() -> bool:
    """Whether PyTorch reaches a GPU here, and can have it spin."""
    import torch

    return torch.cuda.is_available()


def spinner(session: CudaSession) -> Callable[[int], None]:
    """What has one thread of the GPU spin for so many cycles of its clock, on the session's stream."""
    import torch

    stream = torch.cuda.ExternalStream(session.stream.handle)

    def spin(cycles: int) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    return spin


class Early(Planted):
    """A session whose `run` returns at once, and whose `synchronize` waits until its time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, 0.0

    def run(self, batch: Arrays) -> Arrays:
        self._end = time.perf_counter() + self.seconds
        return {}

    def synchronize(self) -> None:
        while time.perf_counter() < self._end:
            pass


class Profiled(Planted):
    """ONNX Runtime on the CPU with its profiler on, which times each run by itself, in C++."""

    def __init__(self, folder: Path, described: Manifest, prefix: Path) -> None:
        from tasks.engines import ort_start

        if described.backend != "onnxruntime" or described.device != "cpu":
            raise Fault("no profile", got=described.backend, expected="onnxruntime on the CPU", do="use another engine")
        file = str(folder / described.engine_file)
        self._session = ort_start.start(file, "cpu", described.threads, "disabled", profile=prefix)
        self.inputs, self.outputs = described.inputs, described.outputs

    def run(self, batch: Arrays) -> Arrays:
        results = self._session.run(None, batch)
        return dict(zip((o.name for o in self.outputs), results, strict=True))

    def synchronize(self) -> None:
        """CPU calls return when they are done."""

    def milliseconds(self) -> list[float]:
        """End the profile, and return what each run took by it, in order. It holds a million events at most."""
        events: list[dict[str, Any]] = json.loads(Path(self._session.end_profiling()).read_text())
        return [event["dur"] / 1e3 for event in events if event["name"] == "model_run"]


def tiny_engine(folder: Path, width: int, layers: int) -> Path:
    """Build an engine of `layers` matrix products [width, width] with ReLU, for ONNX Runtime on this CPU."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from tasks import onnx_file
    from tasks.engines import onnxruntime

    rng, nodes, weights, last = np.random.default_rng(0), [], [], "x"
    for i in range(layers):
        value = rng.normal(0, (2 / width) ** 0.5, (width, width)).astype(np.float32)
        weights.append(numpy_helper.from_array(value, f"w{i}"))
        nodes += [helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"])]
        last = "y" if i == layers - 1 else f"r{i}"
        nodes += [helper.make_node("Relu", [f"m{i}"], [last])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "tiny", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    source, engine = folder / "source", folder / f"tiny-{width}x{layers}"
    source.mkdir(exist_ok=True)
    engine.mkdir()
    onnx.save(model, source / onnx_file.FILE)
    spec = BuildParams.model_validate({"from": "source", "backend": "onnxruntime"})
    manifest.write(engine, onnxruntime.build(source, engine, spec).manifest)
    return engine

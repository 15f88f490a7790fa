"""The CUDA device layer of every session on a GPU: buffers, pinned host memory, a stream and events, by PyCUDA.

No PyTorch is needed here. The context is shared with PyTorch and ONNX Runtime: see `cuda_memory`.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import pycuda.driver as driver

from tasks.engines.cuda_memory import Buffer as Buffer
from tasks.engines.cuda_memory import context, current
from tasks.engines.protocol import check_batch
from tasks.errors import Fault
from tasks.manifest import Manifest, TensorSpec
from tasks.workloads.protocol import Arrays

# CU_STREAM_NON_BLOCKING: work on the default stream neither waits for this one nor spoils a capture of it.
NON_BLOCKING = 1
_SESSIONS: weakref.WeakSet[CudaSession] = weakref.WeakSet()
Shapes = dict[str, tuple[int, ...]]


class CudaSession(ABC):
    """An engine on the GPU. A backend's session gives `prepare`, and `release` if it holds more than Python frees.

    A subclass that fails while it loads its engine has to `close` itself. One thread at a time may use a session.
    """

    device = "cuda"
    # Whether a launch returns only when the GPU is done.
    waits = False

    def __init__(self, described: Manifest) -> None:
        context()
        self.inputs: Sequence[TensorSpec] = described.inputs
        self.outputs: Sequence[TensorSpec] = described.outputs
        self._max_batch, self._axes = described.max_batch, described.axes
        self.inputs_on_device: dict[str, Buffer] = {}
        self.outputs_on_device: dict[str, Buffer] = {}
        self._ready: dict[tuple[tuple[int, ...], ...], Callable[[], None]] = {}
        self._enqueue: Callable[[], None] | None = None
        self._output_shapes: Shapes = {}
        self.memory_bytes: int | None = 0
        self._open = True
        _SESSIONS.add(self)
        try:
            with self.counted():
                self.stream = driver.Stream(NON_BLOCKING)
                self._start, self._end = driver.Event(), driver.Event()
                for specs, buffers in ((self.inputs, self.inputs_on_device), (self.outputs, self.outputs_on_device)):
                    for spec in specs:
                        buffers[spec.name] = Buffer(spec.dtype, shape_of(spec, self._max_batch, self._axes))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def prepare(self, shapes: Shapes, outputs: Shapes) -> Callable[[], None]:
        """Make ready for inputs of `shapes`; return what enqueues one inference on `stream`.

        It reads `inputs_on_device`, which hold a batch already, and writes `outputs_on_device`, as `outputs` says.
        Called once for all calls with the same shapes, with the context current.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of what the backend holds; called once, before the buffers and the stream go."""

    def load(self, batch: Arrays) -> None:
        """Copy a batch to the device, wait for that, and make ready for its shapes."""
        check_batch(batch, self.inputs, self._max_batch, self._axes)
        with self._at_work():
            for spec in self.inputs:
                self.inputs_on_device[spec.name].upload(batch[spec.name], self.stream)
            self.stream.synchronize()
            shapes = {spec.name: batch[spec.name].shape for spec in self.inputs}
            outputs, key = self._outputs_for(shapes), tuple(shapes.values())
            self._enqueue = None
            if key not in self._ready:
                with self.counted():
                    self._ready[key] = self.prepare(shapes, outputs)
                    self.stream.synchronize()
            self._enqueue, self._output_shapes = self._ready[key], outputs

    def launch(self) -> None:
        """Start one inference on what was loaded last."""
        with self._at_work():
            self._loaded()()

    def fetch(self) -> Arrays:
        """Wait, and return new arrays of the outputs, cut to the batch that was loaded last."""
        with self._at_work():
            self._loaded()
            pinned = {
                spec.name: self.outputs_on_device[spec.name].download(self._output_shapes[spec.name], self.stream)
                for spec in self.outputs
            }
            self.stream.synchronize()
            return {name: value.copy() for name, value in pinned.items()}

    def run(self, batch: Arrays) -> Arrays:
        """Every output by name, of every input by name."""
        self.load(batch)
        self.launch()
        return self.fetch()

    def device_ms(self, calls: int) -> float:
        """Milliseconds per inference on the GPU between two events around `calls` launches of what was loaded last."""
        with self._at_work():
            enqueue = self._loaded()
            self._start.record(self.stream)
            for _ in range(calls):
                enqueue()
            self._end.record(self.stream)
            self._end.synchronize()
            return float(self._end.time_since(self._start)) / calls

    def synchronize(self) -> None:
        """Return when all that was started is done."""
        with self._at_work():
            self.stream.synchronize()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Make the context current, and count the device memory that is taken meanwhile as this session's."""
        with current():
            before = driver.mem_get_info()[0]
            yield
            self.memory_bytes = (self.memory_bytes or 0) + max(0, before - driver.mem_get_info()[0])

    def close(self) -> None:
        """Free all that the session holds, also after a fault on the device; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        with current():
            with contextlib.suppress(driver.Error, AttributeError):
                self.stream.synchronize()
            self._enqueue = None
            self._ready.clear()
            try:
                self.release()
            finally:
                for buffers in (self.inputs_on_device, self.outputs_on_device):
                    for buffer in buffers.values():
                        buffer.free()
                    buffers.clear()
                for name in ("_start", "_end", "stream"):
                    self.__dict__.pop(name, None)
                self.memory_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        if not self._open:
            raise Fault("the session is closed", got="a call", expected="an open session", do="open the engine again")
        with current():
            yield

    def _loaded(self) -> Callable[[], None]:
        if self._enqueue is None:
            raise Fault("nothing is loaded", got="no batch", expected="load before launch", do="call load first")
        return self._enqueue

    def _outputs_for(self, shapes: Shapes) -> Shapes:
        """The outputs' shapes, for inputs of `shapes`: their batch, and their sizes of the dynamic axes."""
        batch, sizes = 1, dict(self._axes)
        for spec in self.inputs:
            batch = shapes[spec.name][0]
            sizes |= {d: n for d, n in zip(spec.shape, shapes[spec.name], strict=True) if isinstance(d, str)}
        return {spec.name: shape_of(spec, batch, sizes) for spec in self.outputs}


@atexit.register
def _close_all() -> None:
    """Close what was left open, while the libraries that sessions need are whole: some abort the process else."""
    for session in list(_SESSIONS):
        with contextlib.suppress(Exception):
            session.close()


def shape_of(spec: TensorSpec, batch: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape at a batch and at sizes of the dynamic axes."""
    return tuple(batch if d is None else sizes[d] if isinstance(d, str) else d for d in spec.shape)

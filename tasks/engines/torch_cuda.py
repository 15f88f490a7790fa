"""Sessions of PyTorch's on the GPU: its kernels on the session's stream, on the session's own buffers."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from tasks.engines.cuda import CudaSession, Shapes
from tasks.engines.cuda_memory import Buffer
from tasks.engines.torch_forms import flags
from tasks.engines.torch_session import Function
from tasks.manifest import Manifest
from tasks.workloads.protocol import Arrays

WARM_UP = 3


class TorchCudaSession(CudaSession):
    """`find` gives the call for inputs of certain shapes, in the manifest's order; it may compile for them.

    With the setting `cuda_graph`, the call is captured once for each set of shapes, and launched as one.
    """

    def __init__(self, described: Manifest, make: Callable[[], Callable[[Shapes], Function]]) -> None:
        torch.cuda.init()
        super().__init__(described)
        self._precision, self._threads = described.settings["precision"], described.threads
        self._graphed = described.settings["cuda_graph"]
        try:
            self._torch_stream = torch.cuda.ExternalStream(self.stream.handle)
            with self.counted():
                self._find: Callable[[Shapes], Function] | None = make()
                torch.cuda.synchronize()
        except BaseException:
            self.close()
            raise

    def prepare(self, shapes: Shapes, outputs: Shapes) -> Callable[[], None]:
        """Warm up, which compiles and finds the best kernels, and capture if that is asked for."""
        assert self._find is not None
        call = self._find(shapes)
        inputs = [view(self.inputs_on_device[spec.name], shapes[spec.name]) for spec in self.inputs]
        targets = {name: view(self.outputs_on_device[name], shape) for name, shape in outputs.items()}

        def once() -> None:
            for name, value in call(*inputs).items():
                targets[name].copy_(value)

        def eager() -> None:
            with self._at_torch():
                once()

        for _ in range(WARM_UP):
            eager()
        self.stream.synchronize()
        if not self._graphed:
            return eager
        with self._at_torch():
            graph = self._captured(once)

        def replay() -> None:
            with torch.cuda.stream(self._torch_stream):
                graph.replay()

        return replay

    @contextlib.contextmanager
    def bare(self, batch: Arrays) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
        """PyTorch's call on tensors of its own, or the replay of a graph of it; see `BareSession`."""
        with self._at_work(), self._at_torch():
            assert self._find is not None
            call = self._find({spec.name: batch[spec.name].shape for spec in self.inputs})
            inputs = [torch.from_numpy(np.ascontiguousarray(batch[spec.name])).cuda() for spec in self.inputs]
            for _ in range(WARM_UP):
                results = call(*inputs)
            self._torch_stream.synchronize()

            def once() -> None:
                nonlocal results
                results = call(*inputs)

            again = self._captured(once).replay if self._graphed else once

            def run() -> dict[str, torch.Tensor]:
                again()
                return results

            try:
                yield run
            finally:
                self._torch_stream.synchronize()

    def _captured(self, once: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of `once`, which has run before, on the session's stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._torch_stream, capture_error_mode="thread_local"):
            once()
        return graph

    @contextlib.contextmanager
    def _at_torch(self) -> Iterator[None]:
        stream = torch.cuda.stream(self._torch_stream)
        with flags("cuda", self._precision, self._threads), stream, torch.inference_mode():
            yield

    def release(self) -> None:
        """Let go of the model and its graphs, and give PyTorch's unused memory back to the device.

        A module that was traced and its graph hold each other: only a collection frees their weights.
        """
        self._find = None
        gc.collect()
        torch.cuda.empty_cache()


def view(buffer: Buffer, shape: tuple[int, ...]) -> torch.Tensor:
    """The start of a buffer as a tensor of `shape`; nothing is copied."""
    flat: torch.Tensor = torch.as_tensor(buffer, device="cuda")
    return flat[: math.prod(shape)].view(shape)

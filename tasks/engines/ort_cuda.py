"""ONNX Runtime's CUDA provider on the project's own buffers and stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from tasks.engines.cuda import Buffer, CudaSession, Shapes
from tasks.engines.cuda_memory import current
from tasks.engines.ort_start import start
from tasks.errors import Fault, Unavailable
from tasks.manifest import Manifest
from tasks.workloads.protocol import Arrays

# Launches after which one is made at whose end ONNX Runtime waits, and frees the pinned memory that kernels took.
DRAIN_EVERY = 256


class OnnxRuntimeCudaSession(CudaSession):
    """A graph run by the CUDA provider, which is read back and not assumed.

    Inputs and outputs are bound to the session's buffers once for each set of shapes. With `cuda_graph` ONNX Runtime
    captures one graph for each set, under an annotation of its own; it waits for the GPU at each replay of one.
    Else no launch waits.
    """

    def __init__(self, folder: Path, described: Manifest) -> None:
        self._drain: Callable[[], None] | None = None
        self._undrained = 0
        super().__init__(described)
        self.waits = self._graphs = bool(described.settings["cuda_graph"])
        try:
            with self.counted():
                self._session = start(
                    str(folder / described.engine_file),
                    "cuda",
                    described.threads,
                    described.settings["optimization"] if described.settings["optimize_on_open"] else "disabled",
                    settings=described.settings,
                    strict=not described.settings["cpu_nodes"],
                    stream=self.stream.handle,
                )
        except (Fault, Unavailable):
            self.close()
            raise
        except Exception as error:
            self.close()
            raise Fault(
                f"ONNX Runtime can't open engine {folder.name}",
                got=" ".join(str(error).split())[:400],
                expected="a graph that its CUDA provider runs as a whole, if cuda_graph is set"
                if self._graphs
                else "the graph that build wrote",
                do="build it without cuda_graph" if self._graphs else f"rebuild: {described.rebuild}",
            ) from None

    def prepare(self, shapes: Shapes, outputs: Shapes) -> Callable[[], None]:
        """Bind the buffers; with CUDA graphs, run twice inside ONNX Runtime, which captures the second run."""
        session, binding, options = self._session, self._session.io_binding(), ort.RunOptions()
        for name, shape in shapes.items():
            buffer = self.inputs_on_device[name]
            binding.bind_input(name, "cuda", 0, _element(buffer), shape, buffer.ptr)
        for name, shape in outputs.items():
            buffer = self.outputs_on_device[name]
            binding.bind_output(name, "cuda", 0, _element(buffer), shape, buffer.ptr)
        # The base class waits, where waiting is due.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self._graphs:
            options.add_run_config_entry("gpu_graph_id", str(len(self._ready) + 1))
            session.run_with_iobinding(binding, options)
            return lambda: session.run_with_iobinding(binding, options)
        waiting = ort.RunOptions()

        def drain() -> None:
            session.run_with_iobinding(binding, waiting)

        def launch() -> None:
            self._drain, self._undrained = drain, self._undrained + 1
            session.run_with_iobinding(binding, options)

        return launch

    def load(self, batch: Arrays) -> None:
        """As every session's; every 256 launches it gives back what they hold of pinned memory, by one that waits."""
        if self._drain and self._undrained >= DRAIN_EVERY:
            with current():
                self._drain()
            self._drain, self._undrained = None, 0
        super().load(batch)

    def release(self) -> None:
        """Destroy the session before its stream and buffers.

        What launches hold of pinned memory has to go first: the session's end would leave it to a callback of the
        stream, which may not free what was the session's (CUDA's error 800), and the process would be aborted.
        """
        drain, self._drain = self._drain, None
        if drain:
            with contextlib.suppress(Exception):
                drain()
                self.stream.synchronize()
        del drain
        self.__dict__.pop("_session", None)


def _element(buffer: Buffer) -> type[np.generic] | int:
    """What IO binding takes for a type: NumPy's, or ONNX's number where NumPy has none."""
    if buffer.dtype.isbuiltin == 1:
        return buffer.dtype.type
    return int(onnx.helper.np_dtype_to_tensor_dtype(buffer.dtype))

"""Running a TensorRT engine, of any of its kinds, on PyCUDA's buffers and stream. No PyTorch is needed.

A session has an execution context and a stream; `fork` gives further ones on the same engine. The memory for
activations is given to TensorRT, not taken by it, so that contexts can share it.
Manual: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/python-api-docs.html
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pycuda.driver as driver

from tasks.engines import trt_callbacks
from tasks.engines.cuda import CudaSession, Shapes
from tasks.engines.cuda_graph import Graph
from tasks.errors import Fault
from tasks.manifest import Manifest

GRAPHS = 32  # Each shape's graph has a context of its own; shapes beyond these run without one.


@dataclass(frozen=True)
class Engine:
    """An engine, its logger, how to make an execution context that is given its memory, and whether to capture graphs.

    `save` is called when a session on it ends, with the CUDA context current.
    """

    engine: Any
    log: Any
    context: Callable[[], Any]
    capture: bool
    save: Callable[[], None] | None = None


class Activations:
    """Device memory for one engine's activations, which contexts take in turns; freed with its last user.

    The CUDA context has to be current in each call.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = driver.mem_alloc(max(1, nbytes))
        self.ptr = int(self._memory)
        self._done = driver.Event(driver.event_flags.DISABLE_TIMING)
        self.users = 0

    def turn(self, stream: Any, enqueue: Callable[[], None]) -> None:
        """Enqueue on a stream, after whatever another stream was given to do in this memory."""
        if self.users > 1:
            stream.wait_for_event(self._done)
        enqueue()
        if self.users > 1:
            self._done.record(stream)

    def leave(self) -> None:
        """One user less."""
        self.users -= 1
        if not self.users:
            self._memory.free()


class TensorRtSession(CudaSession):
    """An engine of tensorrt or tensorrt_rtx, the module `trt`, on the GPU.

    `activation_bytes` is what its layers' results need at the largest shapes; `memory_bytes` holds that too, unless it
    is another session's. Raises Fault if TensorRT refuses a shape or a launch, with its own words.
    """

    def __init__(self, trt: Any, described: Manifest, engine: Engine, shared: Activations | None = None) -> None:
        self.trt = trt
        self._described, self._on = described, engine
        self._graphs: list[Graph] = []
        self._contexts: list[Any] = []
        self._context: Any = None
        self._shapes: Shapes | None = None
        self._activations: Activations | None = None
        self.activation_bytes = int(engine.engine.device_memory_size_v2)
        super().__init__(described)
        try:
            with self.counted():
                self._activations = shared or Activations(self.activation_bytes)
                self._activations.users += 1
                self._check_tensors()
                self._context = self._new_context()
        except BaseException:
            self.close()
            raise

    @trt_callbacks.uncollected()
    def fork(self, share_memory: bool = False) -> TensorRtSession:
        """Another session on the same engine, with a context, a stream and buffers of its own.

        With `share_memory` both use one memory for activations: their launches then run one after the other.
        """
        self.synchronize()  # What was started alone was not noted for others to wait for.
        return TensorRtSession(self.trt, self._described, self._on, self._activations if share_memory else None)

    @trt_callbacks.uncollected()
    def prepare(self, shapes: Shapes, outputs: Shapes) -> Callable[[], None]:
        """Give TensorRT the shapes; with CUDA graphs, run them once and capture the graph in a context of its own.

        A graph must not outlive a change of its context, so that there is one for each.
        """
        activations, stream = self._activations, self.stream
        assert activations is not None
        if not self._on.capture or len(self._graphs) >= GRAPHS:
            self._use(shapes, outputs)
            activations.turn(stream, lambda: self._execute(self._context))
            return lambda: activations.turn(stream, lambda: self._with(shapes, outputs))
        context = self._new_context()
        self._give(context, shapes, outputs)
        # TensorRT finishes what a change of shape needs at the first launch, which can't be captured.
        activations.turn(stream, lambda: self._execute(context))
        stream.synchronize()
        graph = Graph(stream.handle, lambda: self._execute(context))
        self._graphs.append(graph)
        return lambda: activations.turn(stream, graph.launch)

    @trt_callbacks.uncollected()
    def release(self) -> None:
        """Free graphs and contexts, then the activations if nobody else uses them."""
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        self._contexts.clear()
        self._context = None
        activations, self._activations = self._activations, None
        if activations is not None:
            activations.leave()
        if self._on.save is not None:
            self._on.save()

    def _check_tensors(self) -> None:
        """Raise Fault if the engine's inputs and outputs aren't those of the manifest."""
        engine, trt = self._on.engine, self.trt
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        inputs = {n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT}
        if inputs != set(self.inputs_on_device) or set(names) - inputs != set(self.outputs_on_device):
            raise Fault(
                "the engine isn't the one that its manifest describes",
                got=", ".join(names),
                expected=", ".join([*self.inputs_on_device, *self.outputs_on_device]),
                do=f"rebuild: {self._described.rebuild}",
            )

    def _new_context(self) -> Any:
        context = self._on.context()
        if context is None:
            raise self._fault("no execution context", "memory for it on the GPU")
        assert self._activations is not None
        context.set_device_memory(self._activations.ptr, self._activations.nbytes)
        self._contexts.append(context)
        return context

    def _with(self, shapes: Shapes, outputs: Shapes) -> None:
        """Execute in the session's own context, which may have run other shapes since."""
        if self._shapes != shapes:
            self._use(shapes, outputs)
        self._execute(self._context)

    def _use(self, shapes: Shapes, outputs: Shapes) -> None:
        self._shapes = None
        self._give(self._context, shapes, outputs)
        self._shapes = shapes

    def _give(self, context: Any, shapes: Shapes, outputs: Shapes) -> None:
        """Set a context's input shapes and all addresses; Fault if its outputs then aren't `outputs`."""
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._fault(f"shape {shape} of input {name}", "one within the optimisation profile")
            context.set_tensor_address(name, self.inputs_on_device[name].ptr)
        for name in outputs:
            context.set_tensor_address(name, self.outputs_on_device[name].ptr)
        if unknown := context.infer_shapes():
            raise self._fault(f"no shape of {', '.join(unknown)}", "all shapes, by those of the inputs")
        for name, shape in outputs.items():
            if (found := tuple(context.get_tensor_shape(name))) != shape:
                raise self._fault(f"output {name} of shape {found}", f"{shape}, by the manifest")

    def _execute(self, context: Any) -> None:
        if not context.execute_async_v3(self.stream.handle):
            raise self._fault("a launch that failed", "an inference")

    def _fault(self, got: str, expected: str) -> Fault:
        return Fault(
            f"TensorRT refused engine {self._described.engine_file}",
            got=f"{got}: {trt_callbacks.said(self._on.log, 'it gives no reason')}",
            expected=expected,
            do=f"rebuild: {self._described.rebuild}",
        )

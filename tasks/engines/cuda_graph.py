"""CUDA graphs of what a stream is given, through the driver's own library: PyCUDA has no graphs (up to 2026.1).

Manual: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable

from tasks.errors import Fault, Unavailable

THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may go on allocating.


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"no CUDA graphs here: {error}") from None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, arguments in {
        "cuStreamBeginCapture_v2": (pointer, number),
        "cuStreamEndCapture": (pointer, ctypes.POINTER(pointer)),
        "cuGraphInstantiateWithFlags": (ctypes.POINTER(pointer), pointer, ctypes.c_ulonglong),
        "cuGraphLaunch": (pointer, pointer),
        "cuGraphDestroy": (pointer,),
        "cuGraphExecDestroy": (pointer,),
        "cuGetErrorName": (number, ctypes.POINTER(ctypes.c_char_p)),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    return library


class Graph:
    """What `enqueue` gives to a stream, captured once. The context has to be current in every call.

    `stream` is the handle of a stream that isn't the default one. What was captured reads and writes the same
    addresses each time. Raises Fault if something in it can't be captured.
    """

    def __init__(self, stream: int, enqueue: Callable[[], None]) -> None:
        self._stream = ctypes.c_void_p(stream)
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        _check("cuStreamBeginCapture_v2", self._stream, THREAD_LOCAL)
        try:
            enqueue()
        except BaseException:
            _driver().cuStreamEndCapture(self._stream, ctypes.byref(graph))
            raise
        _check("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            _check("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, 0)
        finally:
            _driver().cuGraphDestroy(graph)
        self._launch = functools.partial(_driver().cuGraphLaunch, self._executable, self._stream)

    def launch(self) -> None:
        """Start it once on its stream."""
        if code := self._launch():
            raise _fault("cuGraphLaunch", code)

    def close(self) -> None:
        """Free it; a second call does nothing. The stream must be done with it."""
        if self._executable:
            with contextlib.suppress(Unavailable):
                _driver().cuGraphExecDestroy(self._executable)
            self._executable = ctypes.c_void_p()


def _check(name: str, *arguments: object) -> None:
    if code := getattr(_driver(), name)(*arguments):
        raise _fault(name, code)


def _fault(name: str, code: int) -> Fault:
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(text))
    return Fault(
        "a CUDA graph failed",
        got=f"{name}: {(text.value or b'unknown error').decode()} ({code})",
        expected="work that a stream can capture: no allocation, no waiting, no default stream",
        do="leave build.*.cuda_graph out for this engine",
    )

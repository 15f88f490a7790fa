"""The GPU's context and memory, by PyCUDA: the lower half of the CUDA device layer.

Sessions share the device's primary context with PyTorch and ONNX Runtime, and make it current only while they work,
on whatever thread that is; it lives as long as the process.
Manual: https://documen.tician.de/pycuda/driver.html
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pycuda.driver as driver

from tasks.errors import Fault, Unavailable


@functools.cache
def context() -> Any:
    """The primary context of the first GPU, not current; Unavailable, in one line, without a GPU or driver."""
    try:
        driver.init()
        return driver.Device(0).retain_primary_context()
    except driver.Error as error:
        raise Unavailable(f"no usable NVIDIA GPU here: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def current() -> Iterator[None]:
    """Make the context current on this thread for a while; what was current before is so again afterwards."""
    context().push()
    try:
        yield
    finally:
        driver.Context.pop()


class Buffer:
    """Device memory of one tensor at its largest size, and as much pinned host memory.

    A smaller tensor lies contiguously from its start. Other libraries see all elements as one flat array
    (`torch.as_tensor(buffer, device="cuda")[:n].view(shape)` copies nothing), and what NumPy lacks, such as
    bfloat16, as integers.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = numpy_type(dtype)
        self.shape, self.size = shape, math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        try:
            self._memory = driver.mem_alloc(max(1, self.nbytes))
            self.ptr = int(self._memory)
            self._pinned = driver.pagelocked_empty(max(1, self.nbytes), np.uint8)
        except driver.MemoryError:
            self.free()
            raise Fault(
                "not enough memory for a tensor of the engine",
                got=f"{driver.mem_get_info()[0]} bytes free on the GPU",
                expected=f"{self.nbytes} bytes there and in pinned host memory, for {dtype} {shape}",
                do="lower build.*.max_batch and rebuild, or free the GPU",
            ) from None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        dtype = (
            self.dtype if self.dtype.kind in "biuf" and self.dtype.isbuiltin else np.dtype(f"i{self.dtype.itemsize}")
        )
        return {"shape": (self.size,), "typestr": dtype.str, "data": (self.ptr, False), "strides": None, "version": 3}

    def host(self, shape: tuple[int, ...]) -> np.ndarray:
        """The pinned memory, from its start, as an array of `shape`; the next call's is the same memory."""
        return self._pinned[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).reshape(shape)

    def upload(self, value: np.ndarray, stream: Any) -> None:
        """Copy an array to the device's memory on a stream; the pinned copy must be left alone until that is done."""
        pinned = self.host(value.shape)
        np.copyto(pinned, value)
        driver.memcpy_htod_async(self.ptr, pinned, stream)

    def download(self, shape: tuple[int, ...], stream: Any) -> np.ndarray:
        """Copy a tensor of `shape` to the pinned memory on a stream, and return that; valid once the stream is done."""
        pinned = self.host(shape)
        driver.memcpy_dtoh_async(pinned, self.ptr, stream)
        return pinned

    def free(self) -> None:
        """Give the memory back; a second call does nothing. The context has to be current."""
        for memory in (self.__dict__.pop("_memory", None), getattr(self.__dict__.pop("_pinned", None), "base", None)):
            if memory is not None:
                with contextlib.suppress(driver.Error):  # After a fault on the device nothing can be freed.
                    memory.free()


def numpy_type(name: str) -> np.dtype[Any]:
    """The NumPy type of a name in a manifest; bfloat16 and the like come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))

"""CUDA graphs through the driver's library, on a real GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.errors import Fault

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Any:
    """A stream, two device arrays of 1,000 integers, and functions to write and read them."""
    pytest.importorskip("pycuda")
    import pycuda.driver as driver

    from tasks.engines.cuda import Buffer, current

    with current():
        stream = driver.Stream(1)
        source, copy = Buffer("int32", (1000,)), Buffer("int32", (1000,))

        def put(value: int) -> None:
            source.upload(np.full(1000, value, np.int32), stream)
            stream.synchronize()

        def enqueue() -> None:
            driver.memcpy_dtod_async(copy.ptr, source.ptr, source.nbytes, stream)

        def got() -> np.ndarray:
            values = copy.download((1000,), stream)
            stream.synchronize()
            return values.copy()

        yield stream, put, enqueue, got
        source.free()
        copy.free()


def test_a_graph_does_each_time_what_was_captured(device: Any) -> None:
    from tasks.engines.cuda_graph import Graph

    stream, put, enqueue, got = device
    put(1)
    enqueue()
    graph = Graph(stream.handle, enqueue)
    for value in (2, 3):
        put(value)
        assert (got() == value - 1).all()
        graph.launch()
        assert (got() == value).all()
    graph.close()
    graph.close()


def test_capturing_does_not_run_what_it_captures(device: Any) -> None:
    from tasks.engines.cuda_graph import Graph

    stream, put, enqueue, got = device
    put(4)
    enqueue()
    put(5)
    graph = Graph(stream.handle, enqueue)
    assert (got() == 4).all()
    graph.close()


def test_what_can_not_be_captured_is_a_fault_and_the_stream_goes_on(device: Any) -> None:
    from tasks.engines.cuda_graph import Graph

    stream, put, enqueue, got = device
    put(6)

    def waits() -> None:
        enqueue()
        stream.synchronize()

    with pytest.raises(Exception, match=r"(?i)captur"):
        Graph(stream.handle, waits)
    enqueue()
    assert (got() == 6).all()


def test_the_default_stream_can_not_be_captured(device: Any) -> None:
    from tasks.engines.cuda_graph import Graph

    with pytest.raises(Fault, match="a CUDA graph failed"):
        Graph(0, lambda: None)

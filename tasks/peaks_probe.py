"""The probes behind peaks.py: copies and matrix products on random data, timed until their time is used up.

Zeros are never used: a GPU's clock is higher on them, since fewer bits toggle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tasks.engines.torch_forms import flags
from tasks.peaks import Rate
from tasks.target import last_level_cache_bytes

REPEATS, LEAST = 25, 3
SMALL_CPU = 128 << 10  # Two of these lie in a core's second-level cache.
MAX_BUFFER = 1 << 30
BLOCK = 1 << 20
SMALL, SLOW_S = 256, 0.005
LAUNCHES = 10
Seconds = Callable[[], float]
Work = Callable[[], object]


def repeated(seconds: Seconds, amount: float, by: str, budget_s: float) -> Rate:
    """The rate at which `seconds()`, one timed piece of work, does `amount` units.

    It is done 25 times, and on where other work disturbs it, until the time is used up; at least 3 times.
    """
    seconds()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < LEAST or (
        time.perf_counter() < end and (len(taken) < REPEATS or _rate(taken, amount, by).disturbed)
    ):
        taken.append(seconds())
    return _rate(taken, amount, by)


def _rate(taken: list[float], amount: float, by: str) -> Rate:
    return Rate(amount / min(taken), amount / statistics.median(taken), amount / max(taken), len(taken), by)


def best(rates: list[Rate]) -> Rate:
    """That of several ways which got furthest."""
    return max(rates, key=lambda rate: rate.best)


def on_host(work: Work, times: int = 1) -> Seconds:
    """Seconds that `times` calls take by the host's clock, for work that is done when it returns."""

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - start

    return seconds


def on_gpu(work: Work, times: int = LAUNCHES) -> Seconds:
    """Seconds that `times` launches take by the GPU's clock, between two events."""

    def seconds() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return seconds


def _random(count: int, device: str) -> torch.Tensor:
    """Bytes [count]: a random MiB, over and over, since a CPU takes seconds for a random GiB."""
    generator, many = torch.Generator(device).manual_seed(0), min(count, BLOCK)
    block = torch.randint(0, 256, (many,), dtype=torch.uint8, device=device, generator=generator)
    return block.repeat(-(-count // many))[:count].clone()


def cpu_memory(budget_s: float) -> Rate:
    """Bytes read and written a second by copies that no cache holds, on PyTorch's threads."""
    size = min(max(2 * last_level_cache_bytes(), 64 << 20), MAX_BUFFER)
    source, target = _random(size, "cpu").view(torch.float32), _random(size, "cpu").view(torch.float32)
    return repeated(on_host(lambda: target.copy_(source)), 2 * size, f"copies of {size >> 20} MiB", budget_s)


def cpu_cache(budget_s: float, threads: int) -> Rate:
    """The same for copies that stay in the cores' own caches."""
    size, times = SMALL_CPU * threads, 200
    source, target = _random(size, "cpu").view(torch.float32), _random(size, "cpu").view(torch.float32)
    seconds = on_host(lambda: target.copy_(source), times)
    return repeated(seconds, 2 * size * times, f"copies of {size >> 10} KiB", budget_s)


def cpu_float(name: str, budget_s: float, threads: int) -> Rate:
    """Operations a second of square products in fp32, fp16 or bf16; the faster library's, in fp32.

    A format without instructions of its own is hundreds of times slower: it is tried on small matrices first.
    """
    if name == "fp32":
        a = _normal(_size(threads))
        found = _onnxruntime("MatMul", a.numpy(), a.numpy(), threads, budget_s / 2)
        return best([found, _torch(a, a, budget_s / 2)])
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    few, many = _normal(SMALL).to(kind), _normal(_size(threads)).to(kind)
    small = _torch(few, few, budget_s / 4)
    if 2 * SMALL**3 / small.best > SLOW_S:
        return small
    return _torch(many, many, budget_s)


def _size(threads: int) -> int:
    """Rows of square matrices that keep threads busy, for a few milliseconds at most."""
    return 512 if threads <= 4 else 1024 if threads <= 16 else 2048


def _normal(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((size, size), np.float32))


def _torch(a: torch.Tensor, b: torch.Tensor, budget_s: float) -> Rate:
    out, size = torch.empty_like(a), len(a)
    return repeated(on_host(lambda: torch.mm(a, b, out=out)), 2 * size**3, f"torch.mm of {size}", budget_s)


def cpu_int8(budget_s: float, threads: int) -> Rate:
    """Operations a second of products of unsigned by signed bytes in ONNX Runtime."""
    rng, size = np.random.default_rng(0), _size(threads)
    a = rng.integers(0, 256, (size, size), dtype=np.uint8)
    b = rng.integers(-127, 128, (size, size), dtype=np.int8)
    return _onnxruntime("MatMulInteger", a, b, threads, budget_s)


def _onnxruntime(op: str, a: np.ndarray, b: np.ndarray, threads: int, budget_s: float) -> Rate:
    from onnx import helper, numpy_helper

    from tasks.engines.ort_start import start

    shape, kinds = list(a.shape), helper.np_dtype_to_tensor_dtype
    out = np.dtype(np.int32 if a.dtype == np.uint8 else a.dtype)
    graph = helper.make_graph(
        [helper.make_node(op, ["a", "b"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("a", kinds(a.dtype), shape)],
        [helper.make_tensor_value_info("y", kinds(out), shape)],
        [numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = start(model.SerializeToString(), "cpu", threads, "all")
    seconds = on_host(lambda: session.run(None, {"a": a}))
    return repeated(seconds, 2 * len(a) ** 3, f"ONNX Runtime's {op} of {len(a)}", budget_s)


def cuda_memory(budget_s: float) -> Rate:
    """Bytes read and written a second by copies on the GPU that its cache doesn't hold."""
    free, _ = torch.cuda.mem_get_info()
    size = min(MAX_BUFFER, free // 4) // 512 * 512
    source, target = _random(size, "cuda"), _random(size, "cuda")
    seconds = on_gpu(lambda: target.copy_(source))
    return repeated(seconds, 2 * size * LAUNCHES, f"copies of {size >> 20} MiB", budget_s)


def cuda_cache_bytes() -> int:
    """The size of the GPU's second-level cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def cuda_cache(budget_s: float) -> Rate:
    """The same for copies that stay in the second-level cache, 50 in one CUDA graph: no launch is waited for."""
    size = max(1 << 20, cuda_cache_bytes() // 8) // 512 * 512
    source, target = _random(size, "cuda"), _random(size, "cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    graph, inside = torch.cuda.CUDAGraph(), 50
    with torch.cuda.graph(graph):
        for _ in range(inside):
            target.copy_(source)
    return repeated(on_gpu(graph.replay), 2 * size * inside * LAUNCHES, f"copies of {size >> 10} KiB", budget_s)


def cuda_matrix(name: str, budget_s: float) -> Rate:
    """Operations a second of square products in a format on the GPU; what PyTorch raises if it has none is left."""
    size = 4096 if name == "fp32" else 8192
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(size, size, device="cuda", generator=generator) for _ in range(2))
    work: Work
    if name == "int8":
        p, q = ((value * 40).round().clamp(-127, 127).to(torch.int8) for value in (a, b))
        work = _call(torch._int_mm, p, q.t())
    elif name == "fp8":
        p, q = (value.to(torch.float8_e4m3fn) for value in (a, b))
        one = torch.ones((), device="cuda")
        work = _call(torch._scaled_mm, p, q.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
        work = _call(torch.mm, a.to(kind), b.to(kind))
    with flags("cuda", name, torch.get_num_threads()):
        return repeated(on_gpu(work), 2 * size**3 * LAUNCHES, f"{size} by {size} in PyTorch", budget_s)


def _call(function: Callable[..., Any], *values: Any, **named: Any) -> Work:
    return lambda: function(*values, **named)

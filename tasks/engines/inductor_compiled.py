"""A program compiled by Inductor as its sizes are met, with kernels from a cache that other processes can use."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tasks.engines.torch_graph import copy_of
from tasks.engines.torch_session import Function
from tasks.exported import Notes, by_name

Shapes = dict[str, tuple[int, ...]]


class Compiled:
    """A formed program, compiled as needed: alone for a size that counts, once for all the others.

    Called with the inputs' shapes, it gives the call for them. Sizes of 1 are compiled for apart, since the compiler
    takes what is 1 for fixed.
    """

    def __init__(self, module: fx.GraphModule, notes: Notes, static: list[int], threads: int) -> None:
        self._module, self._notes, self._static, self._threads = module, notes, static, threads
        self._made: dict[tuple[int | None, ...], Function] = {}

    def __call__(self, shapes: Shapes) -> Function:
        specs = self._notes.inputs
        sizes = [(d, n) for spec in specs for d, n in zip(spec.shape, shapes[spec.name], strict=True)]
        alone = all(
            n in self._static if d is None else n == self._notes.axes.get(d, n)
            for d, n in sizes
            if not isinstance(d, int)
        )
        key = tuple(n if alone or isinstance(d, int) or n == 1 else None for d, n in sizes)
        if key not in self._made:
            self._made[key] = self._compiled(alone)
        return self._made[key]

    def _compiled(self, alone: bool) -> Function:
        # A session checks its inputs, and has a call of its own for each form of them: what is left to check is sizes.
        options: dict[str, Any] = {
            "guard_filter_fn": lambda guards: [guard.guard_type == "SHAPE_ENV" for guard in guards],
            "cpp.threads": self._threads,
        }
        call = torch.compile(copy_of(self._module), fullgraph=True, dynamic=False if alone else None, options=options)
        names = tuple(spec.name for spec in self._notes.outputs)

        ready = False

        def run(*inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            nonlocal ready
            if not alone:
                self._free(inputs)
            if ready:
                return by_name(call(*inputs), names)
            with _stable_keys():
                results = by_name(call(*inputs), names)
            ready = True
            return results

        return run

    def _free(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Mark the axes that may differ from call to call."""
        for spec, value in zip(self._notes.inputs, inputs, strict=True):
            for axis, size in enumerate(spec.shape):
                if not isinstance(size, int) and value.shape[axis] > 1:
                    torch._dynamo.mark_dynamic(value, axis)


@contextlib.contextmanager
def fresh_caches() -> Iterator[None]:
    """Caches that hold what is compiled in the block alone, whatever was before; and no trace of them after."""
    from torch._inductor.utils import fresh_cache
    from torch.compiler._cache import CacheArtifactManager

    with fresh_cache(), CacheArtifactManager.with_fresh_cache():
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def _stable_keys() -> Iterator[None]:
    """Keys of the compiler's caches that are the same in every process.

    A key is the digest of a pickle. PyTorch pickles a memory format as the attribute `torch.contiguous_format` of the
    module that was loaded first of all that imported torch, and that differs from program to program.
    """
    before = copyreg.dispatch_table.get(torch.memory_format)
    copyreg.pickle(torch.memory_format, _reduced)
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[torch.memory_format]
        else:
            copyreg.dispatch_table[torch.memory_format] = before


def _reduced(layout: torch.memory_format) -> tuple[Any, tuple[str]]:
    return _layout, (str(layout).removeprefix("torch."),)


def _layout(name: str) -> torch.memory_format:
    layout: torch.memory_format = getattr(torch, name)
    return layout

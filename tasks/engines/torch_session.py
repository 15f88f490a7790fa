"""Sessions of PyTorch's on the CPU: a call on tensors, under the engine's own flags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch

from tasks.engines.protocol import check_batch
from tasks.engines.torch_forms import flags
from tasks.manifest import Manifest, TensorSpec
from tasks.workloads.protocol import Arrays

Function = Callable[..., dict[str, torch.Tensor]]


class CpuSession:
    """`call` takes the inputs in the manifest's order, and gives outputs by name."""

    device = "cpu"

    def __init__(self, described: Manifest, call: Function) -> None:
        self._call = call
        self._threads, self._max_batch, self._axes = described.threads, described.max_batch, described.axes
        self._precision = described.settings["precision"]
        self.inputs: Sequence[TensorSpec] = described.inputs
        self.outputs: Sequence[TensorSpec] = described.outputs

    def run(self, batch: Arrays) -> Arrays:
        check_batch(batch, self.inputs, self._max_batch, self._axes)
        with flags("cpu", self._precision, self._threads), torch.inference_mode():
            outputs = self._call(*(torch.from_numpy(np.ascontiguousarray(batch[s.name])) for s in self.inputs))
        return {spec.name: outputs[spec.name].numpy() for spec in self.outputs}

    @contextlib.contextmanager
    def bare(self, batch: Arrays) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
        """PyTorch's call on tensors of a batch; see `BareSession`."""
        tensors = [torch.from_numpy(np.ascontiguousarray(batch[s.name])) for s in self.inputs]
        with flags("cpu", self._precision, self._threads), torch.inference_mode():
            yield lambda: self._call(*tensors)

    def synchronize(self) -> None:
        """Calls on the CPU return when they are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__dict__.pop("_call", None)

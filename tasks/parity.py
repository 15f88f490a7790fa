"""Proof that an ONNX file computes what its PyTorch model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tasks import onnx_file
from tasks.errors import Fault
from tasks.fit import eval_mode, forward, tensors
from tasks.proof import rms
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

PROOF_BATCHES = (1, 3, 7)
TOLERANCE = 1e-3
# Integer kernels round elsewhere than PyTorch's floats: now and then a value lands on the next step. 30 dB.
QUANTIZED_TOLERANCE = 0.03


def parity(model: nn.Module, task: Workload, folder: Path, samples: Arrays, quantized: bool = False) -> float:
    """Largest difference of `folder/model.onnx` in ONNX Runtime from PyTorch, by the output's largest magnitude.

    Over batches of 1, 3 and 7, each at the largest size of the dynamic axis, at what it needs, and at half of that.
    Of a quantised file: the root of the mean square of a run's difference, by that of the output over all runs, since a
    sample between two classes has outputs near 0.
    Raises Fault if the file refuses a size, or differs by more than 1e-3 (quantised: 3e-2).
    """
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / onnx_file.FILE), providers=["CPUExecutionProvider"])

    def run(part: Arrays) -> Arrays:
        return dict(zip(task.OUTPUTS, session.run(list(task.OUTPUTS), part), strict=True))

    return compare(model, task, run, samples, quantized)


def compare(
    model: nn.Module, task: Workload, run: Callable[[Arrays], Arrays], samples: Arrays, quantized: bool = False
) -> float:
    """Largest difference of what `run` gives for inputs by name from the model's outputs; as `parity`."""
    runs: list[tuple[str, Arrays, Arrays]] = []
    with eval_mode(model), torch.inference_mode():
        for size, part in _parts(task, samples):
            expected = {name: value.numpy() for name, value in forward(model, task, tensors(part)).items()}
            try:
                runs.append((size, expected, run(part)))
            except Exception as error:
                raise Fault(
                    f"the exported model refuses {size}",
                    got=str(error).splitlines()[0],
                    expected="any size",
                    do="remove what fixes it in forward",
                ) from error
    return max(_of_output(name, [(s, e[name], g[name]) for s, e, g in runs], quantized) for name in task.OUTPUTS)


def _parts(task: Workload, samples: Arrays) -> Iterator[tuple[str, Arrays]]:
    """Inputs to compare on, and their size in words."""
    for batch in PROOF_BATCHES:
        part = {name: np.resize(samples[name], (batch, *samples[name].shape[1:])) for name in task.INPUTS}
        yield f"a batch of {batch}", part
        used = protocol.lengths(task, part)
        if used is not None:
            for length in dict.fromkeys((int(used.max()), max(1, int(used.max()) // 2))):
                cut = {k: np.ascontiguousarray(v) for k, v in protocol.cut(task, part, length).items()}
                yield f"a batch of {batch} at length {length}", cut


def _of_output(name: str, runs: list[tuple[str, np.ndarray, np.ndarray]], quantized: bool) -> float:
    """An output's largest difference over runs of (size, expected, got); Fault if it is too large."""
    tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCE
    whole = rms(np.concatenate([expected.ravel() for _, expected, _ in runs])) or 1.0
    worst = 0.0
    for size, expected, got in runs:
        difference = (
            rms(got - expected) / whole if quantized else _largest(got - expected) / (_largest(expected) or 1.0)
        )
        if not difference <= tolerance:
            raise Fault(
                f"output {name} differs from PyTorch at {size}",
                got=f"{difference:.2e} of its {'root mean square' if quantized else 'largest magnitude'}",
                expected=f"at most {tolerance:.0e}",
                do="try another opset, or report the operator",
            )
        worst = max(worst, difference)
    return worst


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())

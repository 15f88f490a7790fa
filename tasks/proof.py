"""Proof that an engine computes what its PyTorch parent does: the parent's own outputs travel with the model.

Export writes a few validation samples and PyTorch's outputs for them beside the model; quantize hands the
file on; build runs the engine on them, at every batch size that it must bear, and at half the length of a
dynamic axis. No PyTorch is needed for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks import layout
from tasks.data import read, write
from tasks.engines.protocol import Session
from tasks.errors import Fault
from tasks.workloads.protocol import Arrays, Workload, axes, cut

if TYPE_CHECKING:
    from torch import nn

FILE = layout.PROOF
SAMPLES = 8
BATCHES = (1, 3, 7)
WHOLE, HALF = "", "half."
# The root of the mean square of the difference, by that of the output, that a format may leave.
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2, "int8": 0.5, "fp8": 0.5, "int4": 0.5}


@dataclass(frozen=True)
class Parity:
    """Of one output: the largest root mean square of a sample's difference from PyTorch, by that of the output.

    `worst_sample` is the sample of the validation split that differs most, `worst_batch` the batch size that it was
    run in; `halved` says whether a dynamic axis was cut to half.
    """

    output: str
    difference: float
    tolerance: float
    worst_sample: int
    worst_batch: int
    halved: bool


def save(folder: Path, inputs: Arrays, outputs: Arrays, half: tuple[Arrays, Arrays] | None = None) -> None:
    """Write `folder/proof.npz`: inputs and PyTorch's outputs [n, …] by name, n at most 8; `half` the same, cut."""
    parts = {WHOLE: (inputs, outputs)} | ({HALF: half} if half else {})
    arrays: Arrays = {}
    for part, (given, wanted) in parts.items():
        arrays |= {f"{part}in.{k}": v for k, v in given.items()} | {f"{part}out.{k}": v for k, v in wanted.items()}
    write(folder / FILE, arrays)


def of_model(model: nn.Module, task: Workload, samples: Arrays, folder: Path) -> None:
    """Write the proof of a PyTorch model, in floating point on the CPU, from the first samples of a split."""
    import torch

    from tasks.fit import eval_mode, forward, tensors

    def outputs(inputs: Arrays) -> Arrays:
        return {name: value.numpy() for name, value in forward(model, task, tensors(inputs)).items()}

    whole = {name: samples[name][:SAMPLES] for name in task.INPUTS}
    half = None
    with eval_mode(model), torch.inference_mode():
        for size in axes(task).values():
            short = {k: np.ascontiguousarray(v) for k, v in cut(task, whole, max(1, size // 2)).items()}
            half = short, outputs(short)
        save(folder, whole, outputs(whole), half)


def load(folder: Path, part: str = WHOLE) -> tuple[Arrays, Arrays]:
    """Inputs and outputs by name, of the whole samples or of the halved ones (HALF): none without a dynamic axis.

    Raises Fault if the file is missing.
    """
    if not (folder / FILE).is_file():
        raise Fault(
            f"no proof beside the model in {folder}",
            got=f"no {folder / FILE}",
            expected="the file that export writes",
            do="run `dvc repro` to export again",
        )
    arrays = read(folder / FILE)

    def named(start: str) -> Arrays:
        return {key[len(start) :]: value for key, value in arrays.items() if key.startswith(start)}

    return named(f"{part}in."), named(f"{part}out.")


def check(session: Session, folder: Path, precision: str, max_batch: int) -> list[Parity]:
    """Run a session on the proof, at batches of 1, 3, 7 and the largest; Fault if an output differs too much.

    Samples repeat where a batch holds more than the proof does.
    """
    worst: dict[str, Parity] = {}
    tolerance = TOLERANCE.get(precision, TOLERANCE["fp32"])
    for part in (WHOLE, HALF):
        inputs, expected = load(folder, part)
        scales = {name: rms(value) or 1.0 for name, value in expected.items()}
        for batch, rows in _batches(len(next(iter(inputs.values()), ())), max_batch):
            got = session.run({name: np.ascontiguousarray(value[rows]) for name, value in inputs.items()})
            for name, value in expected.items():
                differences = _differences(_output(got, name, value[rows].shape), value[rows]) / scales[name]
                at = int(np.argmax(differences))
                if name not in worst or not differences[at] <= worst[name].difference:
                    worst[name] = Parity(name, float(differences[at]), tolerance, int(rows[at]), batch, part == HALF)
    for parity in worst.values():
        if not parity.difference <= tolerance:
            raise Fault(
                f"output {parity.output} differs from PyTorch",
                got=f"{parity.difference:.2e} of its root mean square, at validation sample {parity.worst_sample} in a "
                f"batch of {parity.worst_batch}{' at half length' if parity.halved else ''}",
                expected=f"at most {tolerance:.0e} for {precision}",
                do="try another precision, opset or backend; docs/proof.md lists the tolerances",
            )
    return list(worst.values())


def _differences(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Root mean square of each sample's difference [n]; what isn't finite differs by infinity."""
    n = len(expected)
    a, b = (v.astype(np.float64).reshape(n, -1) for v in (got, expected))
    found = np.sqrt(np.mean((a - b) ** 2, axis=1))
    return np.where(np.isfinite(found), found, np.inf)


def rms(values: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


def _output(got: Arrays, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in got or got[name].shape != shape:
        raise Fault(
            f"output {name} isn't what PyTorch gives",
            got=f"shape {got[name].shape}" if name in got else f"only {', '.join(got) or 'nothing'}",
            expected=f"{name} of shape {shape}",
            do="look at the model's outputs, or report the backend",
        )
    return got[name]


def _batches(n: int, max_batch: int) -> Iterator[tuple[int, np.ndarray]]:
    """Batch sizes, and the rows of a proof of n samples that make up each batch."""
    if not n:
        return
    for batch in dict.fromkeys((*(b for b in BATCHES if b <= max_batch), max_batch)):
        for start in range(0, n if batch < n else 1, batch):
            yield batch, np.arange(start, start + batch) % n

"""What a workload is: one Python file that defines the names of `Workload` below."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from tasks.errors import Fault

if TYPE_CHECKING:
    import torch

Arrays = dict[str, np.ndarray]
Shape = tuple[int | str, ...]
REQUIRED = ("NAME", "PREPROCESSING", "INPUTS", "OUTPUTS", "METRICS", "samples", "model", "loss")
DO = "name one from the working directory, such as tasks/workloads/digits.py"


class Workload(Protocol):
    """A model, its data and its metric.

    NAME names the registered model. PREPROCESSING names how inputs are made from raw data;
    change it whenever that changes. INPUTS maps each model input to (dtype, shape of one
    sample), in the order of the model's arguments; OUTPUTS names the outputs. METRICS maps
    a metric's name to `f(outputs, labels) -> score of each sample, in 0 … 1`; a variant's
    accuracy is their mean.

    A size that differs from sample to sample is a name in the shapes, such as "tokens". Such a
    workload also defines AXES, which maps that one name to its largest size, to which `samples` pads, and
    `lengths(inputs)`, how much of it each sample uses; batches are cut to their longest sample.
    """

    NAME: str
    PREPROCESSING: str
    INPUTS: Mapping[str, tuple[str, Shape]]
    OUTPUTS: tuple[str, ...]
    METRICS: Mapping[str, Callable[[Arrays, np.ndarray], np.ndarray]]

    def samples(self, seed: int) -> tuple[Arrays, list[str]]:
        """All samples: the inputs and "label", each [n, …], and a content key per sample.

        Two samples with the same key are the same raw datum and never land in two splits.
        """
        ...

    def model(self, **architecture: Any) -> torch.nn.Module:
        """A freshly initialised model; keywords come from `model:` or `student:` in params."""
        ...

    def loss(self, outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """The training loss, a scalar, of a batch's outputs against its labels."""
        ...


def axes(task: Workload) -> dict[str, int]:
    """The workload's dynamic axis, if it has one, and its largest size."""
    return dict(getattr(task, "AXES", {}))


def largest(task: Workload) -> dict[str, tuple[str, tuple[int, ...]]]:
    """INPUTS with every dynamic axis at its largest size."""
    sizes = axes(task)
    return {
        n: (d, tuple(sizes[e] if isinstance(e, str) else e for e in shape)) for n, (d, shape) in task.INPUTS.items()
    }


def example(task: Workload, batch: int) -> Arrays:
    """Inputs [batch, …] of the right types and largest shapes: ones, since a mask of zeros masks all."""
    return {name: np.ones((batch, *shape), dtype=dtype) for name, (dtype, shape) in largest(task).items()}


def lengths(task: Workload, inputs: Arrays) -> np.ndarray | None:
    """How much of the dynamic axis each sample uses, [n]; None if the workload has no such axis."""
    if not axes(task):
        return None
    return task.lengths({name: inputs[name] for name in task.INPUTS})  # type: ignore[attr-defined]


def cut(task: Workload, arrays: Arrays, length: int) -> Arrays:
    """The arrays with the dynamic axis cut to `length`; what isn't an input stays as it is."""
    return {name: value[_slices(task, name, length)] for name, value in arrays.items()}


def _slices(task: Workload, name: str, length: int) -> tuple[slice, ...]:
    shape: Shape = task.INPUTS[name][1] if name in task.INPUTS else ()
    return (slice(None), *(slice(length) if isinstance(e, str) else slice(None) for e in shape))


def load_workload(path: Path) -> Workload:
    """Import a workload file.

    Raises Fault if the file isn't there, is no Python file, fails to import, or lacks a name of the protocol.
    """
    if not path.is_file():
        raise Fault("no workload", got=path, expected="a Python file", do=DO)
    name = f"_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Fault("workload is no Python file", got=path, expected="a name that ends in .py", do=DO)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Fault(
            f"workload {path} fails to import",
            got=f"{type(error).__name__}: {error}",
            expected="a module",
            do="mend the file",
        ) from error
    missing = [n for n in REQUIRED if not hasattr(module, n)]
    if missing:
        raise Fault(
            f"workload {path} is incomplete",
            got=f"no {', '.join(missing)}",
            expected=", ".join(REQUIRED),
            do="see tasks/workloads/protocol.py",
        )
    _check_axes(cast(Workload, module), path)
    return cast(Workload, module)


def _check_axes(task: Workload, path: Path) -> None:
    named = {e for _, shape in task.INPUTS.values() for e in shape if isinstance(e, str)}
    known = getattr(task, "AXES", {})
    if named != set(known) or len(named) > 1 or (named and not callable(getattr(task, "lengths", None))):
        raise Fault(
            f"workload {path} has a dynamic axis that it doesn't describe",
            got=f"INPUTS name {sorted(named)}, AXES names {sorted(known)}",
            expected="at most one name, in both, with a function lengths(inputs)",
            do="see tasks/workloads/protocol.py",
        )

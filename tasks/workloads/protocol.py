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
REQUIRED = ("NAME", "PREPROCESSING", "INPUTS", "OUTPUTS", "METRICS", "samples", "model", "loss")
DO = "name one from the working directory, such as tasks/workloads/digits.py"


class Workload(Protocol):
    """A model, its data and its metric.

    NAME names the registered model. PREPROCESSING names how inputs are made from raw data;
    change it whenever that changes. INPUTS maps each model input to (dtype, shape of one
    sample), in the order of the model's arguments; OUTPUTS names the outputs. METRICS maps
    a metric's name to `f(outputs, labels) -> score of each sample, in 0 … 1`; a variant's
    accuracy is their mean.
    """

    NAME: str
    PREPROCESSING: str
    INPUTS: Mapping[str, tuple[str, tuple[int, ...]]]
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
    return cast(Workload, module)

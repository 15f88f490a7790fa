"""What a TensorRT engine is tuned for, of all that it takes: the same by its Python modules and by trtexec."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.errors import Fault
from tasks.settings import BuildParams

OPT_BATCH = 8


def optimum(spec: BuildParams, axes: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """The batch and, by name, the size of every dynamic axis that kernels are chosen for.

    `axes` are the largest sizes, which are meant where `opt_length` isn't given. Raises Fault for an `opt_length` that
    no dynamic axis has.
    """
    batch = spec.opt_batch or min(OPT_BATCH, spec.max_batch)
    if spec.opt_length is None:
        return batch, dict(axes)
    if not axes or spec.opt_length > max(axes.values()):
        raise Fault(
            "opt_length doesn't fit the model",
            got=f"opt_length {spec.opt_length}",
            expected=f"at most {max(axes.values())}" if axes else "none: every axis but the batch is fixed",
            do="lower build.*.opt_length" if axes else "leave build.*.opt_length out",
        )
    return batch, {name: min(spec.opt_length, size) for name, size in axes.items()}

"""Exported programs of torch.export in artifact folders: what Inductor compiles.

A program holds the model's graph in ATen operators and its weights, and needs none of the model's code.
Manual: https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks import recurrent_op
from tasks.errors import Fault
from tasks.files import read_json, write_json
from tasks.fit import eval_mode, tensors
from tasks.manifest import TensorSpec
from tasks.quiet import quiet
from tasks.workloads.protocol import Workload, axes, example

FILE, NOTES = "program.pt2", "notes.json"
MOST = 65536
# What the exporter notes of its own code: paths of this machine among it.
OF_THE_MACHINE = ("stack_trace", "source_fn_stack", "torch_fn", "from_node")


@dataclass(frozen=True)
class Notes:
    """What a program can't say of itself: where it comes from, and the names of its inputs and outputs.

    `axes` maps the workload's dynamic axis to its largest size. `sparsity` is "2:4" if layers were made so.
    """

    precision: str
    preprocessing: str
    model_sha256: str
    axes: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sparsity: str | None = None
    sparse_layers: tuple[str, ...] = ()


def dims(free: Mapping[str, int]) -> dict[str | None, Any]:
    """The free sizes that a program may have: the batch, under None, and the dynamic axes by name."""
    return {
        None: torch.export.Dim("batch", min=1, max=MOST),
        **{name: torch.export.Dim(name, min=1, max=size) for name, size in free.items()},
    }


def dynamic_shapes(inputs: Sequence[TensorSpec], free: Mapping[str, int]) -> tuple[dict[int, Any], ...]:
    """Which sizes of each input are free, in the form that torch.export takes."""
    known = dims(free)
    return tuple({i: known[d] for i, d in enumerate(spec.shape) if not isinstance(d, int)} for spec in inputs)


def inputs_of(task: Workload) -> tuple[TensorSpec, ...]:
    """The workload's inputs, with the batch in front."""
    return tuple(TensorSpec(n, d, (None, *shape)) for n, (d, shape) in task.INPUTS.items())


def trace(model: nn.Module, task: Workload) -> torch.export.ExportedProgram:
    """A model's graph with a free batch and dynamic axis, in eval mode whatever the mode was.

    Raises Fault if the model fixes its batch, or does what torch.export can't follow.
    """
    free = axes(task)
    inputs = tensors(example(task, 2))
    with eval_mode(model):
        try:
            return torch.export.export(
                model, tuple(inputs.values()), dynamic_shapes=dynamic_shapes(inputs_of(task), free)
            )
        except torch._dynamo.exc.UserError as error:
            raise Fault(
                "the batch is not dynamic",
                got=_first_line(error),
                expected=f"a free axis 0 of {', '.join(inputs)}"
                + "".join(f", and any {name} up to {size}" for name, size in free.items()),
                do="let the model's forward take any batch size",
            ) from error
        except (ValueError, RuntimeError) as error:
            raise Fault(
                "the model can't be exported",
                got=_first_line(error),
                expected="a forward that torch.export can trace",
                do="replace the operation that it names",
            ) from error


def to_program(model: nn.Module, task: Workload, folder: Path, notes: Mapping[str, Any]) -> int:
    """Write `folder/program.pt2` and `notes.json`; the number of its operations.

    Equal models give equal bytes: what the exporter notes of its own code is left out. `notes` are `precision`,
    `preprocessing`, `model_sha256`, and those of sparsity. Raises Fault as `trace` does.
    """
    with quiet(), torch.no_grad(), _plain_attention(), recurrent_op.exportable(model):
        program = trace(model, task)
    for node in program.graph.nodes:
        for key in OF_THE_MACHINE:
            node.meta.pop(key, None)
    save(program, folder / FILE)
    with eval_mode(model), torch.inference_mode():
        results = by_name(program.module()(*tensors(example(task, 1)).values()), task.OUTPUTS)
    outputs = tuple(
        TensorSpec(name, str(value.dtype).removeprefix("torch."), (None, *value.shape[1:]))
        for name, value in results.items()
    )
    write_json(folder / NOTES, Notes(**notes, axes=axes(task), inputs=inputs_of(task), outputs=outputs))
    return sum(node.op == "call_function" for node in program.graph.nodes)


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """PyTorch's attention modules in operations that a compiler can fuse, not in one of their own for eager mode."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program; its bytes don't depend on the path."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getvalue())


def load(folder: Path) -> tuple[torch.export.ExportedProgram, Notes]:
    """Read `folder/program.pt2` and its notes; Fault if one is missing or is nothing of that kind."""
    return program(folder / FILE), notes(folder)


def program(path: Path) -> torch.export.ExportedProgram:
    """Read an exported program; Fault if it is missing or no such file."""
    expected = "a program made by export with format: program"
    if not path.is_file():
        raise Fault(f"no program {path}", got="nothing there", expected=expected, do="run `dvc repro` or `dvc pull`")
    try:
        return torch.export.load(io.BytesIO(path.read_bytes()))
    except Exception as error:
        raise Fault(
            f"{path} is not an exported program that PyTorch {torch.__version__} reads",
            got=f"{path.stat().st_size} bytes; {_first_line(error)}",
            expected=expected,
            do="export it again with `dvc repro`",
        ) from None


def notes(folder: Path) -> Notes:
    """Read `folder/notes.json`; Fault if it isn't what export wrote."""
    try:
        raw = read_json(folder / NOTES)
        specs = {
            key: tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in raw[key])
            for key in ("inputs", "outputs")
        }
        return Notes(**{**raw, **specs, "sparse_layers": tuple(raw["sparse_layers"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Fault(
            f"{folder / NOTES} is not the notes of a program",
            got=f"{type(error).__name__}: {error}",
            expected="the JSON that export wrote",
            do="export it again with `dvc repro`",
        ) from None


def by_name(result: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """A model's result (a tensor, several, or a dictionary) as outputs by name."""
    if isinstance(result, dict):
        return {name: result[name] for name in names}
    results = result if isinstance(result, tuple | list) else (result,)
    return dict(zip(names, results, strict=True))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

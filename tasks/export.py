"""Export a model to ONNX with a dynamic batch axis, and prove it equal to its parent."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass
from torch import nn

from tasks import checkpoint, onnx_file, recurrent, two_of_four
from tasks.data import read
from tasks.errors import Fault
from tasks.files import atomic_folder, sha256, size_bytes
from tasks.fit import eval_mode, tensors
from tasks.parity import PROOF_BATCHES, parity
from tasks.quiet import quiet
from tasks.settings import ExportParams
from tasks.structure import FakeQuantized
from tasks.workloads.protocol import Workload, axes, example


@dataclass(frozen=True)
class ExportReport:
    """Opset found in the file, its bytes with sidecars, and the largest error, by the output's largest magnitude.

    `sparse_layers` says of each matrix product whether it is 2:4 sparse; none if the model wasn't made so.
    """

    opset: int
    size_bytes: int
    sha256: str
    nodes: int
    largest_error: float
    proof_batches: tuple[int, ...]
    sparse_layers: list[two_of_four.SparseLayer]


def export(source: Path, data: Path, target: Path, params: ExportParams) -> ExportReport:
    """Write `target/model.onnx`.

    Raises Fault if the opset in the file isn't the one asked for, an axis of the batch is
    fixed, batches of 1, 3 and 7 differ from PyTorch by more than 1e-3 of the output's largest magnitude
    (3e-2 of its root mean square after qat), or a layer that was made 2:4 sparse isn't in the file.
    """
    parent = checkpoint.load(source)
    made = two_of_four.made(parent.model, parent.masks)
    with atomic_folder(target) as folder:
        notes = {
            "precision": "fp32",
            "preprocessing": parent.workload.PREPROCESSING,
            "model_sha256": sha256(source / checkpoint.FILE),
            **({"axes": json.dumps(free)} if (free := axes(parent.workload)) else {}),
            **two_of_four.notes(made),
        }
        quantized = _write(parent, folder / onnx_file.FILE, params, notes)
        model = onnx_file.load(folder)
        check_file(model, params.opset)
        error = parity(parent.model, parent.workload, folder, read(data / "validation.npz"), quantized)
        report = ExportReport(
            onnx_file.opset(model),
            size_bytes(folder),
            sha256(folder),
            len(model.graph.node),
            error,
            PROOF_BATCHES,
            two_of_four.check(model, made) if made else [],
        )
    return report


def _write(parent: checkpoint.Checkpoint, path: Path, params: ExportParams, notes: dict[str, str]) -> bool:
    """Write the file; whether it is one with Q/DQ nodes, of a model of qat."""
    plan = next((change.settings for change in parent.structure if isinstance(change, FakeQuantized)), None)
    if plan is None:
        to_onnx(parent.model, parent.workload, path, params.opset, params.external_data, notes)
        return False
    from tasks.export_qdq import to_qdq

    notes = {**notes, "precision": "int8", "calibration_sha256": plan["calibration_sha256"]}
    to_qdq(parent.model, parent.workload, path, params, plan["style"], notes)
    return True


def to_onnx(
    model: nn.Module,
    task: Workload,
    path: Path,
    opset: int,
    external_data: bool = False,
    notes: dict[str, str] | None = None,
) -> None:
    """Export in eval mode whatever the mode was, and restore each module's mode after.

    What the exporter notes of its own machine is left out, so that equal models give equal
    bytes; `notes` go into the file's metadata. Raises Fault if the model fixes its batch.
    """
    batch = torch.export.Dim("batch", min=1, max=65536)
    free = {name: torch.export.Dim(name, min=1, max=size) for name, size in axes(task).items()}
    shapes = tuple(
        {0: batch, **{i: free[e] for i, e in enumerate(shape, 1) if isinstance(e, str)}}
        for _, shape in task.INPUTS.values()
    )
    inputs = tensors(example(task, 2))
    with eval_mode(model), recurrent.exportable(model), quiet():
        try:
            exported = torch.export.export(model, tuple(inputs.values()), dynamic_shapes=shapes)
        except torch._dynamo.exc.UserError as error:
            raise Fault(
                "the batch is not dynamic",
                got=_first_line(error),
                expected=f"a free axis 0 of {', '.join(inputs)}"
                + "".join(f", and any {name} up to {size}" for name, size in axes(task).items()),
                do="let the model's forward take any batch size",
            ) from error
        except (ValueError, RuntimeError) as error:
            raise Fault(
                "the model can't be exported",
                got=_first_line(error),
                expected="a forward that torch.export can trace",
                do="replace the operation that it names",
            ) from error
        program = torch.onnx.export(
            exported,
            input_names=list(inputs),
            output_names=list(task.OUTPUTS),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    # The exporter folds a shared weight's transpose once a use.
    DeduplicateInitializersPass(size_limit=sys.maxsize)(program.model)
    proto = program.model_proto
    for graph in (*onnx_file.graphs(proto.graph), *proto.functions):
        _anonymise(graph)
    onnx_file.annotate(proto, notes or {})
    onnx_file.save(proto, path, external_data)


def _anonymise(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Remove what the exporter notes of its own code and machine."""
    values = [*graph.value_info]
    if isinstance(graph, onnx.GraphProto):
        values += [*graph.input, *graph.output, *graph.initializer]
    for node in graph.node:
        node.doc_string = ""
    for part in (graph, *graph.node, *values):
        del part.metadata_props[:]


def check_file(model: onnx.ModelProto, opset: int) -> None:
    """Raise Fault if the opset isn't `opset` or a batch axis is fixed."""
    if onnx_file.opset(model) != opset:
        raise Fault(
            "export gave another opset",
            got=onnx_file.opset(model),
            expected=opset,
            do="ask for an opset from 18 to 21 in export.*.opset",
        )
    fixed = onnx_file.fixed_axes(model)
    if fixed:
        raise Fault(
            "the batch is not dynamic",
            got="; ".join(fixed),
            expected="a free first axis on every input and output",
            do="let the model's forward take any batch size",
        )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

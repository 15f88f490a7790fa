"""Export a model with a dynamic batch axis, to ONNX or as a program, and prove it equal to its parent."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass
from torch import nn

from tasks import checkpoint, exported, onnx_file, proof, recurrent, two_of_four
from tasks.data import read
from tasks.errors import Fault
from tasks.files import atomic_folder, sha256, size_bytes
from tasks.fit import eval_mode
from tasks.parity import PROOF_BATCHES, compare, parity
from tasks.quiet import quiet
from tasks.settings import ExportParams
from tasks.structure import FakeQuantized
from tasks.workloads.protocol import Arrays, Workload, axes


@dataclass(frozen=True)
class ExportReport:
    """Opset found in the file, its bytes with sidecars, and the largest error, by the output's largest magnitude.

    `sparse_layers` says of each matrix product whether it is 2:4 sparse; none if the model wasn't made so.
    A program has no opset.
    """

    opset: int | None
    size_bytes: int
    sha256: str
    nodes: int
    largest_error: float
    proof_batches: tuple[int, ...]
    sparse_layers: list[two_of_four.SparseLayer]


def export(source: Path, data: Path, target: Path, params: ExportParams) -> ExportReport:
    """Write `target/model.onnx`, or `program.pt2` if `params.format` says so, and the proof of the model.

    Raises Fault if the opset in the file isn't the one asked for, an axis of the batch is
    fixed, batches of 1, 3 and 7 differ from PyTorch by more than 1e-3 of the output's largest magnitude
    (3e-2 of its root mean square after qat), or a layer that was made 2:4 sparse isn't in the file.
    """
    parent = checkpoint.load(source)
    if params.format == "program":
        return _program(parent, source, read(data / "validation.npz"), target)
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
        samples = read(data / "validation.npz")
        error = parity(parent.model, parent.workload, folder, samples, quantized)
        proof.of_model(parent.model, parent.workload, samples, folder)
        report = ExportReport(
            onnx_file.opset(model),
            size_bytes(folder) - size_bytes(folder / proof.FILE),
            sha256(folder),
            len(model.graph.node),
            error,
            PROOF_BATCHES,
            two_of_four.check(model, made) if made else [],
        )
    return report


def _program(parent: checkpoint.Checkpoint, source: Path, samples: Arrays, target: Path) -> ExportReport:
    """Write `target/program.pt2`; Fault for a model of qat, and as `export` does."""
    if any(isinstance(change, FakeQuantized) for change in parent.structure):
        raise Fault(
            "a model of qat can't be an exported program",
            got="fake quantisers, which Inductor would run in floating point",
            expected="a model without them",
            do="export it with format: onnx, or export the model from before qat",
        )
    made = two_of_four.made(parent.model, parent.masks)
    with atomic_folder(target) as folder:
        notes: dict[str, Any] = {
            "precision": "fp32",
            "preprocessing": parent.workload.PREPROCESSING,
            "model_sha256": sha256(source / checkpoint.FILE),
            **({"sparsity": two_of_four.PATTERN, "sparse_layers": tuple(made)} if made else {}),
        }
        operations = exported.to_program(parent.model, parent.workload, folder, notes)
        program = exported.program(folder / exported.FILE)
        module = program.module()

        def run(part: Arrays) -> Arrays:
            results = exported.by_name(module(*map(torch.from_numpy, part.values())), parent.workload.OUTPUTS)
            return {name: value.numpy() for name, value in results.items()}

        error = compare(parent.model, parent.workload, run, samples)
        proof.of_model(parent.model, parent.workload, samples, folder)
        return ExportReport(
            None,
            size_bytes(folder) - size_bytes(folder / proof.FILE),
            sha256(folder),
            operations,
            error,
            PROOF_BATCHES,
            _sparse_in(program, made),
        )


def _sparse_in(program: torch.export.ExportedProgram, made: Mapping[str, np.ndarray]) -> list[two_of_four.SparseLayer]:
    """The layers of `made` (a weight's name → where it may be non-zero); Fault if one isn't so in the program."""
    found = []
    for name, allowed in made.items():
        weight = program.state_dict.get(name)
        used: np.ndarray = np.ones(0, bool) if weight is None else (weight != 0).numpy()
        if used.shape != allowed.shape or (used & ~allowed).any():
            raise Fault(
                f"{name} was made 2:4 sparse, and isn't in the program",
                got=f"{'no such weight' if weight is None else 'other values'} of shape {list(used.shape)}",
                expected="the zeros that training kept",
                do="report it: torch.export keeps weights as they are",
            )
        found.append(two_of_four.SparseLayer(name, used.shape[0], used.shape[1], True, None, layer=name))
    return found


def _write(parent: checkpoint.Checkpoint, path: Path, params: ExportParams, notes: dict[str, str]) -> bool:
    """Write the file; whether it is one with Q/DQ nodes, of a model of qat."""
    plan = next((change.settings for change in parent.structure if isinstance(change, FakeQuantized)), None)
    if plan is None:
        to_onnx(parent.model, parent.workload, path, params.opset, params.external_data, notes)
        return False
    from tasks.export_qdq import to_qdq

    notes |= {"precision": "int8", "style": plan["style"], "activations": "static"}
    notes |= {"calibration_sha256": plan["calibration_sha256"]}
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
    with eval_mode(model), recurrent.exportable(model), quiet():
        traced = exported.trace(model, task)
        program = torch.onnx.export(
            traced,
            input_names=list(task.INPUTS),
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

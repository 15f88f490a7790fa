"""ONNX files in artifact folders: loading, sidecars, shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tasks.errors import Fault

FILE = "model.onnx"
MAX_BYTES = onnx.checker.MAXIMUM_PROTOBUF


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and those inside its nodes (branches and loop bodies), at any depth."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs(inner)


def constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The tensors of a graph's initializers and Constant nodes, by name; not those of graphs inside it."""
    found = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            value = onnx.helper.get_attribute_value(node.attribute[0])
            array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
            found[node.output[0]] = array
    return found


def fold_transposes(graph: onnx.GraphProto) -> None:
    """Put transposed initializers in the place of Transpose nodes that read one, in place; one for all its readers.

    A quantiser sees a weight only where a product reads it directly; that of layers that share one is transposed
    by a node.
    """
    weights = {i.name: i for i in graph.initializer}
    renamed: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    transposes = [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in weights]
    for node in [n for n in transposes if n.output[0] not in outputs]:
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
        name = f"{node.input[0]}.transposed{'' if order is None else ''.join(map(str, order))}"
        if name not in weights:
            value = np.ascontiguousarray(np.transpose(numpy_helper.to_array(weights[node.input[0]]), order))
            weights[name] = numpy_helper.from_array(value, name)
            graph.initializer.append(weights[name])
        renamed[node.output[0]] = name
        graph.node.remove(node)
    used = set(outputs)
    for part in graphs(graph):
        used |= {value.name for value in part.output}
        for node in part.node:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)
            used |= set(node.input)
    for initializer in [i for i in graph.initializer if i.name not in used]:
        graph.initializer.remove(initializer)


def sidecars(model: onnx.ModelProto) -> list[str]:
    """Names of the external-data files that a model's initializers refer to."""
    names = {
        entry.value
        for graph in graphs(model.graph)
        for tensor in graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return sorted(names)


def load(folder: Path) -> onnx.ModelProto:
    """Load `folder/model.onnx` with its external data.

    Raises Fault if the file is missing or no ONNX file, or a sidecar is missing (named).
    """
    path = folder / FILE
    expected = "an ONNX model made by export or quantize"
    if not path.is_file():
        raise Fault(f"no model {path}", got="nothing there", expected=expected, do="run `dvc repro` or `dvc pull`")
    try:
        model = onnx.load(path, load_external_data=False)
        if not model.graph.output:
            raise ValueError("no graph")
    except Exception as error:
        raise Fault(
            f"{path} is not an ONNX file",
            got=f"{path.stat().st_size} bytes, {type(error).__name__}",
            expected=expected,
            do="delete it and run `dvc repro`",
        ) from None
    for name in sidecars(model):
        if not (folder / name).is_file():
            raise Fault(
                f"{path} has lost its external data",
                got=f"no file {folder / name}",
                expected="the weights beside the model",
                do="copy the whole folder, or run `dvc pull`",
            )
    try:
        onnx.load_external_data_for_model(model, str(folder))
    except Exception as error:
        raise Fault(
            f"{path} doesn't fit its external data",
            got=" ".join(str(error).split())[:300],
            expected=f"{', '.join(sidecars(model))} as written with the model",
            do="copy the whole folder, or run `dvc pull`",
        ) from None
    return model


def save(model: onnx.ModelProto, path: Path, external_data: bool) -> None:
    """Write a model, with its weights in a file beside it if `external_data`."""
    if external_data:
        # Small tensors stay inside: ONNX Runtime reads no shapes from a sidecar.
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)
    else:
        onnx.save(model, path)


def serialized(model: onnx.ModelProto, name: str) -> bytes:
    """A model with its weights as one file's bytes; Fault if it is larger than such a file can be."""
    size = sum(len(tensor.raw_data) for graph in graphs(model.graph) for tensor in graph.initializer)
    try:
        data = model.SerializeToString() if size <= MAX_BYTES else b""
    except Exception:  # What protobuf raises differs by its implementation.
        data = b""
    if not 0 < len(data) <= MAX_BYTES:
        raise Fault(
            f"{name} is too large for one ONNX file",
            got=f"{size} bytes of weights",
            expected=f"at most {MAX_BYTES} bytes in all",
            do="use a smaller model, or a backend that reads external data",
        )
    return data


def fixed_axes(model: onnx.ModelProto) -> list[str]:
    """Inputs and outputs whose first axis is a number, as "name axis 0 is 8"."""
    faults = []
    for value in (*model.graph.input, *model.graph.output):
        shape = value.type.tensor_type.shape.dim
        if not shape:
            faults.append(f"{value.name} has no batch axis")
        elif not shape[0].dim_param:
            faults.append(f"{value.name} axis 0 is {shape[0].dim_value}")
    return faults


def opset(model: onnx.ModelProto) -> int:
    """The version of the default operator set."""
    return next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))


def annotate(model: onnx.ModelProto, notes: dict[str, str]) -> None:
    """Replace a model's metadata, in sorted order."""
    del model.metadata_props[:]
    for key in sorted(notes):
        model.metadata_props.add(key=key, value=notes[key])


def notes(model: onnx.ModelProto) -> dict[str, str]:
    """A model's metadata: precision, preprocessing, and digests of what it was made from."""
    return {p.key: p.value for p in model.metadata_props}


def axes(model: onnx.ModelProto) -> dict[str, int]:
    """The dynamic axis that export noted, if there is one, and its largest size."""
    return {str(name): int(size) for name, size in json.loads(notes(model).get("axes", "{}")).items()}

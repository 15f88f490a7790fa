"""ONNX Runtime on the CPU. The engine is the graph after its optimiser, saved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import onnx
import onnxruntime as ort

from tasks import onnx_file, target
from tasks.engines.protocol import check_batch
from tasks.errors import Fault, Unavailable
from tasks.files import sha256
from tasks.manifest import Manifest, TensorSpec, dynamic, require
from tasks.settings import BuildParams
from tasks.workloads.protocol import Arrays

PROVIDER = "CPUExecutionProvider"
FILE = "engine.onnx"


def build(source: Path, folder: Path, spec: BuildParams) -> Manifest:
    """Optimise `source/model.onnx` at the highest level, for this CPU, and save the graph with its weights.

    Raises Fault for a model that is too large for one file, or that ONNX Runtime can't build.
    """
    model = onnx_file.load(source)
    whole = onnx_file.serialized(model, source.name)
    options = _options(spec.threads)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / FILE)
    try:
        session = ort.InferenceSession(whole, options, providers=[PROVIDER])
    except Exception as error:
        raise Fault(
            f"ONNX Runtime can't build {source.name}",
            got=" ".join(str(error).split())[:400],
            expected="operators and types that its CPU provider knows",
            do="another opset or format may do, or another backend for this variant",
        ) from None
    kinds = Counter(node.op_type for node in onnx.load(folder / FILE).graph.node)
    notes, axes = onnx_file.notes(model), onnx_file.axes(model)
    return Manifest(
        backend="onnxruntime",
        backend_version=ort.__version__,
        built_for={"device": "cpu", "cpu_flags": list(target.fingerprint().cpu_flags)},
        engine_file=FILE,
        inputs=tuple(_spec(i, axes) for i in session.get_inputs()),
        outputs=tuple(_spec(o, axes) for o in session.get_outputs()),
        max_batch=spec.max_batch,
        axes=axes,
        threads=spec.threads,
        preprocessing=notes.get("preprocessing"),
        precision_asked=notes.get("precision", "as the model"),
        operators=dict(sorted(kinds.items())),
        engine_sha256=sha256(folder / FILE),
        onnx_sha256=sha256(source),
        model_sha256=notes.get("model_sha256"),
        calibration_sha256=notes.get("calibration_sha256"),
        rebuild=f"dvc repro build@{folder.name}",
    )


class OnnxRuntimeSession:
    """A saved graph run by the CPU provider, which is read back and not assumed."""

    def __init__(self, folder: Path, described: Manifest) -> None:
        options = _options(described.threads)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(str(folder / described.engine_file), options, providers=[PROVIDER])
        ran = self._session.get_providers()
        if ran != [PROVIDER]:
            raise Unavailable(f"ONNX Runtime took {ran} where {PROVIDER} was asked for")
        self.device = "cpu"
        self.inputs, self.outputs = described.inputs, described.outputs
        self._max_batch, self._axes = described.max_batch, described.axes
        self._input_names, self._output_names = [i.name for i in self.inputs], [o.name for o in self.outputs]

    def run(self, batch: Arrays) -> Arrays:
        check_batch(batch, self.inputs, self._max_batch, self._axes)
        results = self._session.run(self._output_names, {name: batch[name] for name in self._input_names})
        return dict(zip(self._output_names, results, strict=True))

    def synchronize(self) -> None:
        """CPU calls return when they are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._session


def open(folder: Path, described: Manifest) -> OnnxRuntimeSession:
    """Open a saved graph; Fault if it was built by another version or for CPU features that are missing here."""
    here = set(target.fingerprint().cpu_flags)
    require(
        described,
        folder,
        version=ort.__version__,
        missing_flags=[f for f in described.built_for["cpu_flags"] if f not in here],
    )
    return OnnxRuntimeSession(folder, described)


def _options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads would slow whatever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _spec(value: ort.NodeArg, axes: dict[str, int]) -> TensorSpec:
    kinds = {
        "tensor(float)": "float32",
        "tensor(float16)": "float16",
        "tensor(int64)": "int64",
        "tensor(int32)": "int32",
        "tensor(bool)": "bool",
    }
    return TensorSpec(value.name, kinds[value.type], dynamic(value.shape, axes))

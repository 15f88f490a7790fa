"""ONNX Runtime on the CPU and on CUDA. The engine is the graph after its optimiser, saved.

On CUDA a graph of which a few nodes, of shapes say, have to run on the CPU isn't saved so, but as it came; it is
then optimised as it is opened, as is one that can't be read back.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import onnx
import onnxruntime as ort

from tasks import layers, onnx_file, proof, styles, target
from tasks.engines import ort_layers
from tasks.engines.ort_start import SPLIT, need_cuda, own, refused, start
from tasks.engines.protocol import Built, Session, check_batch, imported
from tasks.errors import Fault
from tasks.files import sha256
from tasks.manifest import Layer, Manifest, TensorSpec, dynamic, gpu_here, require, require_gpu
from tasks.settings import BuildParams
from tasks.workloads.protocol import Arrays

FILE = "engine.onnx"
# NumPy's names of the types that differ from ONNX Runtime's.
TYPES = {"float": "float32", "double": "float64", "string": "object"}


def build(source: Path, folder: Path, spec: BuildParams) -> Built:
    """Optimise `source/model.onnx` for this machine's CPU or GPU, and save the graph with its weights.

    Raises Fault for a model that is too large for one file, that ONNX Runtime can't build (naming node and operator),
    or of which CUDA can't run a product; Unavailable for CUDA without a GPU, or without its provider.
    """
    model = onnx_file.load(source)
    whole = onnx_file.serialized(model, source.name)
    notes, axes = onnx_file.notes(model), onnx_file.axes(model)
    asked = styles.asked(spec.precision, spec.where, notes, source.name)
    if spec.where == "cuda":
        built_for: dict[str, Any] = {"device": "cuda", **gpu_here()}
        need_cuda()
    else:
        built_for = {"device": "cpu", "cpu_flags": list(target.fingerprint().cpu_flags)}
    settings = _settings(spec)
    try:
        session = _save(whole, folder, spec, settings)
        ran = _profiled(source, model, folder, spec, settings)
    except Exception as error:
        if own(error):
            raise refused(error, model, source.name, spec.where) from None
        raise
    kinds = Counter(node.op_type for node in onnx.load(folder / FILE).graph.node)
    described = Manifest(
        backend="onnxruntime",
        backend_version=ort.__version__,
        device=spec.where,
        built_for=built_for,
        engine_file=FILE,
        inputs=tuple(_spec(i, axes) for i in session.get_inputs()),
        outputs=tuple(_spec(o, axes) for o in session.get_outputs()),
        max_batch=spec.max_batch,
        axes=axes,
        threads=spec.threads,
        settings=settings,
        preprocessing=notes.get("preprocessing"),
        precision_asked=asked,
        precision_found=layers.found(ran),
        operators=dict(sorted(kinds.items())),
        engine_sha256=sha256(folder / FILE),
        onnx_sha256=sha256(source),
        model_sha256=notes.get("model_sha256"),
        calibration_sha256=notes.get("calibration_sha256"),
        rebuild=f"dvc repro build@{folder.name}",
    )
    return Built(described, ran)


def _settings(spec: BuildParams) -> dict[str, Any]:
    settings: dict[str, Any] = {"optimization": spec.optimization, "optimize_on_open": False}
    if spec.where == "cuda":
        settings |= {"tf32": spec.precision == "tf32", "cuda_graph": spec.cuda_graph}
        settings |= {"channels_last": spec.channels_last, "cpu_nodes": 0}
    return settings


def _save(whole: bytes, folder: Path, spec: BuildParams, settings: dict[str, Any]) -> ort.InferenceSession:
    """Write the engine and return a session of the source; note in `settings` how it has to be opened."""
    file, threads = folder / FILE, spec.threads
    how = {**settings, "cuda_graph": False}
    try:
        session = start(whole, spec.where, threads, spec.optimization, settings=how, save=file)
        start(str(file), spec.where, threads, "disabled", settings=how)
    except Exception as error:
        if spec.where == "cpu" or not own(error):
            raise
        split = SPLIT in str(error)
        session = start(whole, spec.where, threads, spec.optimization, settings=how, strict=not split)
        file.write_bytes(whole)
        # How many, the profile tells.
        settings |= {"optimize_on_open": True, "cpu_nodes": int(split)}
    return session


def _profiled(
    source: Path, model: onnx.ModelProto, folder: Path, spec: BuildParams, settings: dict[str, Any]
) -> tuple[Layer, ...]:
    """Run the saved engine once, and return what ran; Fault if a product of an engine for CUDA ran on the CPU."""
    level = spec.optimization if settings["optimize_on_open"] else "disabled"
    with tempfile.TemporaryDirectory() as scratch:
        optimised = Path(scratch) / "optimised.onnx"
        session = start(
            str(folder / FILE),
            spec.where,
            spec.threads,
            level,
            settings={**settings, "cuda_graph": False},
            strict=not settings.get("cpu_nodes"),
            save=optimised,
            profile=Path(scratch) / "profile",
        )
        session.run(None, _example(source, session, onnx_file.axes(model)))
        profile = Path(session.end_profiling())
        ran = ort_layers.read(profile, onnx.load(optimised), model, bool(settings.get("tf32")))
    if spec.where == "cuda":
        strays = [layer for layer in ran if layer.device == "cpu"]
        settings["cpu_nodes"] = max(len(strays), settings["cpu_nodes"])
        products = [f"{layer.name} ({layer.kind})" for layer in strays if layer.product]
        if products:
            raise Fault(
                f"ONNX Runtime's CUDA provider can't run all of {source.name}",
                got=f"on the CPU: {', '.join(products[:5])}" + (" …" if len(products) > 5 else ""),
                expected="every product on the GPU",
                do="use a format that CUDA has kernels for, or device: cpu",
            )
    return ran


def _example(source: Path, session: ort.InferenceSession, axes: dict[str, int]) -> Arrays:
    """One sample: of the proof that came with the model, or zeros."""
    if (source / proof.FILE).is_file():
        return {name: value[:1] for name, value in proof.load(source)[0].items()}
    specs = [_spec(i, axes) for i in session.get_inputs()]
    shapes = {s.name: [1 if d is None else axes[d] if isinstance(d, str) else d for d in s.shape] for s in specs}
    return {s.name: np.zeros(shapes[s.name], s.dtype) for s in specs}


class OnnxRuntimeSession:
    """A saved graph run by the CPU provider, which is read back and not assumed."""

    device = "cpu"

    def __init__(self, folder: Path, described: Manifest) -> None:
        self._session = start(str(folder / described.engine_file), "cpu", described.threads, "disabled")
        self.inputs: Sequence[TensorSpec] = described.inputs
        self.outputs: Sequence[TensorSpec] = described.outputs
        self._max_batch, self._axes = described.max_batch, described.axes
        self._input_names, self._output_names = [i.name for i in self.inputs], [o.name for o in self.outputs]

    def run(self, batch: Arrays) -> Arrays:
        check_batch(batch, self.inputs, self._max_batch, self._axes)
        results = self._session.run(self._output_names, {name: batch[name] for name in self._input_names})
        return dict(zip(self._output_names, results, strict=True))

    @contextlib.contextmanager
    def bare(self, batch: Arrays) -> Iterator[Callable[[], list[np.ndarray]]]:
        """ONNX Runtime's call on a batch; see `BareSession`."""
        feed = {name: batch[name] for name in self._input_names}
        yield lambda: cast(list[np.ndarray], self._session.run(self._output_names, feed))

    def synchronize(self) -> None:
        """CPU calls return when they are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__dict__.pop("_session", None)


def open(folder: Path, described: Manifest) -> Session:
    """Open a saved graph on the device that it was built for, and on no other.

    Raises Fault if it was built by another version, for CPU features that are missing here, or for another GPU;
    Unavailable for CUDA without a GPU, without ONNX Runtime's provider, or without PyCUDA.
    """
    require(described, folder, version=ort.__version__)
    if described.device == "cuda":
        require_gpu(described, folder)
        need_cuda()
        session: Session = imported("ort_cuda").OnnxRuntimeCudaSession(folder, described)
        return session
    return OnnxRuntimeSession(folder, described)


def _spec(value: ort.NodeArg, axes: dict[str, int]) -> TensorSpec:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return TensorSpec(value.name, TYPES.get(kind, kind), dynamic(value.shape, axes))

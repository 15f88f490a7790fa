"""The contract: what every backend does with every tiny model that it can take.

A new backend gets all of it by a line in BACKENDS. A model of each tiny workload is held to the whole contract; the
forms are models with odd structures, of which each backend has to give the outputs and tell the layers. What can't be
done here is skipped with the reason.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tasks import checkpoint, layers, manifest, proof, target, transfer
from tasks.data import data, read
from tasks.engines import protocol
from tasks.errors import Fault, Unavailable
from tasks.export import export
from tasks.files import sha256
from tasks.fit import predict
from tasks.quantize import quantize
from tasks.settings import USED_BY, BenchmarkParams, BuildParams, DataParams, ExportParams, QuantizeParams
from tasks.workloads.protocol import Arrays, axes, cut, load_workload

TINY = Path(__file__).resolve().parents[2] / "tiny"
FORMS = (
    *("residual", "depthwise", "grouped", "flattened", "joined_then_grouped", "one_channel", "tied", "twice", "bare"),
    *("reshaped", "chunk", "fused", "shuffled", "channels_last", "normed", "recurrent", "blocks"),
)
# By name: the workload's file, and the settings of its model.
WHOLE = ("tiny", "text", "lstm")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("workload.py", {}),
    "text": ("text.py", {"layers": 1}),
    "lstm": ("lstm.py", {"kind": "lstm", "width": 16}),
    **{form: ("forms.py", {"form": form}) for form in FORMS},
}
# By name: what a backend builds from, and the style of its INT8 files.
BACKENDS = {
    "eager": ("model", None),
    "onnxruntime": ("onnx", "onnxruntime"),
    "inductor": ("program", None),
    "tensorrt": ("onnx", "tensorrt"),
    "tensorrt_rtx": ("onnx", "tensorrt"),
}
# Each model is compiled for many seconds: one form has to do.
SLOW = {"inductor": ("joined_then_grouped",)}
MAX_BATCH = 9
BATCHES = (1, 3, 7, MAX_BATCH)
CASES = [(backend, model, "fp32", "cpu") for backend in BACKENDS for model in WHOLE]
CASES += [(backend, "tiny", "int8", "cpu") for backend, (_, style) in BACKENDS.items() if style]
# TensorRT's are for CUDA whatever is asked.
ON_CUDA = [name for name in BACKENDS if "device" in USED_BY[name]]
CASES += [(name, model, "fp32", "cuda") for name in ON_CUDA for model in WHOLE]


@dataclass(frozen=True)
class Case:
    """An engine, with what it was made of."""

    backend: str
    model: str
    precision: str
    task: ModuleType
    data: Path
    proofs: Path
    source: Path
    folder: Path
    built: protocol.Built

    def samples(self, n: int, halved: bool = False) -> Arrays:
        """The first n inputs of the test split, contiguous."""
        part = {name: read(self.data / "test.npz")[name][:n] for name in self.task.INPUTS}
        for size in axes(self.task).values() if halved else ():
            part = cut(self.task, part, size // 2)
        return {name: np.ascontiguousarray(value) for name, value in part.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`sources(model, kind, style)`: a folder with that model as a checkpoint, an ONNX file or a program; made once."""
    root = tmp_path_factory.mktemp("sources")

    def settings(params: Any, **others: Any) -> Any:
        return params.model_validate({"from": "model", **others})

    def make(model: str, kind: str, style: str | None = None) -> Path:
        file, keywords = MODELS[model]
        folder, splits = root / model / f"{kind}-{style or 'fp32'}", root / file / "data"
        if folder.is_dir():
            return folder
        if kind == "model":
            if not splits.is_dir():
                data(TINY / file, splits, DataParams(train=16, calibration=8, validation=16, test=16))
            torch.manual_seed(0)
            module = load_workload(TINY / file).model(**keywords)
            checkpoint.save(checkpoint.Checkpoint(module, str(TINY / file), keywords), folder)
            proofs = root / model / "proof"
            proofs.mkdir()
            proof.of_model(module, load_workload(TINY / file), read(splits / "validation.npz"), proofs)
        elif style:
            given = settings(QuantizeParams, style=style, calibration="minmax", samples=8, batch=8)
            quantize(make(model, kind), TINY / file, splits, folder, given)
        else:
            export(make(model, "model"), splits, folder, settings(ExportParams, format=kind))
        return folder

    return make


@pytest.fixture(scope="module")
def make(sources: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make(backend, model, precision, device)`: an engine; skipped, with the reason, if it can't be built here."""

    def case(backend: str, model: str, precision: str = "fp32", device: str = "cpu") -> Case:
        if device == "cuda" and target.fingerprint().gpu_name is None:
            pytest.skip("no NVIDIA GPU here")
        kind, style = BACKENDS[backend]
        file, folder = TINY / MODELS[model][0], tmp_path_factory.mktemp("engines") / f"{model}-{backend}"
        folder.mkdir()
        where = {"device": device} if backend in ON_CUDA else {}
        spec = BuildParams.model_validate({"from": "model", "backend": backend, "max_batch": MAX_BATCH, **where})
        try:
            module = protocol.backend(backend)
            parent, source = sources(model, "model"), sources(model, kind, style if precision == "int8" else None)
            built = module.build(source, folder, spec)
        except Unavailable as reason:
            pytest.skip(str(reason))
        manifest.write(folder, built.manifest)
        layers.write(folder, built.layers)
        splits, proofs = parent.parents[1] / file.name / "data", parent.parent / "proof"
        return Case(backend, model, precision, load_workload(file), splits, proofs, source, folder, built)

    return case


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, id="-".join(one), marks=[pytest.mark.gpu] * (one[3] == "cuda")) for one in CASES],
)
def case(request: pytest.FixtureRequest, make: Any) -> Case:
    """An engine of each backend for a model of each workload, and of a file in INT8; on a GPU, where there is one."""
    return make(*request.param)


@pytest.fixture(scope="module")
def session(case: Case) -> Any:
    """The case's open engine; skipped where its backend can't run here."""
    try:
        opened = protocol.open_engine(case.folder)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with opened:
        yield opened


@pytest.fixture
def copied(case: Case, tmp_path: Path) -> Path:
    """A copy of the case's engine that a test may spoil."""
    return Path(shutil.copytree(case.folder, tmp_path / case.folder.name))


def test_it_opens_here_or_says_in_one_line_why_not(case: Case) -> None:
    try:
        with protocol.open_engine(case.folder):
            pass
    except Unavailable as reason:
        assert str(reason) and "\n" not in str(reason)


def test_the_manifest_says_what_it_is_and_what_it_was_made_of(case: Case) -> None:
    described = manifest.read(case.folder)
    assert described == case.built.manifest
    assert (described.backend, described.max_batch, described.axes) == (case.backend, MAX_BATCH, axes(case.task))
    shapes = {name: (dtype, (None, *shape)) for name, (dtype, shape) in case.task.INPUTS.items()}
    assert {i.name: (i.dtype, i.shape) for i in described.inputs} == shapes
    assert tuple(o.name for o in described.outputs) == case.task.OUTPUTS
    assert described.preprocessing == case.task.PREPROCESSING
    assert described.engine_sha256 == sha256(case.folder / described.engine_file)
    assert described.rebuild == f"dvc repro build@{case.folder.name}"
    assert sum(described.operators.values()) > 0
    assert described.model_sha256 == sha256(case.source.parent / "model-fp32" / checkpoint.FILE)


@pytest.mark.parametrize("batch", BATCHES)
def test_it_computes_what_pytorch_does(case: Case, session: Any, batch: int) -> None:
    model = checkpoint.load(case.source.parent / "model-fp32").model
    for halved in {False, bool(axes(case.task))}:
        inputs = case.samples(batch, halved)
        expected = predict(model, case.task, {**inputs, "label": np.zeros(batch)})
        got = session.run(inputs)
        session.synchronize()
        assert got.keys() == set(case.task.OUTPUTS)
        for spec in session.outputs:
            value, wanted = got[spec.name], expected[spec.name]
            assert (value.dtype.name, value.shape) == (spec.dtype, wanted.shape)
            tolerance = 1e-3 if case.precision == "fp32" else 0.2
            np.testing.assert_allclose(value, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def test_the_proof_holds_and_names_every_output(case: Case, session: Any) -> None:
    parities = proof.check(session, case.proofs, case.precision, MAX_BATCH)
    assert [p.output for p in parities] == list(case.task.OUTPUTS)
    assert all(p.difference <= p.tolerance for p in parities)


def test_a_session_says_what_it_takes_and_where_it_runs(case: Case, session: Any) -> None:
    described = manifest.read(case.folder)
    assert (tuple(session.inputs), tuple(session.outputs)) == (described.inputs, described.outputs)
    assert session.device == described.device


def test_the_bare_call_computes_what_the_session_does(case: Case, session: Any) -> None:
    if not hasattr(session, "bare"):
        pytest.skip(f"a session of {case.backend} launches the backend's own call and nothing else")
    inputs = case.samples(3)
    want = session.run(inputs)
    with session.bare(inputs) as call:
        for _ in range(2):
            got = call()
            session.synchronize()
            values = got if isinstance(got, dict) else dict(zip((o.name for o in session.outputs), got, strict=True))
            assert values.keys() == want.keys()
            for name, value in values.items():
                assert np.array_equal(np.asarray(torch.as_tensor(value).cpu()), want[name])


def test_the_copies_of_a_call_are_timed_where_it_runs_on_a_gpu(case: Case, session: Any) -> None:
    found = transfer.of(session, case.samples(8), BenchmarkParams(batch=2), lambda: None)
    if session.device == "cpu":
        assert found is None
        return
    assert found is not None
    parts = (found.load_ms, found.run_ms, found.fetch_ms)
    assert all(0 < part.low <= part.value <= part.high for part in parts)
    assert 0.5 < found.whole_ms.value / sum(part.value for part in parts) < 2


def test_results_are_not_overwritten_by_the_next_call(case: Case, session: Any) -> None:
    name, inputs = case.task.OUTPUTS[0], case.samples(4)
    first = session.run({k: v[:2] for k, v in inputs.items()})[name]
    kept = first.copy()
    session.run({k: v[2:] for k, v in inputs.items()})
    assert np.array_equal(first, kept)


def test_inputs_need_not_be_contiguous(case: Case, session: Any) -> None:
    inputs = case.samples(6)
    want = session.run({k: np.ascontiguousarray(v[::2]) for k, v in inputs.items()})
    got = session.run({k: v[::2] for k, v in inputs.items()})
    assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda v: None, "is missing"),
        (lambda v: v.astype(np.float16), "doesn't fit"),
        (lambda v: v[..., None], "doesn't fit"),
        (lambda v: np.concatenate([v, v], -1), "doesn't fit"),
        (lambda v: v[0], "doesn't fit"),
        (lambda v: v[:0], "batch out of range"),
        (lambda v: np.concatenate([v] * 4)[: MAX_BATCH + 1], "batch out of range"),
    ],
    ids=["name", "type", "rank", "shape", "no batch", "none", "too many"],
)
def test_inputs_that_do_not_fit_are_refused(case: Case, session: Any, change: Any, what: str) -> None:
    inputs, first = case.samples(3), next(iter(case.task.INPUTS))
    changed = {**inputs, first: change(inputs[first])}
    with pytest.raises(Fault, match=f"input {first}.* {what}|input {first}: {what}"):
        session.run({k: v for k, v in changed.items() if v is not None})
    assert session.run(inputs).keys() == set(case.task.OUTPUTS)


def test_inputs_that_differ_in_number_are_refused(case: Case, session: Any) -> None:
    if len(case.task.INPUTS) < 2:
        pytest.skip("one input")
    inputs, first = case.samples(3), next(iter(case.task.INPUTS))
    with pytest.raises(Fault, match="differ in number"):
        session.run({**inputs, first: inputs[first][:2]})


def test_closing_twice_is_closing_once_and_leaves_another_session_alone(case: Case, session: Any) -> None:
    inputs, name = case.samples(2), case.task.OUTPUTS[0]
    want = session.run(inputs)[name]
    with protocol.open_engine(case.folder) as other:
        assert np.array_equal(other.run(inputs)[name], want)
    other.__exit__(None, None, None)
    assert np.array_equal(session.run(inputs)[name], want)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b"", lambda b: b"x" + b], ids=["cut", "empty", "prefixed"]
)
def test_a_damaged_engine_is_never_opened(copied: Path, damage: Any) -> None:
    engine = copied / manifest.read(copied).engine_file
    for file in [engine] if engine.is_file() else [f for f in engine.rglob("*") if f.stat().st_size]:
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        with pytest.raises(Fault, match="is not the one its manifest describes") as caught:
            protocol.open_engine(copied)
        assert f"rebuild: dvc repro build@{copied.name}" in str(caught.value)
        file.write_bytes(whole)


def test_an_engine_of_another_version_is_refused(copied: Path) -> None:
    raw = json.loads((copied / manifest.FILE).read_text())
    (copied / manifest.FILE).write_text(json.dumps({**raw, "backend_version": "0.0.1"}))
    with pytest.raises(Fault, match="built by another version") as caught:
        protocol.open_engine(copied)
    assert str(caught.value.got).startswith("here: ") and "0.0.1" in str(caught.value.expected)
    assert caught.value.do == f"rebuild: dvc repro build@{copied.name}"


def test_its_layers_are_told_and_are_as_asked(case: Case) -> None:
    told = layers.read(case.folder)
    assert told == case.built.layers and told
    assert any(layer.product for layer in told), [layer.kind for layer in told]
    described = manifest.read(case.folder)
    assert described.precision_asked == case.precision
    assert described.precision_found == layers.found(told)
    assert layers.not_as_asked(described.precision_asked, told) is None
    if case.precision == "int8":
        assert described.calibration_sha256 == sha256(case.data / "calibration.npz")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_it_takes_models_of_every_form(make: Any, backend: str, form: str) -> None:
    if form not in SLOW.get(backend, FORMS):
        pytest.skip(
            f"{backend} compiles for many seconds a model; of the forms it is held to {', '.join(SLOW[backend])}"
        )
    made = make(backend, form)
    told = layers.read(made.folder)
    assert layers.not_as_asked("fp32", told) is None and any(layer.product for layer in told)
    try:
        with protocol.open_engine(made.folder) as opened:
            (parity,) = proof.check(opened, made.proofs, "fp32", MAX_BATCH)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert parity.output == "logits" and parity.difference <= 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_source_that_is_no_model_is_a_fault(tmp_path: Path, backend: str) -> None:
    for folder in ("source", "engine"):
        (tmp_path / folder).mkdir()
    for file in ("model.pt", "model.onnx", "program.pt2"):
        (tmp_path / "source" / file).write_bytes(b"no model")
    spec = BuildParams.model_validate({"from": "source", "backend": backend})
    try:
        module = protocol.backend(backend)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with pytest.raises(Fault, match="is not a"):
        module.build(tmp_path / "source", tmp_path / "engine", spec)


def test_every_backend_of_the_project_is_held_to_the_contract() -> None:
    assert set(BACKENDS) == set(protocol.BACKENDS)

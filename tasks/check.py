"""Every fault of a params file, each with its key, the value got, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tasks.check_quantize import build_faults, calibration_faults, metric_faults
from tasks.check_tree import artifacts, hint, tree_faults
from tasks.errors import Fault
from tasks.settings import (
    SECTIONS,
    TENSORRT,
    USED_BY,
    BenchmarkParams,
    BuildParams,
    DataParams,
    DistillParams,
    EvaluateParams,
    ExportParams,
    Params,
    QatParams,
    QuantizeParams,
    Settings,
    TrainParams,
    min_rounds,
)
from tasks.workloads.protocol import Workload, axes, load_workload

DEFAULTED = ("data", "evaluate", "benchmark", "gates")
S = TypeVar("S", bound=Settings)


def faults(raw: dict[str, Any], models: bool = True) -> list[str]:
    """All faults of a params file's content: of types, of the tree, and of what belongs together.

    A part whose types are wrong is left out of what is checked across parts. The workload is
    looked for from the working directory, as the steps do. Keywords for its models are tried
    only if `models`, since that may load PyTorch.
    """
    return [*_type_faults(raw), *tree_faults(raw), *_meaning_faults(raw, models)]


def _type_faults(raw: dict[str, Any]) -> list[str]:
    try:
        Params.model_validate(raw)
    except ValidationError as error:
        return [_sentence(e) for e in error.errors()]
    return []


def _meaning_faults(raw: dict[str, Any], models: bool) -> list[str]:
    """Faults that need several settings, or the workload, to be seen."""
    data, evaluate = _part(raw, "data", DataParams), _part(raw, "evaluate", EvaluateParams)
    timing = _part(raw, "benchmark", BenchmarkParams)
    found: list[str] = []
    for name, value in _valid(raw, "quantize", QuantizeParams):
        found += calibration_faults(name, value, data)
    if data and data.calibration > data.train:
        found.append(
            f"data.calibration: got {data.calibration}, expected at most data.train ({data.train}): "
            "it is drawn from the training split"
        )
    for name, qat in _valid(raw, "qat", QatParams):
        if data and qat.samples > data.calibration:
            found.append(
                f"qat.{name}.samples: got {qat.samples}, expected at most data.calibration ({data.calibration}): "
                "raise that or lower this"
            )
    for name, exported in _valid(raw, "export", ExportParams):
        useless = sorted({"opset", "external_data"} & exported.model_fields_set) if exported.format == "program" else ()
        found += [
            f"export.{name}.{key}: got {getattr(exported, key)!r} with format: program, expected nothing: that is of "
            "ONNX files: leave it out"
            for key in useless
        ]
    quantised = dict(_valid(raw, "quantize", QuantizeParams))
    found += _twice_quantised(raw, quantised)
    for name, build in _valid(raw, "build", BuildParams):
        found += _unused_faults(name, build)
        if build.parent in quantised:
            found += build_faults(name, build, quantised[build.parent])
        found += [
            f"build.{name}.max_batch: got {build.max_batch}, expected at least {section}.{key} ({batch}): raise it"
            for section, key, batch in _batches(evaluate, timing)
            if build.max_batch < batch
        ]
    if timing and 2.0 ** (1 - timing.rounds) > 1 - timing.confidence:
        found.append(
            f"benchmark.rounds: got {timing.rounds}, expected at least {min_rounds(timing.confidence)}: "
            f"fewer can't give an interval of confidence {timing.confidence}"
        )
    if timing and timing.clock == "device":
        on_cpu = [name for name, build in _valid(raw, "build", BuildParams) if build.where == "cpu"]
        found += [
            f"benchmark.clock: got 'device', but build.{name} is for the CPU; expected device: cuda: "
            "set that, or clock: host"
            for name in on_cpu
        ]
    if timing and timing.rounds > timing.max_rounds:
        found.append(
            f"benchmark.rounds: got {timing.rounds}, expected at most benchmark.max_rounds ({timing.max_rounds}): "
            "raise that or lower this"
        )
    return found + _workload_faults(raw, evaluate, models)


def _twice_quantised(raw: dict[str, Any], quantised: dict[str, QuantizeParams]) -> list[str]:
    """Files that are quantised after `qat` did it; FP16 and BF16 aren't."""
    of = {name: exported.parent for name, exported in _valid(raw, "export", ExportParams)}
    trained = {name for section, name, _ in artifacts(raw) if section == "qat"}
    return [
        f"quantize.{name}.from: got {q.parent!r}, the export of {of[q.parent]!r}, which qat has quantised already; "
        "expected the export of a model in floating point: build from it as it is"
        for name, q in quantised.items()
        if q.format in ("int8", "fp8", "int4") and of.get(q.parent) in trained
    ]


def _unused_faults(name: str, build: BuildParams) -> list[str]:
    """Settings that were given and that the backend, or its device, has no use for; and asked for what can't be."""
    given, used = build.model_fields_set, USED_BY[build.backend]
    keys = {field.alias or key: key for key, field in BuildParams.model_fields.items()}
    found = [
        f"build.{name}.{key}: got {getattr(build, field)!r}, expected nothing: {build.backend} has no such setting; "
        f"leave it out"
        for key, field in keys.items()
        if field in given and field not in used
    ]
    if build.where == "cpu":
        found += [
            f"build.{name}.{key}: got {getattr(build, key)!r} on the CPU, expected device: cuda: add that, or leave "
            f"{key} out"
            for key in ("cuda_graph", "sparse")
            if getattr(build, key)
        ]
        if build.precision in ("tf32", "fp8"):
            found.append(
                f"build.{name}.precision: got {build.precision!r} on the CPU, expected fp32, bf16, fp16 or int8; "
                "a CPU has no such arithmetic"
            )
    if build.backend in ("onnxruntime", *TENSORRT):
        if build.precision not in ("fp32", "tf32"):
            found.append(
                f"build.{name}.precision: got {build.precision!r}, expected fp32 or tf32: {build.backend} takes other "
                "formats from the ONNX file: make one with quantize, and build from that"
            )
        if build.channels_last and build.where == "cpu":
            found.append(
                f"build.{name}.channels_last: got True on the CPU, expected device: cuda: on a CPU onnxruntime chooses "
                "the layout: leave it out"
            )
    if build.sparse and build.backend in ("eager", "inductor") and build.precision not in ("fp16", "bf16"):
        found.append(
            f"build.{name}.sparse: got {build.precision} products, expected fp16 or bf16, in which PyTorch has "
            "2:4 kernels: set that, or leave sparse out"
        )
    if build.opt_batch and build.opt_batch > build.max_batch:
        found.append(
            f"build.{name}.opt_batch: got {build.opt_batch}, expected at most max_batch ({build.max_batch}): "
            "raise that or lower this"
        )
    return found


def _batches(evaluate: EvaluateParams | None, timing: BenchmarkParams | None) -> list[tuple[str, str, int]]:
    """Section, key and value of every batch size that an engine is run with."""
    found = [("evaluate", "batch", evaluate.batch)] if evaluate else []
    if timing:
        found += [("benchmark", "batch", timing.batch), *(("benchmark", "also", batch) for batch in timing.also)]
    return found


def _workload_faults(raw: dict[str, Any], evaluate: EvaluateParams | None, models: bool) -> list[str]:
    named = raw.get("workload")
    if not isinstance(named, str):
        return []
    try:
        workload = load_workload(Path(named))
    except Fault as error:
        return [f"workload: {error.line}"]
    found, metrics = _model_faults(raw, workload) if models else [], workload.METRICS
    for name, q in _valid(raw, "quantize", QuantizeParams):
        found += metric_faults(name, q, named, metrics)
    timing = _part(raw, "benchmark", BenchmarkParams)
    longest = max(axes(workload).values(), default=None)
    lengths = {"benchmark.length": timing.length} if timing else {}
    lengths |= {f"build.{name}.opt_length": build.opt_length for name, build in _valid(raw, "build", BuildParams)}
    expected = f"at most {longest}" if longest else "nothing, since the workload has no dynamic axis"
    found += [
        f"{key}: got {length}, expected {expected}: lower it or leave it out"
        for key, length in lengths.items()
        if length is not None and (longest is None or length > longest)
    ]
    if evaluate is None or evaluate.metric in metrics:
        return found
    return [
        *found,
        f"evaluate.metric: got {evaluate.metric!r}, expected one of {', '.join(metrics)} (those of {named})"
        f"{hint(evaluate.metric, metrics)}",
    ]


def _model_faults(raw: dict[str, Any], workload: Workload) -> list[str]:
    """Faults of keywords for the workload's `model()`, found by calling it with them."""
    asked = [(f"train.{name}.model", train.model) for name, train in _valid(raw, "train", TrainParams)]
    asked += [(f"distill.{name}.student", kd.student or {}) for name, kd in _valid(raw, "distill", DistillParams)]
    found = []
    for key, keywords in asked:
        try:
            if keywords:
                workload.model(**keywords)
        except Exception as error:
            words = error.line if isinstance(error, Fault) else f"{type(error).__name__}: {error}; mend them"
            found.append(f"{key}: got {keywords}, expected keywords that the workload's model() takes: {words}")
    return found


def _part(raw: dict[str, Any], section: str, kind: type[S]) -> S | None:
    """A section's settings, or None if they are faulty."""
    return _settings(raw.get(section, {}), kind)


def _valid(raw: dict[str, Any], section: str, kind: type[S]) -> Iterator[tuple[str, S]]:
    """Names and settings of a section's artifacts, without the faulty ones."""
    for at, name, value in artifacts(raw):
        settings = _settings(value, kind) if at == section else None
        if settings:
            yield name, settings


def _settings(value: Any, kind: type[S]) -> S | None:
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None


def _sentence(error: Any) -> str:
    """One pydantic error as: key, value got, what was expected."""
    loc, kind = [str(part) for part in error["loc"]], error["type"]
    key, got = ".".join(loc), error["input"]
    if kind == "extra_forbidden":
        known = _keys_at(error["loc"][:-1])
        what = "technique or section" if len(loc) == 1 else "setting"
        return f"{key}: unknown {what} (value {got!r}); expected one of {', '.join(known)}{hint(loc[-1], known)}"
    if kind == "missing":
        if key in DEFAULTED:
            return f"{key}: missing; expected a section: add `{key}: {{}}` for the defaults"
        return f"{key}: missing; expected a value: add `{loc[-1]}:`"
    if kind == "too_short":
        return f"{key}: got {got!r}; expected at least one value: name one, or leave {loc[-1]} out for its default"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: got {got!r}; expected {message.removeprefix('Input should be ')}"


def _keys_at(loc: tuple[Any, ...]) -> list[str]:
    """The keys that are accepted at a place of the params file."""
    model: Any = Params
    for index, part in enumerate(loc):
        if isinstance(model, type) and issubclass(model, BaseModel):
            if part in SECTIONS and index == 0:
                model = {part: SECTIONS[part]}
                continue
            annotation = model.model_fields[part].annotation
            args = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = args[0] if args else annotation
        else:
            model = next(iter(model.values()))
    return [field.alias or name for name, field in model.model_fields.items()]

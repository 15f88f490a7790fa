"""Every fault of a params file, each with its key, the value got, what was expected and what to do."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tasks.errors import Fault
from tasks.settings import (
    MODEL_STEPS,
    SECTIONS,
    BenchmarkParams,
    BuildParams,
    DataParams,
    EvaluateParams,
    Params,
    QuantizeParams,
    Settings,
)
from tasks.workloads.protocol import load_workload

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
PARENTS = {
    "prune": MODEL_STEPS,
    "factorize": MODEL_STEPS,
    "distill": MODEL_STEPS,
    "export": MODEL_STEPS,
    "quantize": ("export",),
    "build": ("export", "quantize"),
}
CALIBRATIONS = {"onnxruntime": ("minmax", "entropy", "percentile"), "tensorrt": ("minmax", "entropy")}
S = TypeVar("S", bound=Settings)


def faults(raw: dict[str, Any], path: Path) -> list[str]:
    """All faults of a params file's content: of types, of the tree, and of what belongs together.

    A part whose types are wrong is left out of what is checked across parts.
    """
    return [*_type_faults(raw), *_tree_faults(raw), *_meaning_faults(raw, path)]


def _type_faults(raw: dict[str, Any]) -> list[str]:
    try:
        Params.model_validate(raw)
    except ValidationError as error:
        return [_sentence(e) for e in error.errors()]
    return []


def _artifacts(raw: dict[str, Any]) -> list[tuple[str, str, Any]]:
    return [(s, n, v) for s in SECTIONS if isinstance(raw.get(s), dict) for n, v in raw[s].items()]


def _tree_faults(raw: dict[str, Any]) -> list[str]:
    """Faults of names and parents, found on the raw file so that they show beside type faults."""
    faults: list[str] = []
    seen: dict[str, str] = {}
    for section, name, _ in _artifacts(raw):
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            faults.append(
                f"{section}.{name}: got the name {name!r}, expected lower-case letters, digits, '-' and '_'; rename it"
            )
        if name in seen:
            faults.append(
                f"{section}.{name}: the name is taken by {seen[name]}.{name}; "
                "names are folders: give each artifact its own"
            )
        seen.setdefault(name, section)
    links = _links(raw)
    for section, name, key, got in links:
        if got not in seen:
            faults.append(f"{section}.{name}.{key}: got {got!r}, expected an artifact of this file{_hint(got, seen)}")
            continue
        allowed = _allowed(section, raw[section][name]) if key == "from" else PARENTS["distill"]
        if seen[got] not in allowed:
            faults.append(
                f"{section}.{name}.{key}: got {got!r}, made by {seen[got]}; "
                f"expected an artifact made by {', '.join(allowed)}"
            )
        if _descends(got, name, links):
            faults.append(
                f"{section}.{name}.{key}: got {got!r}, which descends from {name!r} itself; "
                "expected a tree: break the cycle"
            )
    baseline = raw.get("baseline")
    if isinstance(baseline, str) and seen.get(baseline) != "build":
        builds = list(raw["build"]) if isinstance(raw.get("build"), dict) else []
        faults.append(
            f"baseline: got {baseline!r}, expected an engine of the section build: {', '.join(map(str, builds))}"
        )
    return faults


def _links(raw: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Section, name, key and value of each reference of an artifact to another."""
    return [
        (section, name, key, value[key])
        for section, name, value in _artifacts(raw)
        if isinstance(value, dict)
        for key in ("from", "teacher")
        if isinstance(value.get(key), str)
    ]


def _allowed(section: str, value: dict[str, Any]) -> tuple[str, ...]:
    if section != "build":
        return PARENTS.get(section, ())
    known = {"eager": MODEL_STEPS, "onnxruntime": PARENTS["build"], "tensorrt_rtx": PARENTS["build"]}
    return known.get(str(value.get("backend")), MODEL_STEPS + PARENTS["build"])


def _descends(name: str, ancestor: str, links: list[tuple[str, str, str, str]]) -> bool:
    """Whether `name` is `ancestor`, or is made from it in any number of steps."""
    reached, todo = {name}, [name]
    while todo:
        at = todo.pop()
        new = {got for _, child, _, got in links if child == at} - reached
        reached |= new
        todo += new
    return ancestor in reached


def _meaning_faults(raw: dict[str, Any], path: Path) -> list[str]:
    """Faults that need several settings, or the workload, to be seen."""
    data, evaluate = _part(raw, "data", DataParams), _part(raw, "evaluate", EvaluateParams)
    timing = _part(raw, "benchmark", BenchmarkParams)
    found: list[str] = []
    for name, value in _valid(raw, "quantize", QuantizeParams):
        found += _calibration_faults(name, value, data)
    if data and data.calibration > data.train:
        found.append(
            f"data.calibration: got {data.calibration}, expected at most data.train ({data.train}): "
            "it is drawn from the training split"
        )
    for name, build in _valid(raw, "build", BuildParams):
        found += [
            f"build.{name}.max_batch: got {build.max_batch}, expected at least {section}.batch ({settings.batch}): "
            "raise it"
            for section, settings in (("evaluate", evaluate), ("benchmark", timing))
            if settings and build.max_batch < settings.batch
        ]
    if timing and 2.0 ** (1 - timing.rounds) > 1 - timing.confidence:
        need = math.ceil(1 - math.log2(1 - timing.confidence))
        found.append(
            f"benchmark.rounds: got {timing.rounds}, expected at least {need}: "
            f"fewer can't give an interval of confidence {timing.confidence}"
        )
    return found + _workload_faults(raw, path, evaluate)


def _workload_faults(raw: dict[str, Any], path: Path, evaluate: EvaluateParams | None) -> list[str]:
    named = raw.get("workload")
    if not isinstance(named, str):
        return []
    try:
        metrics = load_workload(path.parent / named).METRICS
    except Fault as error:
        return [f"workload: {error.line}"]
    if evaluate is None or evaluate.metric in metrics:
        return []
    return [
        f"evaluate.metric: got {evaluate.metric!r}, expected one of {', '.join(metrics)} (those of {named})"
        f"{_hint(evaluate.metric, metrics)}"
    ]


def _calibration_faults(name: str, q: QuantizeParams, data: DataParams | None) -> list[str]:
    found = []
    if q.samples < q.batch:
        found.append(
            f"quantize.{name}.samples: got {q.samples} calibration samples for a batch of {q.batch}; "
            "expected at least one full batch: raise samples or lower batch"
        )
    if data and q.samples > data.calibration:
        found.append(
            f"quantize.{name}.samples: got {q.samples}, expected at most data.calibration ({data.calibration}): "
            "raise that or lower this"
        )
    if q.calibration not in CALIBRATIONS[q.style]:
        found.append(
            f"quantize.{name}.calibration: got {q.calibration!r} with style {q.style}; "
            f"expected one of {', '.join(CALIBRATIONS[q.style])}"
        )
    return found


def _part(raw: dict[str, Any], section: str, kind: type[S]) -> S | None:
    """A section's settings, or None if they are faulty."""
    return _settings(raw.get(section, {}), kind)


def _valid(raw: dict[str, Any], section: str, kind: type[S]) -> Iterator[tuple[str, S]]:
    """Names and settings of a section's artifacts, without the faulty ones."""
    for at, name, value in _artifacts(raw):
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
        return f"{key}: unknown {what} (value {got!r}); expected one of {', '.join(known)}{_hint(loc[-1], known)}"
    if kind == "missing":
        return f"{key}: missing; expected a value: add `{loc[-1]}:`"
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


def _hint(got: object, known: Any) -> str:
    close = difflib.get_close_matches(str(got), [str(k) for k in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

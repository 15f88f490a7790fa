"""Reads `params.yaml` into settings and a tree of artifacts; reports all its faults at once."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks.errors import Fault
from tasks.settings import SECTIONS, BuildParams, DistillParams, Params, QuantizeParams, Settings
from tasks.workloads.protocol import load_workload

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
PARENTS = {
    "prune": ("train", "prune", "distill"),
    "distill": ("train", "prune", "distill"),
    "export": ("train", "prune", "distill"),
    "quantize": ("export",),
    "build": ("export", "quantize"),
}
EAGER_PARENTS = ("train", "prune", "distill")


class ParamsFault(Exception):
    """Every fault of one params file; `faults` holds a line for each."""

    def __init__(self, path: Path, faults: list[str]) -> None:
        count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"
        super().__init__(f"{path}: {count}\n" + "\n".join(f"  {fault}" for fault in faults))
        self.faults = faults


@dataclass(frozen=True)
class Node:
    """One artifact: the step that makes it, its settings, and its parent's name if it has one."""

    name: str
    step: str
    settings: Settings
    parent: str | None


@dataclass(frozen=True)
class Tree:
    """The artifacts of a params file, by name, each after its parent."""

    params: Params
    nodes: dict[str, Node]

    def lineage(self, name: str) -> tuple[str, ...]:
        """Names from the root to `name`."""
        node = self.nodes[name]
        return (*(self.lineage(node.parent) if node.parent else ()), name)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the built engines, in the order of the file."""
        return tuple(self.params.build)

    def plain(self, backend: str) -> str | None:
        """The backend's engine of the baseline's model with nothing compressed."""
        model = self.lineage(self.params.baseline)[0]
        for name, build in self.params.build.items():
            line = self.lineage(name)
            steps = [self.nodes[n].step for n in line]
            if build.backend == backend and line[0] == model and set(steps) <= {"train", "export", "build"}:
                return name
        return None


def load(path: Path) -> Tree:
    """Read, check and order a params file.

    Raises ParamsFault with every fault found, each naming its key, the value got, what was
    expected and what to do.
    """
    raw = _read(path)
    faults: list[str] = []
    params: Params | None = None
    try:
        params = Params.model_validate(raw)
    except ValidationError as error:
        faults += [_sentence(e, raw) for e in error.errors()]
    faults += _tree_faults(raw)
    if not faults and params is not None:
        faults += _meaning_faults(params, path)
    if faults or params is None:
        raise ParamsFault(path, faults)
    tree = Tree(params, _ordered(params))
    faults += _plain_faults(tree)
    if faults:
        raise ParamsFault(path, faults)
    return tree


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ParamsFault(path, ["no such file; expected a params file: copy the shipped params.yaml"])
    try:
        raw = YAML(typ="safe", pure=True).load(path.read_text())
    except YAMLError as error:
        text = " ".join(str(error).split())
        raise ParamsFault(path, [f"not readable as YAML (each key once, spaces for indents): {text}"]) from None
    if not isinstance(raw, dict):
        raise ParamsFault(path, [f"got {type(raw).__name__}, expected a mapping of sections; see README"])
    return raw


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
    links = {n: v.get("from") for _, n, v in _artifacts(raw) if isinstance(v, dict) and "from" in v}
    for section, name, value in _artifacts(raw):
        for key in ("from", "teacher"):
            got = value.get(key) if isinstance(value, dict) else None
            if got is None:
                continue
            if got not in seen:
                faults.append(
                    f"{section}.{name}.{key}: got {got!r}, expected an artifact of this file{_hint(got, seen)}"
                )
                continue
            allowed = _allowed(section, value) if key == "from" else PARENTS["distill"]
            if seen[got] not in allowed:
                faults.append(
                    f"{section}.{name}.{key}: got {got!r}, made by {seen[got]}; "
                    f"expected an artifact made by {', '.join(allowed)}"
                )
        if _cyclic(name, links):
            faults.append(
                f"{section}.{name}.from: got {links[name]!r}, which descends from {name!r} itself; "
                "expected a tree: break the cycle"
            )
    baseline = raw.get("baseline")
    if isinstance(baseline, str) and seen.get(baseline) != "build":
        builds = list(raw["build"]) if isinstance(raw.get("build"), dict) else []
        faults.append(
            f"baseline: got {baseline!r}, expected an engine of the section build: {', '.join(map(str, builds))}"
        )
    return faults


def _allowed(section: str, value: dict[str, Any]) -> tuple[str, ...]:
    if section == "build" and value.get("backend") == "eager":
        return EAGER_PARENTS
    return PARENTS.get(section, ())


def _cyclic(name: str, links: dict[str, Any]) -> bool:
    at, steps = links.get(name), 0
    while at is not None and at != name and steps <= len(links):
        at, steps = links.get(at), steps + 1
    return at == name


def _meaning_faults(params: Params, path: Path) -> list[str]:
    """Faults that need several settings, or the workload, to be seen."""
    faults = []
    data = params.data
    for name, q in params.quantize.items():
        faults += _calibration_faults(name, q, data.calibration)
    if data.calibration > data.train:
        faults.append(
            f"data.calibration: got {data.calibration}, expected at most data.train ({data.train}): "
            "it is drawn from the training split"
        )
    for gate, bound in params.gates:
        if bound is not None and bound.min is None and bound.max is None:
            faults.append(f"gates.{gate}: got neither min nor max, expected at least one of them")
    for name, build in params.build.items():
        faults += _batch_faults(name, build, params)
    try:
        workload = load_workload(path.parent / params.workload)
    except Fault as error:
        return [*faults, f"workload: {error.line}"]
    if params.evaluate.metric not in workload.METRICS:
        faults.append(
            f"evaluate.metric: got {params.evaluate.metric!r}, expected one of {', '.join(workload.METRICS)} "
            f"(those of {params.workload})"
        )
    return faults


def _calibration_faults(name: str, q: QuantizeParams, available: int) -> list[str]:
    faults = []
    if q.samples < q.batch:
        faults.append(
            f"quantize.{name}.samples: got {q.samples} calibration samples for a batch of {q.batch}; "
            "expected at least one full batch: raise samples or lower batch"
        )
    if q.samples > available:
        faults.append(
            f"quantize.{name}.samples: got {q.samples}, expected at most data.calibration ({available}): "
            "raise that or lower this"
        )
    return faults


def _batch_faults(name: str, build: BuildParams, params: Params) -> list[str]:
    return [
        f"build.{name}.max_batch: got {build.max_batch}, expected at least {section}.batch ({need}): raise it"
        for section, need in (("evaluate", params.evaluate.batch), ("benchmark", params.benchmark.batch))
        if build.max_batch < need
    ]


def _plain_faults(tree: Tree) -> list[str]:
    backends = dict.fromkeys(build.backend for build in tree.params.build.values())
    root = tree.lineage(tree.params.baseline)[0]
    return [
        f"build: got no plain {backend} engine, expected one made of {root!r} with nothing compressed, to compare "
        f"the others with: add build: {{{root}-{backend.replace('_', '-')}: {{from: …, backend: {backend}}}}}"
        for backend in backends
        if tree.plain(backend) is None
    ]


def _ordered(params: Params) -> dict[str, Node]:
    nodes = {}
    for section in SECTIONS:
        for name, settings in getattr(params, section).items():
            nodes[name] = Node(name, section, settings, getattr(settings, "parent", None))
    ordered: dict[str, Node] = {}

    def add(node: Node) -> None:
        if node.name in ordered:
            return
        if node.parent:
            add(nodes[node.parent])
        if isinstance(node.settings, DistillParams):
            add(nodes[node.settings.teacher])
        ordered[node.name] = node

    for node in nodes.values():
        add(node)
    return ordered


def _sentence(error: Any, raw: dict[str, Any]) -> str:
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

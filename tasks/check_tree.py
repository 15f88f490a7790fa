"""Faults of the tree of a params file: its names, its parents and its baseline."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from tasks.settings import MODEL_STEPS, SECTIONS

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
FLOATING = tuple(step for step in MODEL_STEPS if step != "qat")
PARENTS = {
    **{step: FLOATING for step in MODEL_STEPS if step != "train"},
    "export": MODEL_STEPS,
    "quantize": ("export",),
    "build": ("export", "quantize"),
}
TEARING = ("prune of channels", "prune of heads", "factorize", "share")
RUNNABLE = ("eager", "onnxruntime", "inductor", "tensorrt")


def artifacts(raw: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Section, name and value of each artifact of a raw file."""
    return [(s, n, v) for s in SECTIONS if isinstance(raw.get(s), dict) for n, v in raw[s].items()]


def tree_faults(raw: dict[str, Any]) -> list[str]:
    """Faults of names and parents, found on the raw file so that they show beside type faults."""
    faults: list[str] = []
    seen: dict[str, str] = {}
    for section, name, _ in artifacts(raw):
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
        allowed = _allowed(section, raw[section][name]) if key == "from" else MODEL_STEPS
        if got not in seen:
            fit = [other for other in seen if seen[other] in allowed and not _descends(other, name, links)]
            faults.append(f"{section}.{name}.{key}: got {got!r}, expected an artifact of this file{hint(got, fit)}")
            continue
        if seen[got] not in allowed:
            faults.append(
                f"{section}.{name}.{key}: got {got!r}, made by {seen[got]}; "
                f"expected an artifact made by {', '.join(allowed)}"
            )
        faults += _format_faults(raw, section, name, got)
        if _descends(got, name, links):
            faults.append(
                f"{section}.{name}.{key}: got {got!r}, which descends from {name!r} itself; "
                "expected a tree: break the cycle"
            )
    return faults + _mask_faults(raw, links) + _baseline_faults(raw)


def _format_faults(raw: dict[str, Any], section: str, name: str, got: str) -> list[str]:
    """An exported program where an ONNX file is wanted, or the other way round."""
    exported, value = raw.get("export", {}).get(got), raw[section][name]
    if section not in ("quantize", "build") or not isinstance(exported, dict):
        return []
    wanted = "program" if value.get("backend") == "inductor" else "onnx"
    found = exported.get("format", "onnx")
    if found == wanted:
        return []
    return [
        f"{section}.{name}.from: got {got!r}, exported as {found}; expected an export with format: {wanted}: "
        "add one, and name it here"
    ]


def _mask_faults(raw: dict[str, Any], links: list[tuple[str, str, str, str]]) -> list[str]:
    """Steps that would tear up the zeros, or average the factors, that an ancestor put in the weights' place."""
    values = {name: (section, value) for section, name, value in artifacts(raw) if isinstance(value, dict)}
    parents = {name: got for _, name, key, got in links if key == "from"}
    faults = []
    for name, (section, value) in values.items():
        what = f"{section} of {value.get('granularity', 'channel')}s" if section == "prune" else section
        masked = _nearest(str(parents.get(name)), values, parents, _masks)
        if masked and what in TEARING:
            faults.append(
                f"{section}.{name}.from: got {parents[name]!r}, whose weights {masked!r} made sparse; {what} would "
                f"tear up its zeros; expected an artifact before {masked!r}: do this first, then {values[masked][0]}"
            )
        factorized = _nearest(str(parents.get(name)), values, parents, _factorizes_all)
        if section == "share" and factorized and value.get("how", "average") == "average":
            faults.append(
                f"share.{name}.from: got {parents[name]!r}, whose layers {factorized!r} factorised; averages of two "
                f"factors are no factors of the average; expected an artifact before {factorized!r}: share first, then "
                "factorize; or take how: copy"
            )
    return faults


def _masks(section: str, value: dict[str, Any]) -> bool:
    """Whether a step puts masks on the weights."""
    return section == "sparsify" or (section == "prune" and value.get("granularity") == "weight")


def _factorizes_all(section: str, value: dict[str, Any]) -> bool:
    """Whether a step factorises every layer it can."""
    return section == "factorize" and not value.get("only")


def _nearest(
    name: str,
    values: dict[str, tuple[str, dict[str, Any]]],
    parents: dict[str, str],
    wanted: Callable[[str, dict[str, Any]], bool],
) -> str | None:
    """The nearest artifact, from `name` up, made by a wanted step, if `name` still has what that step left."""
    seen: set[str] = set()
    while name in values and name not in seen:
        seen.add(name)
        section, value = values[name]
        if wanted(section, value):
            return name
        if section == "distill" and value.get("student"):
            return None
        name = parents.get(name, "")
    return None


def _baseline_faults(raw: dict[str, Any]) -> list[str]:
    named, builds = raw.get("baseline"), raw.get("build")
    if not isinstance(named, str) or not isinstance(builds, dict):
        return []
    backends = {name: value.get("backend") for name, value in builds.items() if isinstance(value, dict)}
    runnable = ", ".join(str(name) for name, backend in backends.items() if backend in RUNNABLE)
    do = f"name one of these: {runnable}" if runnable else f"add one with backend {' or '.join(RUNNABLE)}"
    if named not in builds:
        return [f"baseline: got {named!r}, expected an engine of the section build: {do}"]
    if backends.get(named) == "tensorrt_rtx":
        return [
            f"baseline: got {named!r} of backend tensorrt_rtx, which runs on RTX GPUs only and is "
            f"built ahead of time; expected an engine that runs where it is built: {do}"
        ]
    return []


def _links(raw: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Section, name, key and value of each reference of an artifact to another."""
    keys = {section: ("from", "teacher") if section == "distill" else ("from",) for section in PARENTS}
    return [
        (section, name, key, value[key])
        for section, name, value in artifacts(raw)
        if isinstance(value, dict)
        for key in keys.get(section, ())
        if isinstance(value.get(key), str)
    ]


def _allowed(section: str, value: dict[str, Any]) -> tuple[str, ...]:
    if section != "build":
        return PARENTS[section]
    known = {"eager": MODEL_STEPS, "inductor": ("export",)}
    return known.get(str(value.get("backend")), PARENTS["build"])


def _descends(name: str, ancestor: str, links: list[tuple[str, str, str, str]]) -> bool:
    """Whether `name` is `ancestor`, or is made from it in any number of steps."""
    reached, todo = {name}, [name]
    while todo:
        at = todo.pop()
        new = {got for _, child, _, got in links if child == at} - reached
        reached |= new
        todo += new
    return ancestor in reached


def hint(got: object, known: Iterable[object]) -> str:
    """The nearest known name as a question, or nothing."""
    close = difflib.get_close_matches(str(got), [str(k) for k in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

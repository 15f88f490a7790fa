"""Reads `params.yaml` into settings and a tree of artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks import check
from tasks.settings import SECTIONS, DistillParams, Params, Settings


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

    def made_by(self, name: str) -> tuple[str, ...]:
        """The stages that an artifact comes of, each once: its lineage's from the root, after those of each teacher."""
        stages: dict[str, None] = {}
        for node in (self.nodes[artifact] for artifact in self.lineage(name)):
            if isinstance(node.settings, DistillParams):
                stages |= dict.fromkeys(self.made_by(node.settings.teacher))
            stages[f"{node.step}@{node.name}"] = None
        return tuple(stages)

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


def load(path: Path, models: bool = True) -> Tree:
    """Read, check and order a params file.

    Raises ParamsFault with every fault found, each naming its key, the value got, what was
    expected and what to do. `models` also tries the keywords for the workload's models, which
    may load PyTorch.
    """
    raw = _read(path)
    if found := check.faults(raw, models):
        raise ParamsFault(path, found)
    params = Params.model_validate(raw)
    tree = Tree(params, _ordered(params))
    if found := _plain_faults(tree):
        raise ParamsFault(path, found)
    return tree


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ParamsFault(path, ["no such file; expected a params file: copy the shipped params.yaml"])
    try:
        raw = YAML(typ="safe", pure=True).load(path.read_text())
    except (YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ParamsFault(path, [f"not readable as YAML (each key once, spaces for indents): {text}"]) from None
    if not isinstance(raw, dict):
        raise ParamsFault(path, [f"got {type(raw).__name__}, expected a mapping of sections; see README"])
    return raw


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

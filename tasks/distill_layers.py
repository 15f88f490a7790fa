"""Which layers of a student learn from which of a teacher, and what these layers put out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tasks import fit, transformer
from tasks.distill_losses import relation_heads
from tasks.errors import Fault
from tasks.settings import DistillParams
from tasks.workloads import protocol
from tasks.workloads.protocol import Workload

Shapes = dict[str, tuple[int, ...]]


class Recorder:
    """Keeps the outputs of the layers of these names from the last forward pass of the model, within a `with` block.

    A module that stands in the model under several names, as shared layers do, has one output for each.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        places: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            places.setdefault(module, []).append(name)
        modules = dict(model.named_modules(remove_duplicate=False))
        self._places = {name: (modules[name], places[modules[name]].index(name)) for name in names}
        self._names = Counter({module: len(places[module]) for module, _ in self._places.values()})
        self._model, self._calls, self._hooks = model, dict[nn.Module, list[Any]](), list[Any]()

    def __enter__(self) -> Self:
        self._hooks = [self._model.register_forward_pre_hook(lambda *_: self._calls.clear())]
        self._hooks += [module.register_forward_hook(self._keep) for module in self._names]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, module: nn.Module, _: object, output: Any) -> None:
        self._calls.setdefault(module, []).append(output)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The output of the layer: of a tuple the first. Of a module called more often than it has names, the last."""
        module, place = self._places[name]
        calls = self._calls[module]
        output = calls[place if len(calls) == self._names[module] else -1]
        return output[0] if isinstance(output, tuple | list) else output


@dataclass(frozen=True)
class Queries:
    """Names of the query and key projections of the last self-attention of a model, and its heads."""

    query: str
    key: str
    heads: int


def last_attention(model: nn.Module) -> Queries | None:
    """The last self-attention; its projections may be linear layers or the factors of such."""
    found = None
    for name, module in model.named_modules():
        counts = [getattr(module, key, None) for key in transformer.HEADS]
        heads = next((count for count in counts if isinstance(count, int)), 0)
        for query, key, value in transformer.PROJECTIONS:
            parts = [getattr(module, part, None) for part in (query, key, value)]
            if heads and all(isinstance(part, nn.Linear | nn.Sequential) for part in parts):
                found = Queries(f"{name}.{query}".lstrip("."), f"{name}.{key}".lstrip("."), heads)
    return found


def blocks(model: nn.Module) -> list[str]:
    """Names of the blocks of a model, in order.

    Blocks are the items of every outermost ModuleList or Sequential whose items all have layers
    inside and parameters. Without such, the layers of the longest stack of equal ones.
    """
    outer: list[str] = []
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in outer)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside and _of_blocks(module):
            outer.append(name)
            names += [f"{name}.{i}".lstrip(".") for i in range(len(module))]
    if names:
        return names
    stack = next(iter(transformer.stacks(model).items()), None)
    return [f"{stack[0]}.{i}".lstrip(".") for i in range(len(stack[1]))] if stack else []


def _of_blocks(stack: nn.ModuleList | nn.Sequential) -> bool:
    return len(stack) > 0 and all(list(item.children()) and list(item.parameters()) for item in stack)


def pairs(student: nn.Module, teacher: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """Student layer → teacher layer: as given, else block m of M learns from block ⌈m N / M⌉ of N.

    So the last learns from the last (TinyBERT's uniform mapping). Raises Fault for a name that
    isn't there, and if there are no blocks.
    """
    if given:
        for names, model, whose in ((given, student, "student"), (given.values(), teacher, "teacher")):
            known = dict(model.named_modules(remove_duplicate=False))
            if missing := [name for name in names if name not in known]:
                raise Fault(
                    f"pairs name layers that the {whose} doesn't have",
                    got=", ".join(missing),
                    expected="the name of a module, such as " + ", ".join(blocks(model) or list(known)[1:4]),
                    do="mend distill.*.pairs",
                )
        return dict(given)
    ours, theirs = blocks(student), blocks(teacher)
    if not ours or not theirs:
        raise Fault(
            "no blocks whose hidden states could be compared",
            got=f"{len(ours)} in the student, {len(theirs)} in the teacher",
            expected="a list of layers in both",
            do="name the layers in distill.*.pairs, or set hidden to 0",
        )
    return {name: theirs[-(-(m * len(theirs)) // len(ours)) - 1] for m, name in enumerate(ours, 1)}


@dataclass(frozen=True)
class Match:
    """A layer of the student and the one of the teacher it learns from, their widths, and whether they hold padding."""

    student: str
    teacher: str
    width: int
    teacher_width: int
    padded: bool


@dataclass(frozen=True)
class Plan:
    """Layers for the hidden states, and the query and key projections with the heads to compare them by."""

    hidden: tuple[Match, ...] = ()
    attention: tuple[Match, Match] | None = None
    heads: int = 0

    @property
    def matches(self) -> tuple[Match, ...]:
        return (*self.hidden, *(self.attention or ()))


def plan(student: nn.Module, teacher: nn.Module, task: Workload, params: DistillParams) -> Plan:
    """What is compared, proven on an example. Raises Fault if layers are missing or their outputs can't be compared."""
    hidden = list(pairs(student, teacher, params.pairs).items()) if params.hidden else []
    ends = [last_attention(model) for model in (student, teacher)] if params.attention else []
    if None in ends:
        raise Fault(
            "no attention maps to learn from" if ends[1] is None else "no attention maps in the student",
            got="no module with query, key and value projections and a number of heads",
            expected="a self-attention in the teacher and in the student",
            do="set distill.*.attention to 0",
        )
    ours, theirs = ends if ends else (None, None)
    attention = [(ours.query, theirs.query), (ours.key, theirs.key)] if ours and theirs else []
    matches = _matches(student, teacher, task, [*hidden, *attention])
    if not (ours and theirs):
        return Plan(tuple(matches))
    query, key = matches[-2:]
    heads = relation_heads(theirs.heads, query.width, query.teacher_width)
    return Plan(tuple(matches[:-2]), (query, key), heads)


def _matches(student: nn.Module, teacher: nn.Module, task: Workload, named: list[tuple[str, str]]) -> list[Match]:
    most = max(protocol.axes(task).values(), default=0)
    lengths = (most, max(1, most // 2)) if most else (0,)
    ours = [_shapes(student, task, [name for name, _ in named], length) for length in lengths]
    theirs = [_shapes(teacher, task, [name for _, name in named], length) for length in lengths]
    found = []
    for one, other in named:
        left, right = [shapes[one] for shapes in ours], [shapes[other] for shapes in theirs]
        if [_positions(shape) for shape in left] != [_positions(shape) for shape in right]:
            raise Fault(
                f"outputs of {one} and of the teacher's {other} can't be compared",
                got=f"{left[0]} and {right[0]}",
                expected="the same positions: all but the batch and the width",
                do="name other layers in distill.*.pairs, or set hidden to 0",
            )
        padded = left[0] != left[-1]
        if padded and [(len(shape), shape[1]) for shape in left] != [(3, length) for length in lengths]:
            raise Fault(
                f"padding in the output of {one} can't be told",
                got=" and ".join(
                    f"{s} for {n} entries of the dynamic axis" for s, n in zip(left, lengths, strict=True)
                ),
                expected="[n, entries, width]",
                do="name other layers in distill.*.pairs, or set hidden to 0",
            )
        found.append(Match(one, other, _width(left[0]), _width(right[0]), padded))
    return found


def _shapes(model: nn.Module, task: Workload, names: list[str], length: int) -> Shapes:
    inputs = protocol.example(task, 2)
    inputs = protocol.cut(task, inputs, length) if length else inputs
    with torch.no_grad(), fit.eval_mode(model), Recorder(model, names) as recorder:
        fit.forward(model, task, fit.tensors(inputs))
        return {name: tuple(recorder[name].shape) for name in names}


def rows(states: torch.Tensor) -> torch.Tensor:
    """Outputs [n, d], [n, t, d] or [n, d, …] of a layer as [n, positions, d]."""
    if states.ndim == 2:
        return states[:, None]
    return states if states.ndim == 3 else states.flatten(2).transpose(1, 2)


def _positions(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:-1] if len(shape) <= 3 else shape[2:]


def _width(shape: tuple[int, ...]) -> int:
    return shape[-1] if len(shape) <= 3 else shape[1]

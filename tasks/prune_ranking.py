"""What the granularities of pruning share: what may go, gradients for Taylor scores, and who is weakest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from tasks import device, fit
from tasks.checkpoint import Masks
from tasks.errors import Fault
from tasks.settings import PruneParams
from tasks.structure import Kept, thawed
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

PRUNABLE = (nn.modules.conv._ConvNd, nn.Linear)
BATCHES = 8


@dataclass(frozen=True)
class Layer:
    """What one layer has before and after, in the granularity's unit, and why it kept all, if it did.

    The unit: output channels (or features) that exist, weights that aren't masked, attention
    heads, or the layers of a stack.
    """

    name: str
    before: int
    after: int
    kept_because: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Cut:
    """What pruning has done so far: its layers, the masks of the weights, and the stacks cut shorter."""

    layers: list[Layer]
    masks: Masks
    structure: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A layer that may lose some of its units: a score [n] each, how many it had at the start.

    Of what is left, the number is a multiple of `multiple`.
    """

    name: str
    scores: torch.Tensor
    before: int
    multiple: int = 1


def weakest(candidates: Sequence[Candidate], ratio: float, params: PruneParams) -> list[list[int]]:
    """Units of each candidate that go, so that the share `ratio` of what there was at the start is gone.

    With scope `layer` every candidate loses that share; what is left is rounded to the nearest multiple,
    down from halfway, or up while `ratio` is short of the one asked for. With scope `global` all are
    ranked together, in blocks that keep the multiples, so that the total comes as near to the share as
    blocks allow. A candidate keeps at least its multiple; one with no more than that loses nothing, but
    what it lost before counts.
    """
    if params.scope == "global":
        return _weakest_of_all(candidates, ratio)
    gone = []
    for one in candidates:
        share = one.before * (1 - ratio) / one.multiple
        blocks = math.ceil(share - (0.5 if ratio >= params.ratio else 0) - 1e-9)
        kept = one.multiple * max(1, blocks)
        gone.append(_ascending(one.scores)[: max(0, len(one.scores) - kept)])
    return gone


def _weakest_of_all(candidates: Sequence[Candidate], ratio: float) -> list[list[int]]:
    blocks: list[tuple[float, int, list[int]]] = []
    for place, one in enumerate(candidates):
        order = _ascending(one.scores)
        first = len(order) % one.multiple or one.multiple
        cuts = [0, *range(first, len(order), one.multiple)]
        for start, end in itertools.pairwise(cuts):
            blocks.append((float(one.scores[order[start:end]].mean()), place, order[start:end]))
    there, total = sum(len(one.scores) for one in candidates), sum(one.before for one in candidates)
    left = total * ratio - (total - there)
    gone: list[list[int]] = [[] for _ in candidates]
    for _, place, block in sorted(blocks, key=lambda item: item[0]):
        if len(block) / 2 > left:
            break
        gone[place] += block
        left -= len(block)
    return gone


def _ascending(scores: torch.Tensor) -> list[int]:
    return [int(i) for i in scores.argsort(stable=True)]


def named(name: str, params: PruneParams) -> bool:
    """Whether `only` lets a layer lose something."""
    return params.only is None or any(fnmatchcase(name, glob) for glob in params.only)


def require_named(names: Sequence[str], params: PruneParams) -> None:
    """Fault if a glob of `only` names none of these."""
    require_globs(f"prune of {params.granularity}s", "only", params.only, names)


def require_globs(what: str, setting: str, globs: Sequence[str] | None, names: Sequence[str]) -> None:
    """Fault that lists the globs of a setting that match none of the names; `what` is the technique."""
    unmatched = [glob for glob in globs or () if not any(fnmatchcase(name, glob) for name in names)]
    if unmatched:
        raise Fault(
            f"{what}: {setting} names nothing",
            got=", ".join(unmatched),
            expected=f"globs that each match some of: {few(names)}",
            do=f"mend {setting}, or leave it out",
        )


def few(names: Sequence[str], most: int = 12) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "nothing"


def batches(task: Workload, train: Arrays, params: PruneParams) -> Iterator[fit.Tensors]:
    """The first batches of the training split, on the device, cut to each one's longest sample on the dynamic axis."""
    where = device.resolve(params.device)
    for start in range(0, min(BATCHES * params.batch, len(train["label"])), params.batch):
        part = {key: value[start : start + params.batch] for key, value in train.items()}
        used = protocol.lengths(task, part)
        yield fit.tensors(part if used is None else protocol.cut(task, part, int(used.max())), where)


def gradients(model: nn.Module, task: Workload, train: Arrays, params: PruneParams) -> None:
    """Add up the loss's gradients over some batches, in eval mode; a parameter without one gets zeros."""
    model.zero_grad(set_to_none=True)
    with device.placed(device.resolve(params.device), model), fit.eval_mode(model):
        for part in batches(task, train, params):
            task.loss(fit.forward(model, task, part), part["label"]).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def output_layers(model: nn.Module, task: Workload, example: fit.Tensors) -> set[nn.Module]:
    """The layers, frozen ones too, that reach an output of the model with no other layer in between."""
    made: dict[object, nn.Module] = {}

    def keep(module: nn.Module, _: object, out: torch.Tensor) -> None:
        if out.grad_fn is not None:
            made[out.grad_fn] = module

    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, PRUNABLE)]
    try:
        with torch.enable_grad(), thawed(model):
            outputs = fit.forward(
                model.eval(), task, {n: v.requires_grad_(v.is_floating_point()) for n, v in example.items()}
            )
    finally:
        for hook in hooks:
            hook.remove()
    found, todo, seen = set(), [v.grad_fn for v in outputs.values()], set()
    while todo:
        node = todo.pop()
        if node in made:
            found.add(made[node])
        elif node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return found


def starts(last: Cut | None, now: Mapping[str, int]) -> dict[str, int]:
    """How much each layer had before the first cut."""
    return {**now, **({layer.name: layer.before for layer in last.layers} if last else {})}

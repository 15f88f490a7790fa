"""Changes of a model's module tree that a checkpoint has to make again on loading, in order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Factorized:
    """A layer that was replaced by two of a lower rank."""

    name: str
    rank: int

    def apply(self, model: nn.Module) -> None:
        replace_module(model, self.name, factors(model.get_submodule(self.name), self.rank))


@dataclass(frozen=True)
class Kept:
    """A stack of layers (ModuleList or Sequential) of which only `layers` were kept, by index.

    Numbered layers are numbered anew; those with names of their own keep them.
    """

    name: str
    layers: tuple[int, ...]

    def apply(self, model: nn.Module) -> None:
        stack = model.get_submodule(self.name)
        children = list(stack._modules.values())
        names = kept_names(list(stack._modules), self.layers)
        stack._modules = {name: children[i] for name, i in zip(names, self.layers, strict=True)}


@dataclass(frozen=True)
class Tied:
    """A module whose place is taken by the one at `source`: one set of weights, used twice."""

    name: str
    source: str

    def apply(self, model: nn.Module) -> None:
        replace_module(model, self.name, model.get_submodule(self.source))


@dataclass(frozen=True)
class FakeQuantized:
    """Fake quantisers put into the model by ModelOpt; `settings` is what it restores them from."""

    settings: dict[str, Any]

    def apply(self, model: nn.Module) -> None:
        from tasks.fake_quant import restore

        restore(model, self.settings)


Change = Factorized | Kept | Tied | FakeQuantized
KINDS: dict[str, type[Change]] = {kind.__name__: kind for kind in (Factorized, Kept, Tied, FakeQuantized)}


def written(change: Change) -> dict[str, Any]:
    """A change as it stands in a checkpoint."""
    return {"kind": type(change).__name__, **asdict(change)}


def read(stored: dict[str, Any]) -> Change:
    """The change that `written` wrote; KeyError for an unknown kind."""
    return KINDS[stored["kind"]](**{key: value for key, value in stored.items() if key != "kind"})


def factors(module: nn.Module, rank: int) -> nn.Sequential:
    """Two fresh layers of a given rank in place of a linear layer, an embedding or an ungrouped convolution.

    Those of a frozen weight are frozen, and so is a frozen bias.
    """
    pair, frozen = _pair(module, rank), {name for name, p in module.named_parameters() if not p.requires_grad}
    for name, parameter in pair.named_parameters():
        parameter.requires_grad_(name.partition(".")[2] not in frozen)
    return pair


def _pair(module: nn.Module, rank: int) -> nn.Sequential:
    if isinstance(module, nn.Linear):
        return nn.Sequential(
            nn.Linear(module.in_features, rank, bias=False),
            nn.Linear(rank, module.out_features, bias=module.bias is not None),
        )
    if isinstance(module, nn.Embedding):
        return nn.Sequential(
            nn.Embedding(module.num_embeddings, rank, module.padding_idx),
            nn.Linear(rank, module.embedding_dim, bias=False),
        )
    assert isinstance(module, nn.Conv2d) and module.groups == 1
    kept: dict[str, Any] = {
        key: getattr(module, key) for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    return nn.Sequential(
        nn.Conv2d(module.in_channels, rank, bias=False, **kept),
        nn.Conv2d(rank, module.out_channels, 1, bias=module.bias is not None),
    )


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of the one at a dotted name, in the same mode."""
    parent, _, key = name.rpartition(".")
    new.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), key, new)


def kept_names(names: Sequence[str], layers: Sequence[int]) -> list[str]:
    """What the layers of a stack that stay are called after: numbers from 0 if they were, else their own names."""
    numbered = list(names) == [str(i) for i in range(len(names))]
    return [str(i) for i in range(len(layers))] if numbered else [names[i] for i in layers]


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds; a module in several places is one."""
    once: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        own = {id(p) for p in module.parameters(recurse=False)}
        shared |= own & once
        once |= own
    return shared


def remembered(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Keep what modules hold, numbers and the very parameters; what is returned puts that back in place."""
    saved = {m: {k: copy.copy(v) if isinstance(v, dict | list) else v for k, v in vars(m).items()} for m in modules}

    def restore() -> None:
        for module, values in saved.items():
            vars(module).clear()
            vars(module).update(values)

    return restore


@contextlib.contextmanager
def thawed(model: nn.Module) -> Iterator[None]:
    """Frozen parameters get gradients too, so that gradients by what they make are there; they are frozen after."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)

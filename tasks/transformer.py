"""Finds the parts of a Transformer in a model by the names that the field's libraries give them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

PROJECTIONS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
HEADS = ("num_attention_heads", "num_heads", "n_heads", "heads")


@dataclass(frozen=True)
class Attention:
    """A self-attention with separate projections; `name` is its place in the model, `heads` their number."""

    name: str
    module: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    heads: int


def attentions(model: nn.Module) -> list[Attention]:
    """Every module that holds linear query, key and value projections and a number of heads."""
    found = []
    for name, module in model.named_modules():
        heads = next((getattr(module, key) for key in HEADS if isinstance(getattr(module, key, None), int)), None)
        for names in PROJECTIONS:
            query, key, value = (getattr(module, part, None) for part in names)
            if heads and isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and isinstance(value, nn.Linear):
                found.append(Attention(name, module, query, key, value, heads))
    return found


def stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Names and layers of every ModuleList or Sequential of at least two modules of one class and shape.

    Only the outermost of nested ones; the longest first.
    """
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found) or not isinstance(
            module, nn.ModuleList | nn.Sequential
        ):
            continue
        layers = list(module)
        if len(layers) > 1 and len({_form(layer) for layer in layers}) == 1 and list(layers[0].parameters()):
            found[name] = layers
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _form(module: nn.Module) -> tuple[type, tuple[tuple[str, tuple[int, ...]], ...]]:
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())

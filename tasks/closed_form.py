"""The closed-form size of a BERT (Devlin et al. 2019, arXiv:1810.04805) beside what was counted.

The dimensions are those of the model's configuration, which compression doesn't touch: the
closed form is of the model before compression, and agrees with the counts of an uncompressed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Part:
    """One part of the model, all layers together, for one sample."""

    name: str
    parameters_formula: str
    parameters_closed_form: int
    parameters_counted: int
    multiply_adds_formula: str
    multiply_adds_closed_form: int
    multiply_adds_counted: int


@dataclass(frozen=True)
class ClosedForm:
    """The dimensions of a BERT by their letters in the formulas, and its parts.

    V words, P positions, T token types, H wide, I wide within the feed-forward, N layers, A
    heads, L tokens of the sample, C classes.
    """

    dimensions: dict[str, int]
    parts: list[Part]


Counted = tuple[str, int, int]


def closed_form(model: nn.Module, tokens: int, output: torch.Tensor, counted: Iterable[Counted]) -> ClosedForm | None:
    """The closed form for a sample of `tokens`; None if no module has the configuration of a BERT.

    `output` is the model's first, [1, C] or [1, tokens, C]; `counted` gives the name, parameters
    and multiply-adds of each layer.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((c for c in configs if getattr(c, "model_type", None) == "bert"), None)
    if config is None:
        return None
    v, p, t = config.vocab_size, config.max_position_embeddings, config.type_vocab_size
    h, i, n, length = config.hidden_size, config.intermediate_size, config.num_hidden_layers, tokens
    c, rows = output.shape[-1], output.numel() // output.shape[-1]
    forms = (
        ("embeddings", "(V + P + T + 2)·H", (v + p + t + 2) * h, "0", 0),
        (
            "attention",
            "N·4·(H² + H)",
            n * 4 * (h * h + h),
            "N·(4·L·H² + 2·L²·H)",
            n * (4 * length * h * h + 2 * length**2 * h),
        ),
        ("feed-forward", "N·(2·H·I + H + I)", n * (2 * h * i + h + i), "N·2·L·H·I", n * 2 * length * h * i),
        ("layer norms", "N·4·H", n * 4 * h, "0", 0),
        ("pooler", "H² + H", h * h + h, "H²", h * h),
        ("head", "H·C + C", h * c + c, "H·C" if rows == 1 else "L·H·C", rows * h * c),
    )
    found: dict[str, list[int]] = {}
    for name, parameters, multiply_adds in counted:
        sums = found.setdefault(_part(name), [0, 0])
        sums[0] += parameters
        sums[1] += multiply_adds
    parts = [Part(a, b, x, found[a][0], d, y, found[a][1]) for a, b, x, d, y in forms if any(found.get(a, ()))]
    letters = {"V": v, "P": p, "T": t, "H": h, "I": i, "N": n, "A": config.num_attention_heads, "L": length, "C": c}
    return ClosedForm(letters, parts)


def _part(name: str) -> str:
    path = name.split(".")
    if "encoder" not in path:
        return next((part for part in ("embeddings", "pooler") if part in path), "head")
    if "LayerNorm" in path:
        return "layer norms"
    return "attention" if "attention" in path else "feed-forward"

"""The losses of distillation. Where samples differ in length, positions of padding count for nothing.

Soft labels: Hinton et al. 2015, arXiv:1503.02531. Hidden states: FitNets, Romero et al. 2015,
arXiv:1412.6550, and TinyBERT, Jiao et al. 2020, arXiv:1909.10351. Attention maps: MiniLM, Wang et al. 2020,
arXiv:2002.10957; relation heads for models whose numbers of heads differ: MiniLMv2, arXiv:2012.15828.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import kl_div, log_softmax, softmax

Pair = tuple[torch.Tensor, torch.Tensor]
FAR = -1e9


def soft_labels(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² KL(teacher ‖ student) at temperature T of logits [n, classes], a mean over the samples.

    The T² keeps the gradients' scale (section 2 of the paper).
    """
    soft = kl_div(log_softmax(student / temperature, 1), softmax(teacher / temperature, 1), reduction="batchmean")
    return temperature**2 * soft


def hidden_states(student: torch.Tensor, teacher: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Mean squared error of states [n, positions, d]: over d, the valid positions of a sample, and the samples."""
    return mean((student - teacher).square().mean(2), valid)


def attention_maps(student: Pair, teacher: Pair, heads: int, valid: torch.Tensor | None) -> torch.Tensor:
    """KL(teacher ‖ student) of attention maps: a mean over heads, the valid queries of a sample, and the samples.

    Each pair is the outputs of the query and key projections, [n, t, d]; d may differ between the two.
    """
    log_p, log_q = relations(*teacher, heads, valid), relations(*student, heads, valid)
    return mean((log_p.exp() * (log_p - log_q)).sum(3).mean(1), valid)


def relations(query: torch.Tensor, key: torch.Tensor, heads: int, valid: torch.Tensor | None) -> torch.Tensor:
    """log softmax(q kᵀ / √(d / heads)) [n, heads, t, t] of [n, t, d]; keys that are padding get none of it."""
    n, t, d = query.shape
    q, k = (x.reshape(n, t, heads, d // heads).transpose(1, 2) for x in (query, key))
    scores = q @ k.transpose(2, 3) / math.sqrt(d // heads)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], FAR)
    return log_softmax(scores, 3)


def relation_heads(heads: int, *widths: int) -> int:
    """The most heads, up to `heads`, that all widths can be split into."""
    common = math.gcd(*widths)
    return next(h for h in range(min(heads, common), 0, -1) if common % h == 0)


def mean(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Mean over the valid positions of each sample, then over the samples, of values [n, positions]."""
    if valid is None:
        return values.mean()
    return ((values * valid).sum(1) / valid.sum(1)).mean()

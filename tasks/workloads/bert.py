"""Bert: a BERT-base on the review sentences, at up to 128 tokens.

The size of BERT-base (Devlin et al. 2019, arXiv:1810.04805: 12 layers, width 768, 12 heads), for what
engines make of it: trained from scratch on the sentences of reviews.py, but for the word embeddings, which are
MiniLM's, turned to width 768 and frozen. No weights of BERT-base's own are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.errors import Fault
from tasks.workloads import reviews

if TYPE_CHECKING:
    import torch

NAME = "bert"
PREPROCESSING = "reviews-minilm-128-v1"
AXES = {"tokens": 128}
INPUTS, OUTPUTS, METRICS = reviews.INPUTS, reviews.OUTPUTS, reviews.METRICS
lengths, loss = reviews.lengths, reviews.loss
HEAD, ATTENTION = 64, ("sdpa", "eager")


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Token ids and masks [n, 128] int64, labels [n] (1 is positive), and the ids' own bytes as keys."""
    return reviews.encoded(AXES["tokens"])


def model(
    layers: int = 12, width: int = 768, inner: int | None = None, attention: str = "sdpa", **unknown: Any
) -> torch.nn.Module:
    """Inputs [n, tokens] to logits [n, 2]: `layers` of `width`, with heads of 64 and `inner` (4 · `width`) features.

    `attention` is how PyTorch computes it: `sdpa`, in one operator, or `eager`, in several.
    """
    sizes = (layers, width, 4 * width if inner is None else inner)
    bad = any(type(size) is not int or size < 1 for size in sizes) or width % HEAD or attention not in ATTENTION
    if unknown or bad:
        raise Fault(
            "bert has no such model",
            got={"layers": layers, "width": width, "inner": inner, "attention": attention, **unknown},
            expected=f"layers: and inner: whole numbers from 1, width: a multiple of {HEAD}, "
            f"attention: {' or '.join(ATTENTION)}",
            do="mend `model:` or `student:`",
        )
    made = reviews.classifier(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // HEAD,
        intermediate_size=sizes[2],
        attn_implementation=attention,
    )
    reviews.embed(made.net.bert.embeddings.word_embeddings, width)
    return made

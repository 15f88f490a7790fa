"""A text workload that carries its own oracle: which of two words is more frequent.

A tiny BERT of four layers on a dynamic axis; the answer is known exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

NAME = "text"
PREPROCESSING = "text-v1"
AXES = {"tokens": 12}
INPUTS = {"input_ids": ("int64", ("tokens",)), "attention_mask": ("int64", ("tokens",))}
OUTPUTS = ("logits",)


def oracle(ids: np.ndarray) -> np.ndarray:
    """1 where token 4 is more frequent than token 5 in ids [n, tokens], else 0."""
    return ((ids == 4).sum(1) > (ids == 5).sum(1)).astype(np.int64)


def accuracy(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    return (outputs["logits"].argmax(axis=1) == labels).astype(np.float64)


METRICS = {"accuracy": accuracy}


def lengths(inputs: dict[str, np.ndarray]) -> np.ndarray:
    return inputs["attention_mask"].sum(1)


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    rng = np.random.default_rng(seed)
    n, most = 1200, AXES["tokens"]
    used = rng.integers(3, most + 1, n)
    mask = (np.arange(most) < used[:, None]).astype(np.int64)
    ids = np.where(mask == 1, rng.integers(3, 9, (n, most)), 0).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask, "label": oracle(ids)}, [row.tobytes().hex() for row in ids]


def model(layers: int = 4, width: int = 32, **_: Any) -> torch.nn.Module:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    class Text(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=16,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                intermediate_size=2 * width,
                max_position_embeddings=16,
                attn_implementation="eager",
            )
            self.net = BertForSequenceClassification(config)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            bias = (1.0 - attention_mask[:, None, None, :].float()) * -1e4
            return self.net(input_ids=input_ids, attention_mask=bias, token_type_ids=torch.zeros_like(input_ids)).logits

    return Text()


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], labels)

"""The tiny text workload with an LSTM for a student: `kind: lstm`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).parent))
from text import (  # noqa: F401
    AXES,
    INPUTS,
    METRICS,
    NAME,
    OUTPUTS,
    PREPROCESSING,
    accuracy,
    lengths,
    loss,
    oracle,
    samples,
)
from text import model as bert


def model(kind: str = "bert", width: int = 32, **others: Any) -> torch.nn.Module:
    import torch
    from torch import nn

    class Lstm(nn.Module):
        """Both directions; the backward one reads the valid part reversed, so that padding changes nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, width)
            self.ahead = nn.LSTM(width, width, batch_first=True)
            self.back = nn.LSTM(width, width, batch_first=True)
            self.head = nn.Linear(2 * width, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids)
            last = attention_mask.sum(1, keepdim=True) - 1
            turned = (last - torch.arange(input_ids.shape[1], device=x.device)).clamp(min=0)
            y, _ = self.ahead(x)
            z, _ = self.back(x.gather(1, turned[:, :, None].expand(-1, -1, x.shape[2])))
            mask = attention_mask[:, :, None].to(x.dtype)
            return self.head((torch.cat([y, z], 2) * mask).sum(1) / mask.sum(1))

    return Lstm() if kind == "lstm" else bert(width=width, **others)

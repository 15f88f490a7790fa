"""The tiny model: a residual block, batch norm, dropout, and a linear head."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class Tiny(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block = Residual(width)
        self.pool = nn.AvgPool2d(4)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width * 4, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.pool(self.block(self.stem(image))).flatten(1)))

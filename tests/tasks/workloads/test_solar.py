"""The solar workload: ResNets of every size on bytes of one channel; the images only where they were fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.errors import Fault
from tasks.workloads import solar
from tasks.workloads.protocol import example


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 1, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_the_whole_model_is_resnet_50() -> None:
    model = solar.model()
    head = 2048 * 2 + 2
    # 25,557,032 parameters with 1,000 classes (He et al. 2016), of which the classifier has 2,049,000.
    assert sum(p.numel() for p in model.parameters()) - head == 25_557_032 - 2_049_000
    main = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and "shortcut" not in n]
    assert len(main) + 1 == 50
    shapes = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(example(solar, 1)["image"]))  # type: ignore[arg-type]
    assert shapes == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)] and out.shape == (1, 2)


@pytest.mark.parametrize(("depth", "width", "stem"), [(14, 0.125, 8), (26, 0.5, 32), (26, 0.3, 16), (38, 1, 64)])
def test_students_have_their_depth_and_a_width_of_eights(depth: int, width: float, stem: int) -> None:
    model = solar.model(depth=depth, width=width)
    main = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and "shortcut" not in n]
    assert len(main) + 1 == depth
    assert main[0].out_channels == stem and all(m.out_channels % 8 == 0 for m in main)


def test_bytes_become_three_normalised_channels(images: torch.Tensor) -> None:
    model = solar.model(depth=14, width=0.125).eval()
    seen: list[torch.Tensor] = []
    model.stem.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(images)
    for channel, (mean, deviation) in enumerate(zip(solar.MEAN, solar.DEVIATION, strict=True)):
        expected = (images[:, 0].double() / 255 - mean) / deviation
        torch.testing.assert_close(seen[0][:, channel].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_model_in_half_precision_takes_the_same_bytes(images: torch.Tensor) -> None:
    model = solar.model(depth=14, width=0.125).eval()
    with torch.inference_mode():
        exact, half = model(images), model.half()(images)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("keywords", [{"depth": 18}, {"depth": 50.0}, {"width": 0}, {"width": True}, {"layers": 2}])
def test_unknown_models_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(Fault, match="solar has no such model"):
        solar.model(**keywords)


def test_other_images_are_refused_with_their_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    monkeypatch.setattr(solar, "ARCHIVE", other)
    with pytest.raises(Fault, match=r"make elpv.*CC BY-NC-SA"):
        solar.samples(0)
    other.write_bytes(b"something else")
    with pytest.raises(Fault, match="sha256"):
        solar.samples(0)


@pytest.mark.skipif(not solar.ARCHIVE.is_file(), reason="the images are fetched by `make elpv` only")
def test_images_are_those_of_the_archive() -> None:
    arrays, keys = solar.samples(0)
    dtype, shape = solar.INPUTS["image"]
    assert arrays["image"].shape == (2624, *shape) and arrays["image"].dtype == np.dtype(dtype)
    assert len(set(keys)) == 2624
    assert np.bincount(arrays["label"]).tolist() == [1803, 821]
    assert 40 < arrays["image"].mean() < 200 and arrays["image"].std() > 20

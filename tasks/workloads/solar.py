"""Solar: defects of solar cells in electroluminescence images, with a ResNet-50 at 224×224.

The images are ELPV's (Deitsch et al. 2019, arXiv:1807.02894): 2,624 grey ones of 300×300, with the probability of a
defect in four levels. From 0.5 on a cell counts as defective. They are CC BY-NC-SA 4.0, for non-commercial use only,
so that set-up fetches them only when asked to. The model is ResNet-50 (He et al. 2016, arXiv:1512.03385) with the
stride in the 3×3 convolution, trained from scratch.

The input is the camera's own: one grey byte a pixel, a twelfth of three channels of FP32, so that a batch crosses
to a GPU quickly and the splits stay small. Conversion, normalisation and the second and third channel are in the model.
"""

from __future__ import annotations

import csv
import hashlib
import io
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.errors import Fault

if TYPE_CHECKING:
    import torch

NAME = "solar"
PREPROCESSING = "solar-grey-224-v1"
SIZE = 224
INPUTS = {"image": ("uint8", (1, SIZE, SIZE))}
OUTPUTS = ("logits",)

ARCHIVE = Path(sys.prefix) / "share" / "enginesmith" / "elpv_dataset-1.0.0.post1-py3-none-any.whl"
ARCHIVE_SHA256 = "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c"
FOLDER, DEFECTIVE = "elpv_dataset/data", 0.5
# Blocks of the four stages, by the number of layers with weights.
STAGES = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 38: (2, 3, 5, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def accuracy(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    """1.0 for each sample whose larger logit [n, 2] is at its label [n], else 0.0."""
    return (outputs["logits"].argmax(axis=1) == labels).astype(np.float64)


METRICS = {"accuracy": accuracy}


def samples(seed: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Images [2624, 1, 224, 224] uint8, labels (1 is defective), and digests of the full images as keys.

    Fault if the images aren't here, or are others.
    """
    from PIL import Image

    _check_archive()
    images, labels, keys = [], [], []
    with zipfile.ZipFile(ARCHIVE) as archive:
        for row in csv.reader(io.StringIO(archive.read(f"{FOLDER}/labels.csv").decode()), delimiter=" "):
            name, probability = [word for word in row if word][:2]
            with Image.open(io.BytesIO(archive.read(f"{FOLDER}/{name}"))) as image:
                keys.append(hashlib.sha256(np.asarray(image).tobytes()).hexdigest())
                images.append(np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)))
            labels.append(float(probability) >= DEFECTIVE)
    return {"image": np.stack(images)[:, None], "label": np.array(labels, dtype=np.int64)}, keys


def _check_archive() -> None:
    if not ARCHIVE.is_file():
        found = "no such file"
    else:
        with ARCHIVE.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != ARCHIVE_SHA256:
        raise Fault(
            f"the solar cells' images are not at {ARCHIVE}",
            got=found,
            expected=f"the wheel of elpv-dataset 1.0.0.post1, sha256 {ARCHIVE_SHA256}",
            do="run `make elpv`, if you may use them: CC BY-NC-SA 4.0",
        )


def model(depth: int = 50, width: float = 1.0, **unknown: Any) -> torch.nn.Module:
    """A ResNet of `depth` layers, `width` times as wide in multiples of 8; [n, 1, 224, 224] to logits [n, 2]."""
    if unknown or type(depth) is not int or depth not in STAGES or not _is_width(width):
        raise Fault(
            "solar has no such model",
            got={"depth": depth, "width": width, **unknown},
            expected=f"depth: one of {', '.join(map(str, STAGES))}, and width: a number from 0.125 to 2",
            do="mend `model:` or `student:`",
        )
    return _resnet(STAGES[depth], *(max(8, 8 * round(64 * 2**i * width / 8)) for i in range(4)))


def _is_width(width: object) -> bool:
    return isinstance(width, int | float) and not isinstance(width, bool) and 0.125 <= width <= 2


def _resnet(blocks: tuple[int, ...], *widths: int) -> torch.nn.Module:
    """Defined inside a function, so that steps that need no model don't load PyTorch."""
    import torch
    from torch import nn

    def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        return [conv, nn.BatchNorm2d(outputs)]

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = convolution(inputs, width, 1)
            self.conv2, self.bn2 = convolution(width, width, 3, stride)
            self.conv3, self.bn3 = convolution(width, 4 * width, 1)
            # A block starts as the identity: Goyal et al. 2017, arXiv:1706.02677, section 5.1.
            nn.init.zeros_(self.bn3.weight)  # type: ignore[arg-type]
            self.shortcut: nn.Module = nn.Identity()
            if stride != 1 or inputs != 4 * width:
                self.shortcut = nn.Sequential(*convolution(inputs, 4 * width, 1, stride))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            y = torch.relu(self.bn2(self.conv2(y)))
            return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))

    class ResNet(nn.Module):
        scale: torch.Tensor
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
            self.register_buffer("scale", 1 / (255 * deviation))
            self.register_buffer("shift", -mean / deviation)
            self.stem = nn.Sequential(*convolution(3, widths[0], 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
            inputs = [widths[0], *(4 * width for width in widths)]
            self.stages = nn.Sequential(
                *(
                    nn.Sequential(
                        *(
                            Bottleneck(4 * width if block else inputs[i], width, 2 if i and not block else 1)
                            for block in range(number)
                        )
                    )
                    for i, (number, width) in enumerate(zip(blocks, widths, strict=True))
                )
            )
            self.head = nn.Linear(4 * widths[-1], 2)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            # One channel times three factors makes three channels.
            x = image.to(self.scale.dtype) * self.scale + self.shift
            return self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))

    return ResNet()


def loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [n, 2] against labels [n]."""
    import torch

    return torch.nn.functional.cross_entropy(outputs["logits"], labels)

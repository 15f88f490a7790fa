"""Peaks of GPUs by their datasheets, for a predicted bound where the GPU isn't at hand. Dense rates, never sparse ones.

Where a datasheet tells rates with structured sparsity only, the dense rate is half of it, which `halved` says. Where it
tells several for a format, by what accumulates, it is the highest, since a bound has to hold for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LABEL = "predicted, datasheet"


@dataclass(frozen=True)
class Datasheet:
    """`tera` by format: 10¹² operations a second, a multiply-add being two. A format that isn't there, the source
    doesn't tell, or the GPU doesn't have. `gb_per_s` is memory bandwidth, `gb` memory, `watts` the board's or module's
    limit. `source` names NVIDIA's document; `seen` is a public page that numbers of it were held against.
    """

    name: str
    tera: Mapping[str, float]
    gb_per_s: float
    gb: float
    watts: float
    source: str
    seen: str
    halved: bool = False

    @property
    def flops_per_s(self) -> dict[str, float]:
        """Operations a second by format."""
        return {name: rate * 1e12 for name, rate in self.tera.items()}

    @property
    def bytes_per_s(self) -> float:
        """Bytes of memory a second."""
        return self.gb_per_s * 1e9


def _tensor(fp32: float, tf32: float, half: float, int8: float, fp8: float | None = None) -> dict[str, float]:
    rates = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half, "int8": int8}
    return rates if fp8 is None else {**rates, "fp8": fp8}


KLOCKWOOD = "https://glennklockwood.com/garden/processors"
HOPPER = _tensor(67, 494.5, 989.5, 1979, 1979)
SHEETS = (
    Datasheet(
        "T4",
        {"fp32": 8.1, "fp16": 65, "int8": 130},
        320,
        16,
        70,
        "NVIDIA T4 Tensor Core GPU, datasheet, 2019; 320 GB/s by the Turing whitepaper, 2018",
        "https://networkoutlet.com/blogs/articles/nvidia-tesla-t4-16gb-gpu-specs-performance-use-cases",
    ),
    Datasheet(
        "L4",
        _tensor(30.3, 60, 121, 242.5, 242.5),
        300,
        24,
        72,
        "NVIDIA L4 Tensor Core GPU, datasheet, 2023",
        "https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
        halved=True,
    ),
    Datasheet(
        "A10",
        _tensor(31.2, 62.5, 125, 250),
        600,
        24,
        150,
        "NVIDIA A10 Tensor Core GPU, datasheet, 2021",
        "https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/",
    ),
    Datasheet(
        "A100 SXM 40 GB",
        _tensor(19.5, 156, 312, 624),
        1555,
        40,
        400,
        "NVIDIA A100 Tensor Core GPU Architecture, whitepaper, 2020",
        f"{KLOCKWOOD}/A100",
    ),
    Datasheet(
        "A100 SXM 80 GB",
        _tensor(19.5, 156, 312, 624),
        2039,
        80,
        400,
        "NVIDIA A100 Tensor Core GPU, datasheet, 2021",
        f"{KLOCKWOOD}/A100",
    ),
    Datasheet(
        "H100 PCIe",
        _tensor(51, 378, 756.5, 1513, 1513),
        2000,
        80,
        350,
        "NVIDIA H100 Tensor Core GPU, datasheet, 2023",
        "https://io.net/p/faq-what-is-the-difference-between-h100-sxm-and-pcie",
        halved=True,
    ),
    Datasheet(
        "H100 SXM",
        HOPPER,
        3350,
        80,
        700,
        "NVIDIA H100 Tensor Core GPU, datasheet, 2023",
        f"{KLOCKWOOD}/h100",
        halved=True,
    ),
    Datasheet(
        "H200 SXM",
        HOPPER,
        4800,
        141,
        700,
        "NVIDIA H200 Tensor Core GPU, datasheet, 2024",
        "https://lzwjava.github.io/nvidia-h200-gpu-specs-en",
        halved=True,
    ),
    Datasheet(
        "Jetson AGX Orin 64 GB",
        {"fp32": 5.3, "int8": 85},
        204.8,
        64,
        60,
        "NVIDIA Jetson AGX Orin Series, technical brief v1.2, 2022; the GPU without its accelerators",
        "http://mzph.cn/web/30785.shtml",
        halved=True,
    ),
    Datasheet(
        "Jetson Orin Nano 8 GB",
        {"fp16": 10, "int8": 20},
        68,
        8,
        15,
        "NVIDIA Jetson Orin Nano Series, datasheet, 2023; before its mode of 25 W",
        "https://www.brojogopalsapui.com/ai-foundations/sub_contents/AI_hardware/jetson_orin_nano_light.html",
        halved=True,
    ),
    Datasheet(
        "RTX 3090",
        {"fp32": 35.6, "tf32": 35.6, "fp16": 142, "bf16": 71, "int8": 284},
        936,
        24,
        350,
        "NVIDIA Ampere GA102 GPU Architecture, whitepaper v2, 2021, appendix A",
        "https://docslib.org/doc/759549/nvidia-ampere-ga102-gpu-architecture-whitepaper",
    ),
    Datasheet(
        "RTX 4090",
        {"fp32": 82.6, "tf32": 82.6, "fp16": 330.3, "bf16": 165.2, "int8": 660.6, "fp8": 660.6},
        1008,
        24,
        450,
        "NVIDIA Ada GPU Architecture, whitepaper v2, 2023, appendix A",
        "https://waredb.com/processor/nvidia-geforce-rtx-4090",
    ),
    Datasheet(
        "RTX 5090",
        {"fp32": 104.8, "tf32": 104.8, "fp16": 419, "bf16": 209.5, "int8": 838, "fp8": 838},
        1792,
        32,
        575,
        "NVIDIA RTX Blackwell GPU Architecture, whitepaper, 2025, appendix A",
        "https://www.tomshardware.com/pc-components/gpus/"
        "nvidia-geforce-rtx-5090-versus-rtx-4090-how-does-the-new-halo-gpu-compare-with-its-predecessor",
    ),
)

"""The datasheets: dense rates, sources, and that they stay predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.datasheets import SHEETS, Datasheet
from tasks.layers import PRECISIONS

FORMATS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
ASKED = (
    "T4", "L4", "A10", "A100 SXM 40 GB", "A100 SXM 80 GB", "H100 SXM", "H100 PCIe", "H200 SXM",
    "Jetson AGX Orin 64 GB", "Jetson Orin Nano 8 GB", "RTX 3090", "RTX 4090", "RTX 5090",
)  # fmt: skip


def test_every_device_is_there_once_with_its_sources() -> None:
    assert sorted(sheet.name for sheet in SHEETS) == sorted(ASKED)
    for sheet in SHEETS:
        assert sheet.source.startswith("NVIDIA ") and sheet.seen.startswith("http")
        assert set(sheet.tera) <= set(PRECISIONS) and all(rate > 0 for rate in sheet.tera.values())


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_fewer_bits_are_no_slower(sheet: Datasheet) -> None:
    """Dense rates double with each halving of a format; a sparse one among them would stand out."""
    for wide, narrow in (("fp32", "tf32"), ("tf32", "fp16"), ("fp16", "int8"), ("fp16", "fp8")):
        if wide in sheet.tera and narrow in sheet.tera:
            assert sheet.tera[wide] <= sheet.tera[narrow], (wide, narrow)
    if "int8" in sheet.tera and "fp16" in sheet.tera:
        assert sheet.tera["int8"] == pytest.approx(2 * sheet.tera["fp16"], rel=0.01)


def test_units() -> None:
    sheet = next(sheet for sheet in SHEETS if sheet.name == "A100 SXM 40 GB")
    assert sheet.flops_per_s["fp16"] == 312e12 and sheet.bytes_per_s == 1555e9


def test_the_docs_have_the_same_numbers() -> None:
    rows = {}
    for line in (Path(__file__).resolve().parents[2] / "docs" / "roofline.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    for sheet in SHEETS:
        rates = [f"{sheet.tera[name]:g}" if name in sheet.tera else "–" for name in FORMATS]
        assert rows[sheet.name][:9] == [*rates, f"{sheet.gb_per_s:g}", f"{sheet.gb:g}", f"{sheet.watts:g}"]
        assert rows[sheet.name][9] == sheet.source

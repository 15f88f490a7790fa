"""A file in another runtime's style is told that it will be slow, one in its own is not."""

from __future__ import annotations

import pytest

from tasks.styles import slow_for

INT8 = {"precision": "int8", "activations": "static"}


@pytest.mark.parametrize(
    ("backend", "device", "notes"),
    [
        ("onnxruntime", "cpu", {"precision": "fp32"}),
        ("onnxruntime", "cpu", {**INT8, "style": "onnxruntime"}),
        ("onnxruntime", "cpu", {"precision": "int8", "style": "onnxruntime", "activations": "dynamic"}),
        ("onnxruntime", "cpu", {"precision": "int4"}),
        ("onnxruntime", "cuda", {"precision": "fp16"}),
        ("tensorrt", "cuda", {**INT8, "style": "tensorrt"}),
        ("tensorrt_rtx", "cuda", {"precision": "fp8", "style": "tensorrt"}),
        ("eager", "cpu", {}),
        ("onnxruntime", "cpu", {}),
    ],
)
def test_a_file_in_its_runtimes_style_is_fine(backend: str, device: str, notes: dict[str, str]) -> None:
    assert slow_for(backend, device, notes) is None


@pytest.mark.parametrize(
    ("backend", "device", "notes", "words"),
    [
        ("onnxruntime", "cpu", {**INT8, "style": "tensorrt"}, "style: onnxruntime"),
        ("onnxruntime", "cuda", {**INT8, "style": "tensorrt"}, "CUDA provider has no INT8"),
        ("onnxruntime", "cuda", {**INT8, "activations": "dynamic"}, "unsigned activations"),
        ("onnxruntime", "cpu", {"precision": "fp16"}, "no FP16 arithmetic"),
        ("onnxruntime", "cpu", {"precision": "fp8"}, "optimization: basic"),
        ("tensorrt", "cuda", {**INT8, "style": "onnxruntime"}, "zero points"),
        ("tensorrt_rtx", "cuda", {"precision": "int8", "activations": "dynamic"}, "MatMulInteger"),
    ],
)
def test_a_file_in_anothers_style_is_told(backend: str, device: str, notes: dict[str, str], words: str) -> None:
    assert words in (slow_for(backend, device, notes) or "")

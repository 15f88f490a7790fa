"""Which runtime a quantised file was made for, and what to expect of it in another."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.errors import Fault

TENSORRT = ("tensorrt", "tensorrt_rtx")


def slow_for(backend: str, device: str, notes: Mapping[str, str]) -> str | None:
    """Why a file will be slow, or not run, in a backend on a device (cpu or cuda), in a sentence; None if it fits.

    `notes` are the file's metadata: its precision, and the style and activations of an INT8 file.
    """
    precision, style = notes.get("precision", "fp32"), notes.get("style")
    dynamic = notes.get("activations") == "dynamic"
    if backend in TENSORRT:
        if precision == "int8" and dynamic:
            return "its products are MatMulInteger, which TensorRT doesn't read"
        if precision == "int8" and style == "onnxruntime":
            return "its activations are unsigned with zero points, which TensorRT refuses"
        return None
    if backend != "onnxruntime":
        return None
    if device == "cuda":
        if dynamic:
            return "its integer products take unsigned activations, which ONNX Runtime's CUDA provider doesn't"
        if precision in ("int8", "fp8"):
            return (
                f"ONNX Runtime's CUDA provider has no {precision.upper()} convolutions or products: Q/DQ nodes only "
                "add work to floating point"
            )
        return None
    if precision == "int8" and style == "tensorrt":
        return (
            "its Q/DQ nodes are placed for TensorRT, with signed activations and floating-point weights: ONNX Runtime "
            "on a CPU is fast with style: onnxruntime"
        )
    if precision == "fp8":
        return (
            "ONNX Runtime has no FP8 arithmetic on a CPU; from optimization: extended on it makes integer operators "
            "of FP8 values and fails: build with optimization: basic, to check the file only"
        )
    if precision in ("fp16", "bf16"):
        return f"ONNX Runtime has no {precision.upper()} arithmetic on a CPU: values are cast to FP32 and back at nodes"
    return None


def asked(precision: str, device: str, notes: Mapping[str, str], name: str) -> str:
    """The precision that a build asks of an ONNX file: what the file's notes say, or TF32 for one in FP32 on CUDA.

    Raises Fault for any other `precision` of the build (fp32 is none), naming the file's folder.
    """
    given = notes.get("precision", "as the model")
    if precision == "fp32":
        return given
    if (precision, device) == ("tf32", "cuda") and given in ("fp32", "as the model"):
        return "tf32"
    raise Fault(
        f"the precision of an engine of the ONNX file {name} is the file's",
        got=f"precision {precision} on {device} for a file in {given}",
        expected="no precision; or tf32 on cuda, for a file in fp32",
        do="leave precision out; quantize makes files in other formats",
    )

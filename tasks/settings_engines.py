"""Settings of the steps from ONNX on: the numeric format, and the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tasks.settings_types import Fraction, Number, Positive, Settings, Step, Whole

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]


class SearchParams(Settings):
    """Automatic mixed precision: which layers stay in floating point until an accuracy budget holds.

    `budget` is the largest loss of `metric` on the validation split, in shares of 1. Layers are ranked by
    a sweep: quantise `one` at a time, or `all_but_one`, against the parent's outputs.
    """

    budget: Fraction = 0.005
    metric: str = "accuracy"
    sweep: Literal["one", "all_but_one"] = "one"
    samples: Positive = 64


class QuantizeParams(Step):
    """A numeric format, explicit in the ONNX file.

    `int8` and `fp8`: weights and activations, with Q/DQ nodes; `int4`: weights only, in blocks of
    `block` values; `fp16` and `bf16`: ModelOpt AutoCast, which keeps in FP32 what would overflow
    (`data_max`, `init_max`). `style` names who will run an INT8 file: `onnxruntime` (unsigned
    activations, signed per-channel weights, reduced range) or `tensorrt` (symmetric, signed,
    no quantised bias); other formats have one style only. With `activations: dynamic` the runtime finds
    the activations' ranges batch by batch, and there is no calibration: the way of transformers on a CPU.
    `calibration` is `entropy` for `int8` and `minmax` for `fp8` if it isn't given: FP8's steps are the finer, the
    smaller a value is, so that cutting off large ones gains little.
    `keep` holds patterns of names of nodes, and `keep_ops` types of operators, that stay as they are.
    """

    format: Literal["int8", "fp8", "int4", "fp16", "bf16"] = "int8"
    activations: Literal["static", "dynamic"] = "static"
    style: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    calibration: Literal["minmax", "entropy", "percentile", "mse"] = "entropy"
    samples: Positive = 256
    batch: Positive = 32
    percentile: Annotated[Number, Field(gt=50, le=100)] = 99.99
    keep: tuple[str, ...] = ()
    keep_ops: tuple[str, ...] = ()
    block: Positive = 128
    data_max: Annotated[Number, Field(gt=0)] = 512.0
    init_max: Annotated[Number, Field(gt=0)] = 65504.0
    search: SearchParams | None = None

    @model_validator(mode="before")
    @classmethod
    def _calibration_of_the_format(cls, raw: Any) -> Any:
        return {"calibration": "minmax", **raw} if isinstance(raw, dict) and raw.get("format") == "fp8" else raw


class BuildParams(Step):
    """One engine. Settings that a backend has no use for are refused; `USED_BY` says which.

    `precision` is asked of `eager` and `inductor`, which start from PyTorch; for the others it is in the
    ONNX file, but that they take `tf32` for a file in FP32 on CUDA. `opt_batch` is what TensorRT
    tunes for (8 if it isn't given, or `max_batch` if that is less), `opt_length` the same along its dynamic axes (the
    largest size if it isn't given).
    `workspace_mib` bounds TensorRT's scratch memory; `level` is its builder optimisation level.
    """

    backend: Literal["eager", "onnxruntime", "inductor", "tensorrt", "tensorrt_rtx"]
    device: Device = "cpu"
    threads: Positive = 1
    max_batch: Positive = 64
    opt_batch: Positive | None = None
    opt_length: Positive | None = None
    precision: Precision = "fp32"
    channels_last: bool = False
    cuda_graph: bool = False
    optimization: Literal["disabled", "basic", "extended", "all"] = "all"
    compute_capabilities: Annotated[
        tuple[Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"], ...], Field(min_length=1)
    ] = ("8.6", "8.9")
    workspace_mib: Positive | None = None
    level: Annotated[Whole, Field(ge=0, le=5)] | None = None
    sparse: bool = False
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False

    @property
    def where(self) -> str:
        """The device that the engine is for: TensorRT's are for CUDA whatever `device` says."""
        return "cuda" if self.backend in TENSORRT else self.device


TENSORRT = ("tensorrt", "tensorrt_rtx")
EVERYWHERE = {"parent", "backend", "max_batch"}
USED_BY: dict[str, set[str]] = {
    "eager": EVERYWHERE | {"device", "threads", "precision", "channels_last", "cuda_graph", "sparse"},
    "inductor": EVERYWHERE | {"device", "threads", "precision", "channels_last", "cuda_graph", "sparse", "opt_batch"},
    "onnxruntime": EVERYWHERE | {"device", "threads", "optimization", "cuda_graph", "precision", "channels_last"},
    "tensorrt": EVERYWHERE
    | {"opt_batch", "opt_length", "workspace_mib", "level", "sparse", "refit"}
    | {"version_compatible", "hardware_compatible"}
    | {"cuda_graph", "precision"},
    "tensorrt_rtx": EVERYWHERE
    | {"opt_batch", "opt_length", "workspace_mib", "sparse", "refit", "compute_capabilities"}
    | {"cuda_graph", "precision"},
}

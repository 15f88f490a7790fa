"""What a PyTorch model is turned into before it runs: its arithmetic, its layout, and the flags it runs under.

Reduced precision: weights and inputs in FP16 or BF16. INT8 and FP8: linear layers with activations that are quantised
as they come (torchao, https://docs.pytorch.org/ao/stable/). 2:4: PyTorch's semi-structured weights
(https://docs.pytorch.org/docs/stable/sparse.html#sparse-semi-structured-docs). Outputs are FP32 whatever it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from tasks.engines.torch_weights import NAMES, quantize, sparsify
from tasks.errors import Fault, Unavailable
from tasks.exported import by_name
from tasks.settings import BuildParams

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
QUANTIZED = ("int8", "fp8")
# Least compute capability: FP8 in tensor cores since Ada, 2:4 since Ampere (CUDA C++ Programming Guide, appendix).
NEEDS = {"fp8": (8, 9), "sparse": (8, 0), "bf16": (8, 0), "tf32": (8, 0)}
TORCHAO = "torchao"


def settings(spec: BuildParams) -> dict[str, Any]:
    """What opening an engine of PyTorch's has to obey."""
    return {key: getattr(spec, key) for key in ("precision", "channels_last", "cuda_graph", "sparse")}


def require(device: str, wanted: Mapping[str, Any]) -> None:
    """Raise Unavailable, in one line, if this machine or this PyTorch can't run what `settings` ask for."""
    precision = wanted["precision"]
    if device == "cuda":
        if not torch.cuda.is_available():
            built = "sees no GPU" if torch.version.cuda else "is built for the CPU only"
            raise Unavailable(f"device: cuda needs an NVIDIA GPU: PyTorch {torch.__version__} {built}")
        here = torch.cuda.get_device_capability()
        for key in (precision, *(["sparse"] if wanted["sparse"] else [])):
            if here < NEEDS.get(key, (0, 0)):
                least = ".".join(map(str, NEEDS[key]))
                raise Unavailable(f"{key} needs compute capability {least}, this GPU has {'.'.join(map(str, here))}")
    elif precision in ("fp8", "tf32") or wanted["sparse"]:
        raise Unavailable(f"{'2:4 sparsity' if wanted['sparse'] else precision} needs device: cuda")
    if precision in QUANTIZED:
        torchao_version(precision)


def torchao_version(precision: str) -> str:
    """The version of torchao here; Unavailable with the line that installs it."""
    try:
        return version(TORCHAO)
    except PackageNotFoundError:
        raise Unavailable(f"{precision} in PyTorch needs torchao: pip install torchao") from None


def backend_version(wanted: Mapping[str, Any]) -> str:
    """PyTorch's version, and torchao's if `settings` need it."""
    extra = f" torchao {torchao_version(wanted['precision'])}" if wanted["precision"] in QUANTIZED else ""
    return torch.__version__ + extra


@contextlib.contextmanager
def flags(device: str, precision: str, threads: int) -> Iterator[None]:
    """PyTorch's global flags as an engine needs them, for a while: threads, TF32, cuDNN's search for the best kernel.

    FP32 means FP32: TF32 is off, also in convolutions, where PyTorch has it on. So are the
    deterministic kernels that training asks for.
    """
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic:
        torch.use_deterministic_algorithms(False)
    try:
        with _cuda_flags(precision == "tf32") if device == "cuda" else contextlib.nullcontext():
            yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=warn)
        if before != threads:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _cuda_flags(tf32: bool) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before, exact = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark), matmul.fp32_precision
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = tf32, tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
        matmul.fp32_precision = exact  # "none" and "ieee" are the same arithmetic, and not the same key of a cache.


def dtype_of(device: str, precision: str) -> torch.dtype:
    """What weights and activations are held in; around INT8 and FP8 products that is BF16 on a GPU."""
    if precision in QUANTIZED:
        return torch.bfloat16 if device == "cuda" else torch.float32
    return HALVES.get(precision, torch.float32)


def place(model: nn.Module, device: str, wanted: Mapping[str, Any]) -> nn.Module:
    """A model on its device in its form, in place: type, layout, quantised or sparse linear layers."""
    model.requires_grad_(False).eval().to(device, dtype_of(device, wanted["precision"]))
    if wanted["channels_last"]:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if wanted["precision"] in QUANTIZED:
        quantize(model, wanted["precision"])
    if wanted["sparse"]:
        sparsify(model)
    return model


class Call(nn.Module):
    """A model on inputs as they come (FP32, contiguous), with outputs in FP32, by name.

    With `autocast`, PyTorch casts what a reduced precision meets of other types.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], device: str, wanted: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.where = model, names, device
        self.dtype = dtype_of(device, wanted["precision"])
        self.channels_last, self.autocast = wanted["channels_last"], wanted.get("autocast", False)

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        ready = [self._ready(value) for value in inputs]
        with torch.autocast(self.where, self.dtype) if self.autocast else contextlib.nullcontext():
            result = by_name(self.model(*ready), self.names)
        return {name: value.float() if value.is_floating_point() else value for name, value in result.items()}

    def _ready(self, value: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last if self.channels_last and value.ndim == 4 else torch.preserve_format
        return value.to(self.dtype, memory_format=layout) if value.is_floating_point() else value


def needs_autocast(call: Call, inputs: list[torch.Tensor]) -> bool:
    """Whether a model in reduced precision mixes types, so that it runs under autocast only.

    Raises Fault if it doesn't run at all.
    """
    failed: RuntimeError | None = None
    for autocast in (False, True) if call.dtype in HALVES.values() else (False,):
        call.autocast = autocast
        try:
            with torch.inference_mode():
                call(*inputs)
            return autocast
        except RuntimeError as error:
            failed = failed or error
    raise Fault(
        f"the model doesn't run in {NAMES[call.dtype]}",
        got=" ".join(str(failed).split())[:300],
        expected="operations that take it",
        do="ask for another precision",
    )

"""Weights in other forms: quantised linear layers by torchao, 2:4 sparse ones by PyTorch; and what a weight is in.

INT8 and FP8: activations are quantised as they come, row by row (https://docs.pytorch.org/ao/stable/). 2:4:
https://docs.pytorch.org/docs/stable/sparse.html#sparse-semi-structured-docs, after arXiv:2104.08378. Kernels of both
want their input in a certain way, and one of them doesn't say so: `PaddedLinear`, `SparseLinear`.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional

from tasks.manifest import Layer

ALIGNED = 16
MIN_ROWS = 17
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.float8_e4m3fn: "fp8",
}
PRODUCTS = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)


class PaddedLinear(nn.Linear):
    """A linear layer that adds 16 rows of zeros to its input: `torch._int_mm` on a GPU takes 17 (PyTorch 2.11)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        padded = functional.pad(rows, (0, 0, 0, MIN_ROWS - 1))
        return super().forward(padded)[: rows.shape[0]].reshape(*input.shape[:-1], self.out_features)


class SparseLinear(nn.Linear):
    """A linear layer on a contiguous input: cuSPARSELt's kernels read another as if it were (PyTorch 2.11).

    Seen with the first token of each sentence, hidden[:, 0], that a BERT's pooler takes: wrong results, and no error.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.contiguous())


def quantize(model: nn.Module, precision: str) -> None:
    """Turn the linear layers with sizes that are multiples of 16 into INT8 or FP8 ones, in place."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    # torchao would change Inductor's settings for the whole process.
    config = (
        Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        if precision == "int8"
        else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    )
    quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Linear) and _aligned(module.weight))
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.is_cuda and precision_of(module.weight) == "int8":
            module.__class__ = PaddedLinear


def _aligned(weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and all(size % ALIGNED == 0 for size in weight.shape)


def sparsify(model: nn.Module) -> None:
    """Turn the linear layers whose weights are 2:4, and that PyTorch has a kernel for, into sparse ones."""
    from torch.sparse import to_sparse_semi_structured

    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and two_of_four(module.weight):
            weight = module.weight
            if id(weight) not in made:
                try:
                    with warnings.catch_warnings(action="ignore"):
                        made[id(weight)] = nn.Parameter(to_sparse_semi_structured(weight), requires_grad=False)
                except RuntimeError:  # The shape has no such kernel: the layer stays dense, and the report says so.
                    continue
            module.weight = made[id(weight)]
            if type(module) is nn.Linear:
                module.__class__ = SparseLinear


def two_of_four(weight: torch.Tensor) -> bool:
    """Whether at most 2 of each 4 values along the inputs of a weight [outputs, inputs] are non-zero."""
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return bool(((weight != 0).view(weight.shape[0], -1, 4).sum(-1) <= 2).all())


def module_layers(model: nn.Module, tf32: bool) -> tuple[Layer, ...]:
    """The leaf modules, each with the type that its weights are held and multiplied in."""
    found = []
    for name, module in model.named_modules():
        if not list(module.children()):
            weight = next((p for _, p in module.named_parameters(recurse=False) if p.ndim > 1), None)
            product = isinstance(module, PRODUCTS)
            precision = "unknown" if weight is None else precision_of(weight)
            found.append(
                Layer(
                    name,
                    type(module).__name__,
                    "tf32" if product and tf32 and precision == "fp32" else precision,
                    product,
                    sparse=type(weight).__name__.startswith("SparseSemiStructured") if product else None,
                )
            )
    return tuple(found)


def precision_of(weight: torch.Tensor) -> str:
    """The name of a weight's type; of a quantised one, that of its integers or 8-bit floats."""
    parts = ("qdata", "original_weight_tensor", "tensor_impl", "int_data", "float8_data")
    while (
        inner := next((part for key in parts if (part := getattr(weight, key, None)) is not None), None)
    ) is not None:
        weight = inner
    return NAMES.get(weight.dtype, "unknown")

"""Settings of the steps from model to model: train, prune, sparsify, factorize, share, distill, qat.

No heavy import may enter here: settings are checked before any compute is spent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tasks.settings_types import (
    Fraction,
    Globs,
    Number,
    Positive,
    Rate,
    Recovery,
    Settings,
    Step,
    Threads,
    Weight,
    Whole,
)


class FitParams(Settings):
    """What every training loop shares.

    Sums depend on `threads`: the same weights again need the same number, so that it is fixed. With
    "auto" a few steps are timed with each number up to the cores, and the report tells the
    fastest, which the training then uses; two busy processes of two threads each were seen 5 to 16 times
    slower than one. `batch` is the largest: batches of an epoch are equal within 1.
    Training stops early after `patience` epochs without a better validation score.

    `device: cuda` trains and scores on the GPU; `auto` does where there is one. Seeded and repeatable, as far as
    PyTorch has such kernels, but with other sums than the CPU's. `precision: bf16` trains in mixed precision.
    """

    epochs: Positive = 8
    batch: Positive = 64
    lr: Rate = 2e-3
    seed: Whole = 0
    threads: Threads = 1
    patience: Positive | None = None
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"


class TrainParams(FitParams):
    """Train the workload's model from scratch; `model` goes to the workload's `model()`."""

    model: dict[str, Any] = Field(default_factory=dict)


class PruneParams(Step, FitParams):
    """Pruning of weights, channels, attention heads or whole layers, with fine-tuning.

    `ratio` is the share removed: of each layer's weights, channels or heads (`scope: layer`) or of
    all of them together (`scope: global`); of the layers of a stack for `granularity: layer`. `round_to`
    is the multiple that every remaining channel count keeps. `importance` ranks what goes first;
    `norm_scale` is for channels. `only` names the layers (or attentions) that may lose something, as
    globs. With `steps` above 1 the ratio is reached in so many steps, each with `epochs` of fine-tuning.
    """

    granularity: Literal["weight", "channel", "head", "layer"] = "channel"
    importance: Literal["magnitude", "taylor", "norm_scale", "random"] = "magnitude"
    scope: Literal["layer", "global"] = "layer"
    ratio: Fraction
    round_to: Positive = 8
    only: Globs | None = None
    steps: Positive = 1
    epochs: Recovery = 3
    lr: Rate = 1e-3

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.importance == "norm_scale" and self.granularity != "channel":
            raise ValueError("importance norm_scale with granularity channel; magnitude, taylor or random with others")
        return self


class SparsifyParams(Step, FitParams):
    """2:4 sparsity along the input dimension, with fine-tuning under the masks.

    `magnitude` keeps the two largest of four weights; `sparsegpt` also mends the remaining ones
    on `samples` training samples. `permute` first searches a permutation of the input channels
    that keeps more magnitude. `skip` names layers that stay dense, as globs.
    """

    method: Literal["magnitude", "sparsegpt"] = "magnitude"
    permute: bool = False
    samples: Positive = 256
    skip: Globs | None = None
    epochs: Recovery = 3
    lr: Rate = 1e-3


class FactorizeParams(Step, FitParams):
    """Low-rank factors by truncated SVD, with fine-tuning.

    The rank of a layer is the share `rank` of its full rank, or the least that keeps the
    share `energy` of its squared singular values, or what `budget` leaves: ranks are then chosen
    together so that the layers' parameters come to that share of what they were. Rounded up to
    `round_to`. With `samples` above 0 the error of the layer's outputs on so many training
    samples is minimised, else the weight's own. `only` names the layers, as globs.
    """

    rank: Fraction | None = None
    energy: Fraction | None = None
    budget: Fraction | None = None
    samples: Annotated[Whole, Field(ge=0)] = 256
    round_to: Positive = 8
    only: Globs | None = None
    epochs: Recovery = 3
    lr: Rate = 1e-3

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.rank, self.energy, self.budget)) != 1:
            raise ValueError("one of rank, energy and budget, a number between 0 and 1")
        return self


class ShareParams(Step, FitParams):
    """Cross-layer weight sharing, with fine-tuning.

    The layers of the model's stack are cut into `groups` runs of neighbours; the layers of a run
    become one, the `average` of their weights or a `copy` of the first.
    """

    groups: Positive = 1
    how: Literal["average", "copy"] = "average"
    epochs: Recovery = 3
    lr: Rate = 1e-3


class DistillParams(Step, FitParams):
    """Distil `teacher` into the artifact named `from`, or into a fresh `student`.

    The loss is `alpha` times the soft labels' at `temperature`, plus 1 - `alpha` times the
    task's, plus `hidden` times the hidden states', plus `attention` times the attention maps'.
    `pairs` maps layers of the student to those of the teacher whose hidden states they learn;
    without it, block m of M learns from block m N / M of N.
    """

    teacher: str
    student: dict[str, Any] | None = None
    temperature: Rate = 4.0
    alpha: Annotated[Number, Field(ge=0, le=1)] = 0.7
    hidden: Weight = 0.0
    attention: Weight = 0.0
    pairs: Annotated[dict[str, str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.alpha or self.hidden or self.attention):
            raise ValueError("alpha, hidden or attention above 0: with all at 0 there is nothing to distil")
        if self.pairs and not self.hidden:
            raise ValueError("hidden above 0, or no pairs: they are for hidden states only")
        return self


class QatParams(Step, FitParams):
    """Quantisation-aware training: INT8, per-channel weights, symmetric.

    Ranges come from `samples` calibration samples. `style` names who will run it: `tensorrt` (signed;
    ONNX Runtime takes it too, slowly) or `onnxruntime` (unsigned activations, weights of 7 bits).
    """

    format: Literal["int8"] = "int8"
    style: Literal["tensorrt", "onnxruntime"] = "tensorrt"
    calibration: Literal["max", "percentile", "entropy"] = "max"
    samples: Positive = 256
    epochs: Positive = 2
    lr: Rate = 1e-4

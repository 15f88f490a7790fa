"""Typed settings: one frozen class a technique, one section of `params.yaml` each.

No heavy import may enter here: settings are checked before any compute is spent.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _whole(value: Any) -> Any:
    text = isinstance(value, str) and not value.strip().lstrip("+-").isdigit()
    if text or isinstance(value, bool | float):
        raise ValueError("a whole number, written without a decimal point")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]
Positive = Annotated[Whole, Field(ge=1)]
Rate = Annotated[Number, Field(gt=0)]


def _threads(value: Any) -> Any:
    digits = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if value != "auto" and not (digits.isdigit() and int(digits) >= 1):
        raise ValueError("a whole number of at least 1, or auto")
    return value


Threads = Annotated[int | Literal["auto"], BeforeValidator(_threads)]


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(Settings):
    """One artifact of the tree, made from the artifact named `from`."""

    parent: str = Field(alias="from")


class DataParams(Settings):
    """Splits of the workload: sample counts, and the seed that fixes them."""

    seed: Whole = 0
    train: Positive = 3000
    calibration: Positive = 512
    validation: Positive = 500
    test: Positive = 1500


class FitParams(Settings):
    """What every training loop shares.

    Sums depend on `threads`: the same weights again need the same number, so that it is fixed. With
    "auto" a few steps are timed with each number up to the cores, and the report tells the
    fastest, which the training then uses; two busy processes of two threads each were seen 5 to 16 times
    slower than one. `batch` is the largest: batches of an epoch are equal within 1.
    Training stops early after `patience` epochs without a better validation score.
    """

    epochs: Positive = 8
    batch: Positive = 64
    lr: Rate = 2e-3
    seed: Whole = 0
    threads: Threads = 1
    patience: Positive | None = None


class TrainParams(FitParams):
    """Train the workload's model from scratch; `model` goes to the workload's `model()`."""

    model: dict[str, Any] = Field(default_factory=dict)


Recovery = Annotated[Whole, Field(ge=0)]
Weight = Annotated[Number, Field(ge=0)]
Globs = Annotated[tuple[str, ...], Field(min_length=1)]


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


class ExportParams(Step):
    """ONNX with a dynamic batch, and the workload's dynamic axis. Every backend here accepts `opset` 18 to 21."""

    opset: Annotated[Whole, Field(ge=18, le=21)] = 18
    external_data: bool = False


class QuantizeParams(Step):
    """Post-training quantisation to INT8 with explicit Q/DQ nodes.

    `style` names who will run it: `onnxruntime` (unsigned activations, signed per-channel
    weights, reduced range) or `tensorrt` (symmetric, signed, no quantised bias). With
    `activations: dynamic` the runtime finds the activations' ranges batch by batch, and there is
    no calibration: the way of transformers on a CPU.
    """

    format: Literal["int8"] = "int8"
    activations: Literal["static", "dynamic"] = "static"
    style: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    calibration: Literal["minmax", "entropy", "percentile"] = "entropy"
    samples: Positive = 256
    batch: Positive = 32
    percentile: Annotated[Number, Field(gt=50, le=100)] = 99.99


class BuildParams(Step):
    """One engine. `threads` for CPU backends, `compute_capabilities` for ahead-of-time GPU ones."""

    backend: Literal["eager", "onnxruntime", "tensorrt_rtx"]
    threads: Positive = 1
    max_batch: Positive = 64
    compute_capabilities: Annotated[tuple[Literal["8.0", "8.6", "8.9", "12.0"], ...], Field(min_length=1)] = (
        "8.6",
        "8.9",
    )


class EvaluateParams(Settings):
    """Accuracy of the built engine on the test split."""

    metric: str = "accuracy"
    batch: Positive = 32
    confidence: Annotated[Number, Field(ge=0.8, lt=1)] = 0.95


class BenchmarkParams(Settings):
    """Interleaved timing against the baseline, at `batch`, and again at each batch of `also`.

    Verdicts and ranking are of `batch`. Samples keep the length they are stored with, or are cut to
    `length` entries along the workload's dynamic axis.

    Each of `rounds` rounds times every engine once, in random order, for `window_ms`. While an
    interval is wider than `max_width` (relative), rounds go on up to `max_rounds`; one that
    is still wider then is reported as unstable.
    """

    batch: Positive = 1
    also: tuple[Positive, ...] = ()
    length: Positive | None = None
    rounds: Annotated[Whole, Field(ge=8)] = 20
    max_rounds: Annotated[Whole, Field(ge=8)] = 60
    window_ms: Rate = 60.0
    warmup_ms: Rate = 300.0
    max_width: Fraction = 0.1
    confidence: Annotated[Number, Field(ge=0.8, lt=1)] = 0.95
    seed: Whole = 0


def min_rounds(confidence: float) -> int:
    """The fewest rounds from which a signed-rank interval of a confidence can be had."""
    return math.ceil(1 - math.log2(1 - confidence))


class Bound(Settings):
    """A gate on one metric: its whole interval must lie above `min` and below `max`."""

    min: Number | None = None
    max: Number | None = None

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("at least one of min and max")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError("min below max, or nothing can pass: lower min or raise max")
        return self


class GateParams(Settings):
    """What a variant must prove to be promoted.

    `accuracy_change` is paired against the baseline, in shares of 1 (non-inferiority by a
    margin); `speedup` is over the baseline; `latency_ms` is the p50.
    """

    accuracy: Bound | None = None
    accuracy_change: Bound = Bound(min=-0.02)
    speedup: Bound = Bound(min=1.0)
    latency_ms: Bound | None = None
    size_bytes: Bound | None = None


class Params(Settings):
    """The whole of `params.yaml`. DVC tracks `data`, `evaluate`, `benchmark` and `gates`, so they must be there."""

    workload: str
    baseline: str
    data: DataParams
    train: dict[str, TrainParams]
    prune: dict[str, PruneParams] = Field(default_factory=dict)
    sparsify: dict[str, SparsifyParams] = Field(default_factory=dict)
    factorize: dict[str, FactorizeParams] = Field(default_factory=dict)
    share: dict[str, ShareParams] = Field(default_factory=dict)
    distill: dict[str, DistillParams] = Field(default_factory=dict)
    qat: dict[str, QatParams] = Field(default_factory=dict)
    export: dict[str, ExportParams] = Field(default_factory=dict)
    quantize: dict[str, QuantizeParams] = Field(default_factory=dict)
    build: dict[str, BuildParams]
    evaluate: EvaluateParams
    benchmark: BenchmarkParams
    gates: GateParams


MODEL_STEPS = ("train", "prune", "sparsify", "factorize", "share", "distill", "qat")
SECTIONS: dict[str, type[Settings]] = {
    "train": TrainParams,
    "prune": PruneParams,
    "sparsify": SparsifyParams,
    "factorize": FactorizeParams,
    "share": ShareParams,
    "distill": DistillParams,
    "qat": QatParams,
    "export": ExportParams,
    "quantize": QuantizeParams,
    "build": BuildParams,
}

"""Typed settings: one frozen class a technique, one section of `params.yaml` each.

No heavy import may enter here: settings are checked before any compute is spent.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from tasks.settings_engines import TENSORRT as TENSORRT
from tasks.settings_engines import USED_BY as USED_BY
from tasks.settings_engines import BuildParams as BuildParams
from tasks.settings_engines import QuantizeParams as QuantizeParams
from tasks.settings_engines import SearchParams as SearchParams
from tasks.settings_gates import Bound as Bound
from tasks.settings_gates import GateParams as GateParams
from tasks.settings_models import DistillParams as DistillParams
from tasks.settings_models import FactorizeParams as FactorizeParams
from tasks.settings_models import FitParams as FitParams
from tasks.settings_models import PruneParams as PruneParams
from tasks.settings_models import QatParams as QatParams
from tasks.settings_models import ShareParams as ShareParams
from tasks.settings_models import SparsifyParams as SparsifyParams
from tasks.settings_models import TrainParams as TrainParams
from tasks.settings_types import Fraction, Number, Positive, Rate, Step, Whole
from tasks.settings_types import Settings as Settings


class DataParams(Settings):
    """Splits of the workload: sample counts, and the seed that fixes them."""

    seed: Whole = 0
    train: Positive = 3000
    calibration: Positive = 512
    validation: Positive = 500
    test: Positive = 1500


class ExportParams(Step):
    """A model with a dynamic batch, and the workload's dynamic axis.

    `onnx` for every backend but `inductor`, which takes a `program` of torch.export. Every backend
    here accepts `opset` 18 to 21.
    """

    format: Literal["onnx", "program"] = "onnx"
    opset: Annotated[Whole, Field(ge=18, le=21)] = 18
    external_data: bool = False


class EvaluateParams(Settings):
    """Accuracy of the built engine on the test split."""

    metric: str = "accuracy"
    batch: Positive = 32
    confidence: Annotated[Number, Field(ge=0.8, lt=1)] = 0.95


class BenchmarkParams(Settings):
    """Interleaved timing against the baseline, at `batch`, and again at each batch of `also`.

    Verdicts and ranking are of `batch`. Samples keep the length they are stored with, or are cut to
    `length` entries along the workload's dynamic axis.

    Each of `rounds` rounds times every engine once, in random order, for `window_ms`. While a speed-up's
    interval is wider than `max_width` (relative) or, in a single opening, holds 1, rounds go on up to `max_rounds`, or
    until they have taken `budget_s` seconds per variant; one that is still too wide then is reported as unstable.
    A window is thrown away in which other processes took more than the share `max_lost` of its time, or in which the
    GPU was throttled, but for limits of its own in `tolerate`, or ran below the share `min_clock` of its highest clock,
    or idle below that of what it may run at.
    `reopen_sd` is by how much the ratio of one engine's latencies in two openings differs from 1, as a relative
    standard deviation: rounds can't see it, so every speed-up's interval is widened by it. With several `openings`,
    all engines of a measurement are opened as often, each time in a process of its own, for a share of the rounds (8 at
    least).
    `clock` is `host` for a call as a caller sees it, copies included, or `device` for the GPU's own time
    between two events, with inputs already there.

    With `energy`, four windows of `energy_s` seconds, and four of half of it at idle, are added for the energy that an
    inference takes, where there is a meter. `max_latency_ms` is the limit under which `sweep` looks for the batch with
    the most throughput.
    """

    batch: Positive = 1
    clock: Literal["host", "device"] = "host"
    also: tuple[Positive, ...] = ()
    length: Positive | None = None
    rounds: Annotated[Whole, Field(ge=8)] = 20
    max_rounds: Annotated[Whole, Field(ge=8)] = 60
    window_ms: Rate = 60.0
    warmup_ms: Rate = 300.0
    max_width: Fraction = 0.1
    budget_s: Rate = 8.0
    openings: Annotated[Whole, Field(ge=1, le=20)] = 3
    reopen_sd: Annotated[Number, Field(ge=0, lt=1)] = 0.007
    max_lost: Rate = 0.1
    min_clock: Fraction = 0.9
    tolerate: tuple[Literal["power", "thermal"], ...] = ()
    energy: bool = True
    energy_s: Rate = 1.0
    max_latency_ms: Rate | None = None
    confidence: Annotated[Number, Field(ge=0.8, lt=1)] = 0.95
    seed: Whole = 0


def min_rounds(confidence: float) -> int:
    """The fewest rounds from which a signed-rank interval of a confidence can be had."""
    return math.ceil(1 - math.log2(1 - confidence) - 1e-9)


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

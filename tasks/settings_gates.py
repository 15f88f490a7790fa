"""Settings of the gates: what a variant must prove."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from tasks.settings_types import Number, Settings


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
    """What a variant must prove to be promoted. A metric that wasn't measured fails its gate.

    `accuracy_change` is paired against the baseline, in shares of 1 (non-inferiority by a
    margin); `speedup` is over the baseline; `latency_ms` is the p50 and `latency_ms_p99` the p99 of a call, and
    `throughput_per_s` counts samples, all at `benchmark.batch`. `size_bytes` is the engine's file, `memory_bytes` what
    it holds at its peak: of the GPU's memory where it runs on one, else of the host's. `energy_mj` is what the metered
    device takes for an inference, idle power included. `first_inference_s` is from nothing loaded to the first result.
    `as_asked` refuses an engine that doesn't run in the precision or sparsity that was asked for.
    """

    accuracy: Bound | None = None
    accuracy_change: Bound = Bound(min=-0.02)
    speedup: Bound = Bound(min=1.0)
    latency_ms: Bound | None = None
    latency_ms_p99: Bound | None = None
    throughput_per_s: Bound | None = None
    size_bytes: Bound | None = None
    memory_bytes: Bound | None = None
    energy_mj: Bound | None = None
    first_inference_s: Bound | None = None
    as_asked: bool = False

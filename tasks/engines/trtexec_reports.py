"""What `trtexec` exports as JSON, read back: times, profile and layers.

Times and profile are written by samples/common/sampleReporting.cpp of NVIDIA/TensorRT, alike in releases 10 and 11;
the layers are those of the engine inspector.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engines import trt_layers
from tasks.errors import Fault
from tasks.manifest import Layer
from tasks.stats import percentile


@dataclass(frozen=True)
class Latency:
    """What `trtexec` measured, in milliseconds per batch; a percentile is None where there are too few samples for it.

    Latency is the inputs' way to the GPU, the computing and the outputs' way back; the last three are the medians of
    these parts. `throughput_per_s` counts samples: `trtexec` overlaps batches, so it isn't the latency's inverse.
    """

    batch: int
    n: int
    mean_ms: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    h2d_ms: float
    compute_ms: float
    d2h_ms: float
    throughput_per_s: float


@dataclass(frozen=True)
class Cost:
    """The time of one layer in a run that profiles: milliseconds per batch, and its share of all layers' time."""

    layer: str
    mean_ms: float
    median_ms: float | None
    share: float


def read_times(path: Path, batch: int) -> Latency:
    """Latency out of --exportTimes: an array with the milliseconds of each inference's steps; warm-up is left out."""
    rows = _json(path, list, "--exportTimes")
    try:
        columns = {
            key: np.array([float(row[key]) for row in rows])
            for key in ("startH2dMs", "endD2hMs", "h2dMs", "computeMs", "d2hMs", "latencyMs")
        }
        latency = columns["latencyMs"]
        lasted = float(columns["endD2hMs"].max() - columns["startH2dMs"].min())
        if not all(np.isfinite(column).all() for column in columns.values()) or lasted <= 0:
            raise ValueError("times that are not finite, or no time at all")
    except (ValueError, TypeError, KeyError) as error:
        raise _broken(path, "--exportTimes", error) from None
    return Latency(
        batch=batch,
        n=len(rows),
        mean_ms=float(latency.mean()),
        p50_ms=percentile(latency, 50),
        p90_ms=percentile(latency, 90),
        p99_ms=percentile(latency, 99),
        h2d_ms=float(np.median(columns["h2dMs"])),
        compute_ms=float(np.median(columns["computeMs"])),
        d2h_ms=float(np.median(columns["d2hMs"])),
        throughput_per_s=batch * len(rows) / lasted * 1e3,
    )


def read_profile(path: Path) -> tuple[Cost, ...]:
    """Layers by time, the slowest first, out of --exportProfile: a count, then name and milliseconds of each layer.

    Layers that never ran are left out.
    """
    rows = _json(path, list, "--exportProfile")
    try:
        costs = [
            Cost(
                str(row["name"]),
                float(row["averageMs"]),
                float(row["medianMs"]) if "medianMs" in row else None,
                float(row["percentage"]) / 100,
            )
            for row in rows
            if "count" not in row and row["averageMs"] is not None
        ]
        if not costs:
            raise ValueError("no layer that ran")
    except (ValueError, TypeError, KeyError) as error:
        raise _broken(path, "--exportProfile", error) from None
    return tuple(sorted(costs, key=lambda cost: -cost.mean_ms))


def read_layers(path: Path) -> tuple[Layer, ...]:
    """The engine's layers out of --exportLayerInfo, which is what TensorRT's engine inspector says."""
    return trt_layers.of_json(json.dumps(_json(path, dict, "--exportLayerInfo")))


def _json(path: Path, kind: type, flag: str) -> Any:
    """A non-empty JSON value of a type.

    `trtexec` escapes no control characters, and prints what isn't a number as C++ does: that becomes null.
    """
    try:
        text = re.sub(r"(:\s*)-?(?:nan|inf)\b", r"\1null", path.read_text(errors="replace"))
        value = json.loads(text, strict=False)
        if not isinstance(value, kind) or not value:
            raise ValueError(f"{'an empty' if isinstance(value, kind) else 'not a'} {kind.__name__}")
    except (OSError, ValueError) as error:
        raise _broken(path, flag, error) from None
    return value


def _broken(path: Path, flag: str, error: Exception) -> Fault:
    missing = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
    return Fault(
        f"{path.name} is not what trtexec {flag} writes",
        got="no such file" if isinstance(error, FileNotFoundError) else missing,
        expected="the JSON of release 10 or 11",
        do="run it again to its end; see trtexec.log beside it",
    )

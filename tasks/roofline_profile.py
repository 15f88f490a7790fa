"""What each layer of an ONNX Runtime engine takes, from its profiler."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tasks.engines.ort_start import start
from tasks.manifest import Manifest
from tasks.workloads.protocol import Arrays

WARM_UP, LEAST, MOST, BUDGET_S = 5, 10, 200, 2.0
NODE = "_kernel_time"


def layers_ms(folder: Path, described: Manifest, inputs: list[Arrays]) -> dict[str, float]:
    """The median milliseconds of each node over runs on `inputs` in turn, for two seconds, in 10 to 195 runs.

    The profiler costs time of its own, so that these add up to more than a call takes. On a GPU they are of its
    kernels, as CUPTI tells them, and there are none where ONNX Runtime was built without it: what its nodes take on the
    host is only their launch. Raises what opening an engine raises.
    """
    settings = {**described.settings, "cuda_graph": False}
    level = settings.get("optimization", "all") if settings.get("optimize_on_open") else "disabled"
    with tempfile.TemporaryDirectory() as scratch:
        session = start(
            str(folder / described.engine_file),
            described.device,
            described.threads,
            level,
            settings=settings,
            strict=not settings.get("cpu_nodes"),
            profile=Path(scratch) / "profile",
        )
        names = [spec.name for spec in described.inputs]
        runs, end = 0, time.perf_counter() + BUDGET_S
        while runs < WARM_UP + LEAST or (runs < MOST and time.perf_counter() < end):
            batch = inputs[runs % len(inputs)]
            session.run(None, {name: batch[name] for name in names})
            runs += 1
        events = json.loads(Path(session.end_profiling()).read_text())
    return by_layer(events, runs, described.device)


def by_layer(events: list[dict[str, Any]], runs: int, device: str) -> dict[str, float]:
    """Milliseconds by node from a profile's events of some runs, without those of warming up.

    On a CPU the median of a node's events; on a GPU the mean sum of a node's kernels.
    """
    taken: dict[str, list[float]] = defaultdict(list)
    for event in events:
        node = str(event.get("args", {}).get("parent_name", "") if device == "cuda" else event["name"])
        if event.get("cat") == ("Kernel" if device == "cuda" else "Node") and node.endswith(NODE):
            taken[node.removesuffix(NODE)].append(event["dur"] / 1e3)
    return {name: _typical(durations, runs, device) for name, durations in taken.items()}


def _typical(durations: list[float], runs: int, device: str) -> float:
    many = max(1, len(durations) // runs)  # Kernels of this node in a run; on a CPU, calls of it.
    kept = durations[WARM_UP * many :] or durations
    if device == "cuda":
        return sum(kept) / max(1, len(kept) / many)
    return statistics.median(kept) * many

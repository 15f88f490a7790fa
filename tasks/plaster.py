"""The PLASTER scorecard of a variant: seven letters, each by how it was measured.

Programmability, latency, accuracy, size, throughput, energy efficiency and rate of learning (Jensen Huang, GTC 2018);
docs/plaster.md defines each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tasks import layout
from tasks.costs import Cost
from tasks.files import read_json
from tasks.params import Tree
from tasks.results import Variant
from tasks.settings import MODEL_STEPS, ExportParams, QatParams, QuantizeParams
from tasks.stats import Interval


@dataclass(frozen=True)
class Programmability:
    """What a variant took: pipeline `steps`, the `settings` given for them, and the backends that could build it.

    `backends` are those that take the artifact that the engine was built from.
    """

    steps: int
    settings: int
    backends: tuple[str, ...]


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call of `batch` samples; None with too few calls for the percentile."""

    p50_ms: float | None
    p99_ms: float | None
    batch: int


@dataclass(frozen=True)
class Size:
    """Bytes of the engine's file, and of the memory it holds at its peak."""

    engine_bytes: int | None
    memory_bytes: int | None


@dataclass(frozen=True)
class EnergyEfficiency:
    """Inferences per joule of all that the metered device takes; None with the `reason`."""

    inferences_per_joule: Interval | None
    reason: str | None


@dataclass(frozen=True)
class RateOfLearning:
    """Seconds from a new model to this engine: all steps of its lineage and of its teachers' lineages, added up.

    `at_least` says that of some steps only a part is recorded; `seconds` is None, with the `reason`, where nothing is
    recorded of a step. `by_stage` holds each step's seconds.
    """

    seconds: float | None
    at_least: bool
    reason: str | None
    by_stage: dict[str, float | None]


@dataclass(frozen=True)
class Scorecard:
    """The seven letters; None or null numbers where something wasn't measured. `throughput` is samples/s by batch."""

    programmability: Programmability
    latency: Latency | None
    accuracy: Interval | None
    size: Size
    throughput: dict[str, float]
    energy_efficiency: EnergyEfficiency
    rate_of_learning: RateOfLearning


def scorecard(tree: Tree, variant: Variant) -> Scorecard:
    """The scorecard of a variant of this tree, out of its numbers and the reports of the steps it comes of."""
    stages, latency, cost = tree.made_by(variant.name), variant.latency_ms, variant.cost
    throughput: dict[str, float] = {}
    if latency and variant.throughput_per_s is not None:
        throughput = {str(latency["batch"]): variant.throughput_per_s}
    return Scorecard(
        programmability=Programmability(
            steps=len(stages),
            settings=sum(_settings(tree.nodes[stage.partition("@")[2]].settings) for stage in stages),
            backends=backends(tree, str(tree.nodes[variant.name].parent)),
        ),
        latency=Latency(latency["p50"], latency["p99"], int(latency["batch"] or 0)) if latency else None,
        accuracy=variant.accuracy,
        size=Size(variant.size_bytes.get("engine"), cost.memory_bytes),
        throughput={**throughput, **variant.throughput_at},
        energy_efficiency=_efficiency(cost),
        rate_of_learning=rate_of_learning(stages),
    )


def backends(tree: Tree, parent: str) -> tuple[str, ...]:
    """The backends that can build an engine from an artifact: a checkpoint, an exported program or an ONNX file."""
    node = tree.nodes[parent]
    if node.step in MODEL_STEPS:
        return ("eager",)
    line = [tree.nodes[name].settings for name in tree.lineage(parent)]
    if any(isinstance(settings, ExportParams) and settings.format == "program" for settings in line):
        return ("inductor",)
    unsigned = any(
        isinstance(settings, QatParams | QuantizeParams)
        and settings.format == "int8"
        and settings.style == "onnxruntime"
        for settings in line
    )
    return ("onnxruntime",) if unsigned else ("onnxruntime", "tensorrt", "tensorrt_rtx")


def _settings(settings: Any) -> int:
    """How many values were given: those of nested settings and mappings one by one, lists as one."""
    if isinstance(settings, BaseModel):
        given = [getattr(settings, name) for name in settings.model_fields_set]
    elif isinstance(settings, Mapping):
        given = list(settings.values())
    else:
        return 1
    return sum(_settings(value) for value in given)


def _efficiency(cost: Cost) -> EnergyEfficiency:
    """Inferences per joule from millijoules an inference, with the interval's ends exchanged."""
    if (energy := cost.energy_mj) is None:
        return EnergyEfficiency(None, cost.energy_reason)
    if energy.low <= 0:
        return EnergyEfficiency(None, "the interval of its energy isn't above 0")
    return EnergyEfficiency(Interval(1e3 / energy.value, 1e3 / energy.high, 1e3 / energy.low), None)


def rate_of_learning(stages: Sequence[str]) -> RateOfLearning:
    """The seconds of stages STEP@NAME, as their reports tell them."""
    taken = {stage: step_seconds(_report(stage)) for stage in stages}
    unknown = [stage for stage, (seconds, _) in taken.items() if seconds is None]
    by_stage = {stage: seconds for stage, (seconds, _) in taken.items()}
    if unknown:
        return RateOfLearning(None, False, f"no time is recorded of {', '.join(unknown)}", by_stage)
    total = sum(seconds for seconds in by_stage.values() if seconds is not None)
    return RateOfLearning(total, any(part for _, part in taken.values()), None, by_stage)


def step_seconds(report: Mapping[str, Any]) -> tuple[float | None, bool]:
    """A step's seconds by its report, and whether they are only a part of it; None if it tells nothing.

    A part is told by a step that went on from a killed training, and by reports of earlier versions: the trainings'
    own time to the last epoch, or the build's without its imports.
    """
    whole = report.get("wall_s")
    if isinstance(whole, int | float) and math.isfinite(whole):
        return float(whole), False
    if "curve" in report:
        return _trained(report["curve"]), True
    part = report.get("seconds")
    return (float(part), True) if isinstance(part, int | float) and math.isfinite(part) else (None, True)


def _trained(curve: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the trainings whose curves were put together, each of which counts its own: the last before a drop."""
    seconds = [float(point["seconds"]) for point in curve]
    return sum(last for last, after in zip(seconds, [*seconds[1:], 0.0], strict=False) if after < last)


def _report(stage: str) -> dict[str, Any]:
    step, _, name = stage.partition("@")
    path = layout.report(step, name)
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found


def metrics(card: Scorecard) -> dict[str, float]:
    """The numbers of a scorecard by MLflow metric name; seconds that are a lower bound have a name of their own."""
    learning, efficiency = card.rate_of_learning, card.energy_efficiency.inferences_per_joule
    found: dict[str, float | None] = {
        "programmability_steps": card.programmability.steps,
        "programmability_settings": card.programmability.settings,
        "programmability_backends": len(card.programmability.backends),
        "latency_p50_ms": card.latency.p50_ms if card.latency else None,
        "latency_p99_ms": card.latency.p99_ms if card.latency else None,
        "accuracy": card.accuracy.value if card.accuracy else None,
        "size_engine_bytes": card.size.engine_bytes,
        "size_memory_bytes": card.size.memory_bytes,
        **{f"throughput_per_s_batch_{batch}": value for batch, value in card.throughput.items()},
        **(efficiency.named("energy_inferences_per_joule") if efficiency else {}),
        f"rate_of_learning_s{'_at_least' if learning.at_least else ''}": learning.seconds,
    }
    return {f"plaster.{name}": float(value) for name, value in found.items() if value is not None}

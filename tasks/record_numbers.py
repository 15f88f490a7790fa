"""What is logged of a variant: its numbers, tags, and what tells that an earlier run holds the same."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tasks import accuracy, layers, plaster
from tasks.accuracy import Accuracy
from tasks.files import digest_of
from tasks.gates import metric
from tasks.params import Tree
from tasks.results import Variant
from tasks.stats import Interval

METRICS = ("accuracy", "accuracy_change", "speedup", "energy_mj")
LATENCIES = {"p50": "latency_ms", "p90": "latency_ms_p90", "p99": "latency_ms_p99"}
NUMBERS = ("load_s", "first_inference_s", "memory_bytes", "host_peak_bytes", "device_peak_bytes", "activation_bytes")


@dataclass(frozen=True)
class Entry:
    """A variant with its accuracy by class and its scorecard's numbers.

    `content` is a digest of its own records and of these two, which come of other artifacts' records as well.
    """

    variant: Variant
    compared: Accuracy
    scorecard: dict[str, float]
    content: str

    @property
    def name(self) -> str:
        return self.variant.name


def entries(tree: Tree, variants: Sequence[Variant]) -> list[Entry]:
    """The entry of each variant, in order."""
    compared = {one.name: one for one in accuracy.of_tree(tree, [v.name for v in variants])}
    found = []
    for variant in variants:
        card = plaster.metrics(plaster.scorecard(tree, variant)) if variant.name in tree.nodes else {}
        content = digest_of([variant.content, card, asdict(compared[variant.name])])
        found.append(Entry(variant, compared[variant.name], card, content))
    return found


def numbers(one: Entry) -> dict[str, float]:
    """All metrics of an entry but its lineage's curves."""
    return flat_metrics(one.variant) | paired_metrics(one.compared) | one.scorecard


def evidence_tags(variant: Variant) -> dict[str, str]:
    """What is known of how an engine runs, as tags; empty if nothing is."""
    if (known := variant.evidence) is None:
        return {}
    return {
        "device": known.device,
        "precision_asked": known.precision_asked,
        "precision_found": layers.counts(known.precision_found) or "unknown",
        "not_as_asked": known.not_as_asked or "no",
        "fusion": layers.fusion(known.nodes, known.kernels) or "unknown",
        "signed": "yes" if known.signed else "no",
    }


def flat_metrics(variant: Variant) -> dict[str, float]:
    """Finite numbers of a variant by MLflow metric name; intervals as NAME, NAME_low and NAME_high."""
    flat = {f"size_bytes_{kind}": float(size) for kind, size in variant.size_bytes.items()}
    for name in METRICS:
        if got := metric(variant, name):
            flat |= got.named(name)
    for key, name in LATENCIES.items():
        if variant.latency_ms and (value := variant.latency_ms[key]) is not None:
            flat |= _timed(name, value, variant.latency_bounds_ms.get(key))
    if net := variant.cost.energy_net_mj:
        flat |= net.named("energy_net_mj")
    flat |= {name: float(value) for name in NUMBERS if (value := getattr(variant.cost, name)) is not None}
    for batch, value in variant.throughput_at.items():
        flat |= _timed(f"throughput_per_s_batch_{batch}", value, variant.throughput_bounds.get(batch))
    for batch, gain in variant.speedup_at.items():
        flat |= gain.named(f"speedup_batch_{batch}")
    for parity in variant.evidence.parity if variant.evidence else ():
        flat[f"parity_{re.sub('[^A-Za-z0-9_. /-]', '_', parity['output'])}"] = float(parity["difference"])
    if variant.throughput_per_s is not None:
        flat |= _timed("throughput_per_s", variant.throughput_per_s, variant.throughput_bounds.get(variant.batch))
    return {name: value for name, value in flat.items() if math.isfinite(value)}


def _timed(name: str, value: float, bounds: Interval | None) -> dict[str, float]:
    return {**(bounds.named(name) if bounds else {}), name: float(value)}


def paired_metrics(compared: Accuracy) -> dict[str, float]:
    """Agreement with its interval, samples gained and lost, and McNemar's p-value, by baseline and parent."""
    flat: dict[str, float | None] = {}
    for pair in compared.versus:
        told: dict[str, float | None] = {"gained": pair.gained, "lost": pair.lost, "mcnemar_p": pair.p_value}
        for role in pair.role.split(" and "):
            flat |= {f"{key}_{role}": value for key, value in told.items()}
            if same := pair.agreement:
                flat |= same.named(f"agreement_{role}")
    return {name: float(value) for name, value in flat.items() if value is not None}

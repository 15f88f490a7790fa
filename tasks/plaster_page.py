"""The PLASTER scorecards of a summary as text."""

from __future__ import annotations

from typing import Any

from tasks.gates import shown
from tasks.stats import Interval

BY_DEVICE = (
    "Times are the GPU's own (clock: device), means of several calls: single calls have no latency here, and copies to "
    "and from the GPU aren't in the throughput."
)


def bytes_text(value: float | None) -> str:
    """Bytes in KiB or MiB, a dash without."""
    if value is None:
        return "–"
    return f"{value / 1024:,.0f} KiB" if value < 2**20 else f"{value / 2**20:,.1f} MiB"


def latency(variant: dict[str, Any], percentile: str) -> str:
    """A percentile of a call's milliseconds with its interval, or that nothing bounds it; a dash if it isn't known."""
    value = variant["latency_ms"][percentile] if variant["latency_ms"] else None
    if value is None:
        return "–"
    bounds = variant.get("latency_bounds_ms")
    if not bounds:
        return f"{value:.3f} ms"
    found = bounds.get(percentile)
    return f"{value:.3f} ms, not bounded" if not found else "{value:.3f} ms [{low:.3f}, {high:.3f}]".format(**found)


def throughput(variant: dict[str, Any], batch: str) -> str:
    """Samples a second at a batch of the scorecard, with the interval where it is known."""
    found = variant.get("throughput_bounds", {}).get(batch)
    if not found:
        return f"{rate(variant['plaster']['throughput'][batch])}/s"
    return f"{rate(found['value'])}/s [{rate(found['low'])}, {rate(found['high'])}]"


def rate(value: float) -> str:
    """A rate to three digits, or whole above a thousand."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds to a tenth below ten; minutes from two on."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def cards(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The scorecards that a summary has."""
    return [v["plaster"] for v in summary["variants"] if v.get("plaster")]


def batches(summary: dict[str, Any]) -> list[str]:
    """Batch sizes of the scorecards' throughput, as text, in rising order."""
    return sorted({batch for card in cards(summary) for batch in card["throughput"]}, key=int)


def cells(variant: dict[str, Any]) -> dict[str, str]:
    """A scorecard's letters as text; dashes where nothing was measured, throughput as `throughput_BATCH`."""
    card = variant["plaster"]
    steps, learning = card["programmability"], card["rate_of_learning"]
    efficiency = card["energy_efficiency"]["inferences_per_joule"]
    return {
        "variant": " = ".join((variant["name"], *variant["also"])),
        "steps": str(steps["steps"]),
        "settings": str(steps["settings"]),
        "backends": ", ".join(steps["backends"]),
        "latency": latency(variant, "p50"),
        "latency_p99": latency(variant, "p99"),
        "accuracy": shown("accuracy", Interval(**card["accuracy"])) if card["accuracy"] else "–",
        "size": bytes_text(card["size"]["engine_bytes"]),
        "memory": bytes_text(card["size"]["memory_bytes"]),
        **{f"throughput_{batch}": throughput(variant, batch) for batch in card["throughput"]},
        "energy": _per_joule(efficiency) if efficiency else "–",
        "learning": _learning(learning),
        "verdict": variant["verdict"],
    }


def _learning(learning: dict[str, Any]) -> str:
    if learning["seconds"] is None:
        return "–"
    return ("≥ " if learning["at_least"] else "") + duration(learning["seconds"])


def _per_joule(found: dict[str, float]) -> str:
    return f"{rate(found['value'])}/J [{rate(found['low'])}, {rate(found['high'])}]"


def metered(summary: dict[str, Any]) -> bool:
    """Whether at least one scorecard has an energy efficiency."""
    return any(card["energy_efficiency"]["inferences_per_joule"] for card in cards(summary))


def notes(summary: dict[str, Any]) -> list[str]:
    """Why letters have no number, each reason once, and how to read those that are there."""
    found = cards(summary)
    measured = [card for card in found if card["latency"]]
    energy = dict.fromkeys(c["energy_efficiency"]["reason"] for c in measured if c["energy_efficiency"]["reason"])
    learning = dict.fromkeys(c["rate_of_learning"]["reason"] for c in found if c["rate_of_learning"]["reason"])
    partly = any(card["rate_of_learning"]["at_least"] for card in found)
    on_device = any(v.get("clock") == "device" and v["latency_ms"] for v in summary["variants"])
    return [
        *([BY_DEVICE] if on_device else []),
        *(f"No energy efficiency: {reason}." for reason in energy),
        *(f"No rate of learning: {reason}." for reason in list(learning)[:1]),
        *(["≥: of some steps only a part is recorded; such a sum isn't drawn."] if partly else []),
    ]

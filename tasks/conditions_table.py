"""What the machine was like beside each benchmark, as a Markdown table."""

from __future__ import annotations

from typing import Any

from tasks.monitor import slowing


def rows(summary: dict[str, Any]) -> list[str]:
    """Lines of the table; none without conditions. Ranges are over all readings, load before and after."""
    told = [(v["name"], v["conditions"]) for v in summary["variants"] if v.get("conditions")]
    if not told:
        return []
    gpu = any(raw["gpu_name"] for _, raw in told)
    headings = ["variant", "load average", "stolen"]
    if gpu:
        headings += ["SM clock, MHz", "memory, MHz", "temperature, °C", "power, W", "throttled", "others on the GPU"]
    lines = [[name, *_cpu(raw), *(_gpu(raw) if gpu else [])] for name, raw in told]
    return [
        "The machine beside each benchmark (docs/conditions.md):",
        "",
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(cells) + " |" for cells in lines),
        "",
    ]


def _cpu(raw: dict[str, Any]) -> list[str]:
    loads = [raw[when]["cpu"]["load_average"] for when in ("before", "after")]
    stolen = raw["steal_share"]
    return [" to ".join(f"{load:.2f}" for load in loads), "–" if stolen is None else f"{stolen:.1%}"]


def _gpu(raw: dict[str, Any]) -> list[str]:
    spans = [raw[key] for key in ("sm_mhz", "memory_mhz", "temperature_c", "power_w")]
    return [
        *("–" if span is None else f"{span[0]:.0f} to {span[1]:.0f}" for span in spans),
        _throttled(raw),
        "–" if raw["others"] is None else f"{raw['others']}, busy {raw['others_busy'] or 0:.0%}",
    ]


def _throttled(raw: dict[str, Any]) -> str:
    reasons = slowing(raw)
    if reasons is None:
        return "–"
    held = [f"{limit} {ms / 1e3:.1f} s" for limit, ms in (raw["held_back_ms"] or {}).items() if ms]
    return ", ".join([*reasons, *held]) or "never"

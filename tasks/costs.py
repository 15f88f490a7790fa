"""What an engine costs beside time: memory, its start, and energy, out of its benchmark's record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.special import ndtri

from tasks.stats import Interval

OLDER = "its benchmark's record is of an earlier version and has none"


@dataclass(frozen=True)
class Cost:
    """Memory in bytes, start in seconds, energy in millijoules for an inference, which is one sample.

    None where nothing was measured; `energy_reason` says why there is no energy, or none above idle. `energy_mj` is all
    that the metered device took, `energy_net_mj` what it took above idle; `energy_disturbed` says that a disturbed
    window had to be used. `host_peak_bytes` and `device_peak_bytes` are the growth of the process's memory, and of the
    GPU's, from before the engine was opened to the peak of its first inferences; the latter is None on a CPU, and
    `on_gpu`, where NVML doesn't tell it.
    """

    energy_mj: Interval | None = None
    energy_net_mj: Interval | None = None
    energy_reason: str | None = None
    energy_disturbed: str | None = None
    load_s: float | None = None
    first_inference_s: float | None = None
    host_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    activation_bytes: int | None = None
    on_gpu: bool = False

    @property
    def memory_bytes(self) -> int | None:
        """The peak in the memory of the device that the engine runs on."""
        on_device = self.on_gpu or self.device_peak_bytes is not None
        return self.device_peak_bytes if on_device else self.host_peak_bytes


def of_record(timed: Mapping[str, Any], on_gpu: bool = False, reopen_sd: float = 0.0, confidence: float = 0.95) -> Cost:
    """The costs in a benchmark's record, with an energy or a reason. Raises ValueError if a number isn't finite.

    Energy was metered in one opening, and moves with the time of a call: its interval is widened by what an opening
    changes of that, `reopen_sd` / √2, `reopen_sd` being of the ratio of two.
    """
    start, energy = timed.get("footprint") or {}, timed.get("energy")
    keys = ("load_s", "first_inference_s", "host_peak_bytes", "device_peak_bytes", "activation_bytes")
    numbers = {key: start.get(key) for key in keys}
    if unfit := [key for key, value in numbers.items() if value is not None and not math.isfinite(value)]:
        raise ValueError(f"{', '.join(unfit)} not finite")
    if energy is None:
        return Cost(energy_reason=timed.get("not_run") or OLDER, on_gpu=on_gpu, **numbers)
    raw, net = (_interval(energy, f"{kind}_mj_per_inference") for kind in ("raw", "net"))
    if raw:
        extra = float(ndtri((1 + confidence) / 2)) * reopen_sd / 2**0.5 * raw.value
        raw, net = _widened(raw, extra), _widened(net, extra) if net else None
    return Cost(raw, net, energy["reason"], energy.get("disturbed"), on_gpu=on_gpu, **numbers)


def _widened(found: Interval, extra: float) -> Interval:
    """The interval with another half-width added in quadrature."""
    low, high = math.hypot(found.value - found.low, extra), math.hypot(found.high - found.value, extra)
    return Interval(found.value, found.value - low, found.value + high)


def restored(raw: Mapping[str, Any]) -> Cost:
    """A cost from its JSON form."""
    return Cost(**{**raw, **{key: _interval(raw, key) for key in ("energy_mj", "energy_net_mj")}})


def plain(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of a cost as the summary has it: `memory_bytes` is in it, in place of `on_gpu`."""
    kept = {key: value for key, value in cost.items() if key != "on_gpu"}
    return {**kept, "memory_bytes": restored(cost).memory_bytes}


def _interval(raw: Mapping[str, Any], key: str) -> Interval | None:
    found = raw.get(key)
    if found is None:
        return None
    if not all(math.isfinite(value) for value in found.values()):
        raise ValueError(f"{key} not finite")
    return Interval(**found)

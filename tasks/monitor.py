"""The conditions of a measurement: read before, at every window's ends, and after; and what spoils a window."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from tasks import cpu_state
from tasks.cpu_state import Cpu
from tasks.errors import Unavailable
from tasks.gpu_state import APPLICATION, HARMLESS, HW_BRAKE, HW_HEAT, IDLE, SW_HEAT, SW_POWER, Card, Gpu
from tasks.settings import BenchmarkParams

LIMITS = {"power": (SW_POWER, HW_BRAKE), "thermal": (SW_HEAT, HW_HEAT)}
HEATED = "the CPU was slowed by heat"


@dataclass(frozen=True)
class Reading:
    """The machine at one moment; `gpu` is None where no engine of the measurement runs on one, or it can't be read."""

    cpu: Cpu
    gpu: Gpu | None


@dataclass(frozen=True)
class Conditions:
    """The machine around a measurement: before, over all readings made at windows' ends, and after.

    Ranges are (lowest, highest). `reasons` are all reasons for lower clocks that were seen; `held_back_ms` is the
    time that clocks were held below what was asked for meanwhile, by limit. `others` is the largest number of other
    processes on the GPU, `others_busy` the largest share of its time that one of them took. `steal_share` is the part
    of all cores' time that the hypervisor kept, `switches` how often this process lost a core it wanted, `throttled`
    how often a core was slowed by heat. `reading_ms` is what the slowest reading took, outside of timed calls.
    `missing` says why a value is None.
    """

    before: Reading
    after: Reading
    seconds: float
    readings: int
    reading_ms: float
    gpu_name: str | None
    sm_mhz: tuple[int, int] | None
    memory_mhz: tuple[int, int] | None
    temperature_c: tuple[int, int] | None
    power_w: tuple[float, float] | None
    reasons: tuple[str, ...] | None
    held_back_ms: dict[str, float] | None
    others: int | None
    others_busy: float | None
    steal_share: float | None
    switches: int
    throttled: int | None
    missing: dict[str, str] = field(default_factory=dict)


class Monitor:
    """Reads the machine around a measurement of engines on `devices`; within the block, `disturbed` judges windows.

    It reads only: on entering, whenever `disturbed` is called, and on leaving; no thread of its own runs beside what
    is measured. `card` is the GPU to read; without one it is opened here, if an engine runs on a GPU, and may be read
    within the block.
    """

    def __init__(self, devices: Iterable[str], params: BenchmarkParams, card: Card | None = None) -> None:
        used = set(devices)
        # While an engine runs on the CPU, the GPU's clock may fall with good reason.
        self._params, self._clocked = params, used == {"cuda"}
        self.card, self._owned = card, False
        self._why_no_gpu = "no engine of the measurement runs on a GPU"
        if card is None and "cuda" in used:
            try:
                self.card, self._owned = Card(), True
            except Unavailable as reason:
                self._why_no_gpu = str(reason)
        self._seen: list[Gpu] = []
        # Of all readings so far: the highest clock, the highest while not idle, and whether someone set the clocks.
        self._highest = self._awake = 0
        self._limited = False
        self._readings, self._slowest_ms = 0, 0.0
        self._before: Reading | None = None
        self._after: Reading | None = None
        self._began = self._ended = 0.0

    def __enter__(self) -> Self:
        self._before = self._last = self._read()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        self._after = self._read()
        if self.card and self._owned:
            self.card.close()

    def disturbed(self) -> str | None:
        """What spoilt the time since the call before, None if nothing did; see `spoilt` and docs/method.md."""
        before, self._last = self._last, self._read()
        now = self._last
        if (now.cpu.throttled or 0) > (before.cpu.throttled or 0):
            return HEATED
        if before.gpu is None or now.gpu is None:
            return None
        if not self._clocked:
            return spoilt(before.gpu, now.gpu, 0, 0, self._params)
        # Clocks that someone set, and that the driver names so, are what the card may run at.
        top = 0 if self._limited else now.gpu.top_sm_mhz or 0
        # What NVML names as the most isn't reached by every card, however busy.
        return spoilt(before.gpu, now.gpu, self._highest, min(top, self._awake or top), self._params)

    def conditions(self) -> Conditions:
        """What was read; of a block that is still open, up to now."""
        assert self._before is not None
        after, ended = self._after or self._read(), self._ended or time.perf_counter()
        before, gpus = self._before, self._seen
        missing = {**after.cpu.missing, **(gpus[-1].missing if gpus else {"gpu": self._why_no_gpu})}
        passed = _less(after.cpu.ticks, before.cpu.ticks)
        stolen = _less(after.cpu.stolen_ticks, before.cpu.stolen_ticks)
        counted = [g.others for g in gpus if g.others is not None]
        busy = [g.others_busy for g in gpus[1:] if g.others_busy is not None]
        return Conditions(
            before=before,
            after=after,
            seconds=ended - self._began,
            readings=self._readings,
            reading_ms=self._slowest_ms,
            gpu_name=self.card.name if self.card else None,
            sm_mhz=_range([g.sm_mhz for g in gpus]),
            memory_mhz=_range([g.memory_mhz for g in gpus]),
            temperature_c=_range([g.temperature_c for g in gpus]),
            power_w=_range([g.power_w for g in gpus]),
            reasons=_reasons(gpus),
            held_back_ms=_held_back(gpus[0], gpus[-1]) if gpus else None,
            others=max(counted, default=None),
            others_busy=max(busy, default=None),
            steal_share=None if stolen is None or not passed else stolen / passed,
            switches=after.cpu.switches - before.cpu.switches,
            throttled=_less(after.cpu.throttled, before.cpu.throttled),
            missing=missing,
        )

    def _read(self) -> Reading:
        start = time.perf_counter()
        found = Reading(cpu_state.read(), self.card.read() if self.card else None)
        if found.gpu:
            mhz, reasons = found.gpu.sm_mhz or 0, found.gpu.reasons or ()
            self._seen.append(found.gpu)
            self._highest = max(self._highest, mhz)
            self._awake = max(self._awake, mhz if IDLE not in reasons else 0)
            self._limited |= APPLICATION in reasons
        self._readings += 1
        self._slowest_ms = max(self._slowest_ms, (time.perf_counter() - start) * 1e3)
        return found


def merged(parts: Sequence[Conditions]) -> Conditions:
    """The conditions of a measurement that was made in several parts, one after the other."""
    first, last = parts[0], parts[-1]

    def values(key: str) -> list[Any]:
        return [value for part in parts if (value := getattr(part, key)) is not None]

    def span(key: str) -> Any:
        found = values(key)
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None

    stolen = [(part.steal_share, part.seconds) for part in parts if part.steal_share is not None]
    held = values("held_back_ms")
    return replace(
        first,
        after=last.after,
        seconds=sum(values("seconds")),
        readings=sum(values("readings")),
        reading_ms=max(values("reading_ms")),
        **{key: span(key) for key in ("sm_mhz", "memory_mhz", "temperature_c", "power_w")},
        reasons=tuple(dict.fromkeys(r for told in values("reasons") for r in told)) if values("reasons") else None,
        held_back_ms={key: sum(h.get(key, 0.0) for h in held) for key in held[0]} if held else None,
        others=max(values("others"), default=None),
        others_busy=max(values("others_busy"), default=None),
        steal_share=sum(s * t for s, t in stolen) / sum(t for _, t in stolen) if stolen else None,
        switches=sum(values("switches")),
        throttled=sum(values("throttled")) if values("throttled") else None,
        missing={key: why for part in parts for key, why in part.missing.items()},
    )


def spoilt(before: Gpu, now: Gpu, highest_mhz: int, top_mhz: int, params: BenchmarkParams) -> str | None:
    """Why the time between two readings of a GPU is no measure of an engine, or None.

    It is none if the driver names a reason for lower clocks at its end, other than idleness and the clocks that
    someone set; if a limit held clocks back for more than the share `max_lost` of it; if the multiprocessors' clock
    at either end was below the share `min_clock` of the highest seen, or, where the driver calls the GPU idle, of
    `top_mhz`, what it may run at; or if another process took more than `max_lost` of the multiprocessors' time. A
    limit in `tolerate` doesn't count. Of a clock of 0 MHz nothing is said.
    """
    allowed = {reason for limit in params.tolerate for reason in LIMITS[limit]}
    told = [reason for reason in now.reasons or () if reason not in (*HARMLESS, *allowed)]
    if told:
        return f"the GPU was throttled: {', '.join(told)}"
    for limit, held in _held_back(before, now).items():
        if limit not in params.tolerate and held > params.max_lost * (now.at_s - before.at_s) * 1e3:
            return f"the GPU's {limit} limit held its clocks back"
    clocks = [mhz for mhz in (before.sm_mhz, now.sm_mhz) if mhz]
    held_down = any(reason in allowed for reading in (before, now) for reason in reading.reasons or ())
    idle = [g.sm_mhz for g in (before, now) if g.sm_mhz and IDLE in (g.reasons or ())]
    if idle and min(idle) < params.min_clock * top_mhz and not held_down:
        return "the GPU ran on idle clocks, below benchmark.min_clock of what it may run at"
    if clocks and min(clocks) < params.min_clock * highest_mhz and not held_down:
        return "the GPU's clock was lower than it had been"
    if (now.others_busy or 0) > params.max_lost:
        return "another process worked on the GPU"
    return None


def lines(raw: Mapping[str, Any]) -> list[str]:
    """Sentences on the conditions of a measurement, for reports; `raw` is their JSON form."""
    cpu = [f"load {_at(raw, 'cpu', 'load_average'):.2f} before, {_at(raw, 'cpu', 'load_average', 'after'):.2f} after"]
    cpu.append(f"governor {_at(raw, 'cpu', 'governor') or 'not told'}")
    if _at(raw, "cpu", "mhz"):
        cpu.append(f"{_at(raw, 'cpu', 'mhz'):.0f} MHz before, {_at(raw, 'cpu', 'mhz', 'after'):.0f} after")
    cpu.append("steal not told" if raw["steal_share"] is None else f"{raw['steal_share']:.1%} stolen")
    cpu.append(f"{raw['switches']} involuntary switches")
    if raw["throttled"] is not None:
        cpu.append(f"slowed by heat {raw['throttled']} times")
    if not raw["gpu_name"]:
        return [f"CPU: {', '.join(cpu)}"]
    return [f"CPU: {', '.join(cpu)}", f"{raw['gpu_name']}: {', '.join(_gpu_words(raw))}"]


def slowing(raw: Mapping[str, Any]) -> list[str] | None:
    """The reasons for lower clocks in conditions' JSON form that slow what is measured; None if they aren't known."""
    return None if raw["reasons"] is None else [reason for reason in raw["reasons"] if reason not in HARMLESS]


def _gpu_words(raw: Mapping[str, Any]) -> list[str]:
    def span(key: str, unit: str) -> str:
        found = raw[key]
        return f"{key.split('_')[0]} not told" if found is None else f"{found[0]:.0f} to {found[1]:.0f} {unit}"

    limit = _at(raw, "gpu", "power_limit_w")
    reasons = slowing(raw)
    held = [f"{limit} {ms:.0f} ms" for limit, ms in (raw["held_back_ms"] or {}).items() if ms]
    others = "other processes not told" if raw["others"] is None else f"{raw['others']} other processes"
    busy = f", the busiest {raw['others_busy']:.0%}" if raw["others_busy"] else ""
    return [
        f"multiprocessors {span('sm_mhz', 'MHz')}",
        f"memory {span('memory_mhz', 'MHz')}",
        span("temperature_c", "°C"),
        span("power_w", "W") + (f" of {limit:.0f} W allowed" if limit else ""),
        "throttling not told" if reasons is None else f"throttled: {', '.join(reasons) or 'never'}",
        *([f"held back by {' and '.join(held)} of {raw['seconds'] * 1e3:.0f}"] if held else []),
        others + busy,
    ]


def _at(raw: Mapping[str, Any], part: str, key: str, when: str = "before") -> Any:
    return raw[when][part][key]


def _range(values: Sequence[Any]) -> Any:
    told = [value for value in values if value is not None]
    return (min(told), max(told)) if told else None


def _reasons(gpus: Sequence[Gpu]) -> tuple[str, ...] | None:
    told = [g.reasons for g in gpus if g.reasons is not None]
    return tuple(dict.fromkeys(reason for reasons in told for reason in reasons)) if told else None


def _held_back(before: Gpu, now: Gpu) -> dict[str, float]:
    return {k: v - before.held_back_ms[k] for k, v in now.held_back_ms.items() if k in before.held_back_ms}


def _less(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before

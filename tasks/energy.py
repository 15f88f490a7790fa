"""Energy per inference, from a counter that the hardware keeps.

Counters step: NVML's every 20 to 100 ms, RAPL's every millisecond. So a window begins and ends at a step, and lasts
long enough that what is left of it doesn't matter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from scipy.special import stdtrit

from tasks import meters
from tasks.engines.protocol import DeviceSession, Session
from tasks.errors import Unavailable
from tasks.gpu_state import Card
from tasks.meters import Meter
from tasks.settings import BenchmarkParams
from tasks.stats import Interval
from tasks.target import last_level_cache_bytes
from tasks.timing import make_pool
from tasks.workloads.protocol import Arrays

WINDOWS = 4
RETRIES = 2
CHUNK_S = 0.01
STILL_S = 1.0
DEVICE_CALLS = 10


@dataclass(frozen=True)
class Energy:
    """Energy of one inference, which is one sample, in millijoules; all None, with the `reason`, without a meter.

    `raw` is all that the metered device took, `net` without `idle_w`, what it takes with the engines open and none
    running. Intervals are Student's over the windows, at the benchmark's confidence. `power_w` is the mean under
    load. `discarded` counts windows thrown away, by reason; `disturbed` says that one had to be used.
    """

    meter: str | None
    reason: str | None
    raw_mj_per_inference: Interval | None = None
    net_mj_per_inference: Interval | None = None
    idle_w: float | None = None
    power_w: float | None = None
    batch: int | None = None
    inferences: int = 0
    seconds: float = 0.0
    windows: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    disturbed: str | None = None


def prepare(device: str, card: Card | None, params: BenchmarkParams) -> tuple[Meter, float] | str:
    """The meter of a device and its idle power in watts, with all engines open and none at work; or why there is none.

    To be called before the rounds, while the device has had nothing to do.
    """
    if not params.energy:
        return "benchmark.energy is false"
    try:
        meter = meters.of(device, card)
        return meter, idle_w(meter, params.energy_s)
    except Unavailable as reason:
        return str(reason)


def of(
    session: Session,
    inputs: Arrays,
    params: BenchmarkParams,
    metered: tuple[Meter, float] | str,
    disturbed: Callable[[], str | None],
) -> Energy:
    """The energy of an inference on `inputs` [n, …] in batches as the timing's; `metered` is from `prepare`."""
    if isinstance(metered, str):
        return Energy(meter=None, reason=metered)
    pool = make_pool(inputs, params.batch, 2 * last_level_cache_bytes())
    return measure(session, pool, params, *metered, disturbed)


def idle_w(meter: Meter, seconds: float) -> float:
    """Mean power in watts with nothing running, from one step of the counter to another, after a pause as long."""
    time.sleep(seconds)

    def rest() -> int:
        time.sleep(CHUNK_S)
        return 0

    joules, elapsed, _ = _window(meter, rest, seconds)
    return joules / elapsed


def measure(
    session: Session,
    pool: Sequence[Arrays],
    params: BenchmarkParams,
    meter: Meter,
    idle: float,
    disturbed: Callable[[], str | None],
) -> Energy:
    """Energy per inference of an engine that runs without a pause on the batches of `pool`, in four windows.

    With `clock: device` inputs are on the GPU already, else their copies are part of it, as in the timing.
    A window that `disturbed` tells of is made again, twice at most. A counter that stands still is told as a reason.
    """
    work = _work(session, pool, params.clock)
    discarded: Counter[str] = Counter()
    found, why = [], None
    try:
        _busy(work, params.energy_s / 4)
        for _ in range(WINDOWS):
            window, told = _undisturbed(lambda: _window(meter, work, params.energy_s), disturbed, discarded)
            found.append(window)
            why = told or why
    except Unavailable as reason:
        return Energy(meter=None, reason=str(reason))
    joules, seconds, batches = (np.array(column) for column in zip(*found, strict=True))
    n = batches * params.batch
    return Energy(
        meter=meter.name,
        reason=None,
        raw_mj_per_inference=mean(1e3 * joules / n, params.confidence),
        net_mj_per_inference=mean(1e3 * (joules - idle * seconds) / n, params.confidence),
        idle_w=idle,
        power_w=float(joules.sum() / seconds.sum()),
        batch=params.batch,
        inferences=int(n.sum()),
        seconds=float(seconds.sum()),
        windows=len(found),
        discarded=dict(discarded),
        disturbed=why,
    )


def mean(values: np.ndarray, confidence: float) -> Interval:
    """Mean of measured values [n], with Student's interval; at least 2, all finite, else ValueError."""
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        raise ValueError(f"{n} values, at least 2 and all of them finite are needed")
    value, half = float(values.mean()), float(stdtrit(n - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(n))
    return Interval(value, value - half, value + half)


def restored(raw: Mapping[str, Any]) -> Energy:
    """An energy from its JSON form."""
    keys = ("raw_mj_per_inference", "net_mj_per_inference")
    return Energy(**{**raw, **{key: Interval(**raw[key]) if raw[key] else None for key in keys}})


def lines(recorded: Mapping[str, Any]) -> list[str]:
    """What to say of an engine's energy in a report; `recorded` is its JSON form."""
    found = restored(recorded)
    if found.raw_mj_per_inference is None or found.net_mj_per_inference is None:
        return [f"energy: not known, {found.reason}"]
    raw, net = found.raw_mj_per_inference, found.net_mj_per_inference
    thrown = sum(found.discarded.values())
    return [
        f"energy: {raw.value:.3g} mJ an inference [{raw.low:.3g}, {raw.high:.3g}], {net.value:.3g} mJ "
        f"[{net.low:.3g}, {net.high:.3g}] above idle; {found.power_w:.0f} W, {found.idle_w:.0f} W idle; "
        f"{found.meter}, {found.windows} windows, {found.inferences} inferences in batches of {found.batch}"
        + (f", {thrown} windows thrown away" if thrown else "")
        + (f"; disturbed: {found.disturbed}" if found.disturbed else "")
    ]


def _undisturbed(
    make: Callable[[], tuple[float, float, int]], disturbed: Callable[[], str | None], discarded: Counter[str]
) -> tuple[tuple[float, float, int], str | None]:
    for left in range(RETRIES, -1, -1):
        disturbed()
        window = make()
        told = disturbed()
        if told is None or not left:
            return window, told
        discarded[told] += 1
    raise AssertionError


def _window(meter: Meter, work: Callable[[], int], seconds: float) -> tuple[float, float, int]:
    """Joules, seconds and pieces of work between a step of the counter and the first one after `seconds`."""
    _, began, first = _to_step(meter, work, 0.0)
    done, ended, last = _to_step(meter, work, seconds)
    return last - first, ended - began, done


def _to_step(meter: Meter, work: Callable[[], int], seconds: float) -> tuple[int, float, float]:
    """Work for `seconds`, and on until the counter steps: pieces of work done, the moment, and joules there."""
    done = _busy(work, seconds) if seconds else 0
    start, before = time.perf_counter(), meter.joules()
    while True:
        done += _busy(work, CHUNK_S)
        joules, now = meter.joules(), time.perf_counter()
        if joules != before:
            return done, now, joules
        if now - start > STILL_S:
            raise Unavailable(f"the counter stood still for {STILL_S:g} s ({meter.name})")


def _busy(work: Callable[[], int], seconds: float) -> int:
    done, end = work(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        done += work()
    return done


def _work(session: Session, pool: Sequence[Arrays], clock: str) -> Callable[[], int]:
    """A piece of work, which returns how many batches it computed."""
    turn = 0
    if clock == "device":
        device = cast(DeviceSession, session)
        device.load(pool[0])

        def launches() -> int:
            device.device_ms(DEVICE_CALLS)
            return DEVICE_CALLS

        return launches

    def call() -> int:
        nonlocal turn
        session.run(pool[turn % len(pool)])
        session.synchronize()
        turn += 1
        return 1

    return call

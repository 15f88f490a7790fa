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
# So many before the engine's windows, and as many after; each is half as long as one of the engine's.
IDLE_WINDOWS = 2
IDLE_SHARE = 0.5
SETTLED = 0.01
SETTLE_WINDOWS = 8
RETRIES = 2
CHUNK_S = 0.01
# An idle window is short and has nothing to disturb: its steps are told to a millisecond.
IDLE_CHUNK_S = 0.001
STILL_S = 1.0
DEVICE_CALLS = 10


@dataclass(frozen=True)
class Energy:
    """Energy of one inference, which is one sample, in millijoules; all None, with the `reason`, without a meter.

    `raw` is all that the metered device took, `net` without `idle_w`, what it takes with the engines open and none
    running: the mean of `idle_windows_w`, made before and after the engine's windows. Intervals are at the benchmark's
    confidence: of `raw` Student's over the windows, of `net` see `above_idle`. Where that isn't above 0 it is in
    `unclear_net_mj_per_inference`, `net` is None and `reason` says so. `idle_settled` is False where idle power still
    changed when the wait for it was over. `power_w` is the mean under load. `discarded` counts windows thrown away, by
    reason; `disturbed` says that one had to be used.
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
    unclear_net_mj_per_inference: Interval | None = None
    idle_windows_w: tuple[float, ...] = ()
    idle_settled: bool | None = None


def prepare(device: str, card: Card | None, params: BenchmarkParams) -> Meter | str:
    """The meter of a device, or why there is none."""
    if not params.energy:
        return "benchmark.energy is false"
    try:
        return meters.of(device, card)
    except Unavailable as reason:
        return str(reason)


def of(
    session: Session,
    inputs: Arrays,
    params: BenchmarkParams,
    metered: Meter | str,
    disturbed: Callable[[], str | None],
) -> Energy:
    """The energy of an inference on `inputs` [n, …] in batches as the timing's; `metered` is from `prepare`."""
    if isinstance(metered, str):
        return Energy(meter=None, reason=metered)
    pool = make_pool(inputs, params.batch, 2 * last_level_cache_bytes())
    return measure(session, pool, params, metered, disturbed)


def idle_w(meter: Meter, seconds: float) -> tuple[list[float], bool]:
    """Power in watts with nothing running, in two windows of `seconds` each; and whether it had settled before.

    It has once two windows in a row agree within 1 %, which is waited for during eight at most: a device that was at
    work keeps its clocks and its heat for a while. None of those is among the two.
    """

    def rest() -> int:
        time.sleep(IDLE_CHUNK_S)
        return 0

    def watts() -> float:
        joules, elapsed, _ = _window(meter, rest, seconds, IDLE_CHUNK_S)
        return joules / elapsed

    last, settled = watts(), False
    for _ in range(SETTLE_WINDOWS - 1):
        before, last = last, watts()
        if settled := abs(last - before) <= SETTLED * before:
            break
    return [watts() for _ in range(IDLE_WINDOWS)], settled


def measure(
    session: Session,
    pool: Sequence[Arrays],
    params: BenchmarkParams,
    meter: Meter,
    disturbed: Callable[[], str | None],
) -> Energy:
    """Energy per inference of an engine that runs without a pause on the batches of `pool`, in four windows.

    Idle power is measured right before and right after them, so that a drift of it is within its windows.
    With `clock: device` inputs are on the GPU already, else their copies are part of it, as in the timing.
    A window that `disturbed` tells of is made again, twice at most. A counter that stands still is told as a reason.
    """
    work = _work(session, pool, params.clock)
    discarded: Counter[str] = Counter()
    found, why, quiet = [], None, params.energy_s * IDLE_SHARE
    try:
        first, settled = idle_w(meter, quiet)
        _busy(work, params.energy_s / 4)
        for _ in range(WINDOWS):
            window, told = _undisturbed(lambda: _window(meter, work, params.energy_s), disturbed, discarded)
            found.append(window)
            why = told or why
        last, still = idle_w(meter, quiet)
    except Unavailable as reason:
        return Energy(meter=None, reason=str(reason))
    joules, seconds, batches = (np.array(column) for column in zip(*found, strict=True))
    n, idle = batches * params.batch, np.array([*first, *last])
    net, power = above_idle(joules, seconds, n, idle, params.confidence), float(joules.sum() / seconds.sum())
    clear = net.low > 0
    return Energy(
        meter=meter.name,
        reason=None if clear else _unclear(power, idle),
        raw_mj_per_inference=mean(1e3 * joules / n, params.confidence),
        net_mj_per_inference=net if clear else None,
        unclear_net_mj_per_inference=None if clear else net,
        idle_w=float(idle.mean()),
        idle_windows_w=tuple(idle.tolist()),
        idle_settled=settled and still,
        power_w=power,
        batch=params.batch,
        inferences=int(n.sum()),
        seconds=float(seconds.sum()),
        windows=len(found),
        discarded=dict(discarded),
        disturbed=why,
    )


def above_idle(
    joules: np.ndarray, seconds: np.ndarray, n: np.ndarray, idle_w: np.ndarray, confidence: float
) -> Interval:
    """Millijoules an inference above idle, of windows [w] with `n` inferences each, and of idle windows' power [v].

    Both the windows and the idle power have an error. Half-widths of Student's intervals add in quadrature: with as
    many idle windows as others that is an interval never too narrow (Mickey and Brown 1966, Annals of Mathematical
    Statistics 37:639). Raises ValueError as `mean`.
    """
    idle = mean(idle_w, confidence)
    net = mean(1e3 * (joules - idle.value * seconds) / n, confidence)
    half = float(np.hypot(net.high - net.value, 1e3 * (seconds / n).mean() * (idle.high - idle.value)))
    return Interval(net.value, net.value - half, net.value + half)


def mean(values: np.ndarray, confidence: float) -> Interval:
    """Mean of measured values [n], with Student's interval; at least 2, all finite, else ValueError."""
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        raise ValueError(f"{n} values, at least 2 and all of them finite are needed")
    value, half = float(values.mean()), float(stdtrit(n - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(n))
    return Interval(value, value - half, value + half)


def restored(raw: Mapping[str, Any]) -> Energy:
    """An energy from its JSON form."""
    keys = ("raw_mj_per_inference", "net_mj_per_inference", "unclear_net_mj_per_inference")
    return Energy(**{**raw, **{key: Interval(**raw[key]) if raw.get(key) else None for key in keys}})


def lines(recorded: Mapping[str, Any]) -> list[str]:
    """What to say of an engine's energy in a report; `recorded` is its JSON form."""
    found = restored(recorded)
    if found.raw_mj_per_inference is None:
        return [f"energy: not known, {found.reason}"]
    raw, net = found.raw_mj_per_inference, found.net_mj_per_inference
    thrown = sum(found.discarded.values())
    above = f"{net.value:.3g} mJ [{net.low:.3g}, {net.high:.3g}] above idle" if net else found.reason
    return [
        f"energy: {raw.value:.3g} mJ an inference [{raw.low:.3g}, {raw.high:.3g}], {above}; "
        f"{found.power_w:.0f} W, {found.idle_w:.0f} W idle{'' if found.idle_settled is not False else ', unsettled'}; "
        f"{found.meter}, {found.windows} windows, {found.inferences} inferences in batches of {found.batch}"
        + (f", {thrown} windows thrown away" if thrown else "")
        + (f"; disturbed: {found.disturbed}" if found.disturbed else "")
    ]


def _unclear(power_w: float, idle_w: np.ndarray) -> str:
    among = f"{idle_w.min():.1f} to {idle_w.max():.1f} W in {len(idle_w)} windows"
    return f"not told apart from idle: {power_w:.1f} W at work, {idle_w.mean():.1f} W idle ({among})"


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


def _window(
    meter: Meter, work: Callable[[], int], seconds: float, chunk_s: float = CHUNK_S
) -> tuple[float, float, int]:
    """Joules, seconds and pieces of work between a step of the counter and the first one after `seconds`."""
    _, began, first = _to_step(meter, work, 0.0, chunk_s)
    done, ended, last = _to_step(meter, work, seconds, chunk_s)
    return last - first, ended - began, done


def _to_step(meter: Meter, work: Callable[[], int], seconds: float, chunk_s: float) -> tuple[int, float, float]:
    """Work for `seconds`, and on until the counter steps: pieces of work done, the moment, and joules there.

    The counter is read after every piece of `chunk_s`, which is how exactly the moment is known.
    """
    done = _busy(work, seconds) if seconds else 0
    start, before = time.perf_counter(), meter.joules()
    while True:
        done += _busy(work, chunk_s)
        joules, now = meter.joules(), time.perf_counter()
        if joules != before:
            return done, now, joules
        if now - start > STILL_S:
            raise Unavailable(f"the counter stood still for {STILL_S:g} s ({meter.name})")


def _busy(work: Callable[[], int], seconds: float) -> int:
    end = time.perf_counter() + seconds
    done = work()
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

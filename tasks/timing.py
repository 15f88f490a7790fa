"""The timing of an engine's calls, what they are made on, and how two timings are compared."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from scipy.special import ndtri

from tasks import sequential
from tasks.engines.protocol import DeviceSession, Session
from tasks.errors import Fault
from tasks.manifest import TensorSpec
from tasks.stats import Interval, log_error
from tasks.workloads.protocol import Arrays

DEVICE_CALLS = 10
MAX_POOL_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Latency of one engine's calls, in milliseconds per batch.

    `medians` holds one median a round, paired by round with the other engines' of the same
    measurement. A percentile is None where there are too few samples for it, or where a sample is a mean of
    several calls, as with the device's clock. `bounds` holds intervals of p50, p90, p99 and throughput_per_s, as far as
    they are known (see `clustered`): of what this opening's windows tell, at the benchmark's confidence. `looks` are
    the numbers of rounds after which the measurement could have stopped, up to its end, `horizon` the most there could
    have been. `reopen_sd` is how far two openings of one engine differ, as a share. `discarded` counts windows thrown
    away, by reason; `busy` says that too many were, and that disturbed ones had to be used.
    """

    batch: int
    clock: str
    p50: float | None
    p90: float | None
    p99: float | None
    mean: float
    n: int
    throughput_per_s: float
    warm: bool
    medians: tuple[float, ...]
    looks: tuple[int, ...] = ()
    horizon: int = 0
    reopen_sd: float = 0.0
    discarded: dict[str, int] = field(default_factory=dict)
    busy: str | None = None
    bounds: dict[str, Interval] = field(default_factory=dict)


def restored(raw: Mapping[str, Any]) -> Timing:
    """A timing from its JSON form."""
    bounds = {key: Interval(**found) for key, found in raw.get("bounds", {}).items()}
    return Timing(**{**raw, **{key: tuple(raw.get(key, ())) for key in ("medians", "looks")}, "bounds": bounds})


def inputs_of(specs: Sequence[TensorSpec], samples: Arrays, length: int | None) -> Arrays:
    """The samples' inputs [n, …], cut to `length` along a dynamic axis; contiguous."""
    return {
        spec.name: np.ascontiguousarray(
            samples[spec.name][tuple(slice(length) if isinstance(d, str) else slice(None) for d in spec.shape)]
        )
        for spec in specs
    }


def timed_call(session: Session, batch: Arrays, clock: str = "host") -> float:
    """Milliseconds that one call takes.

    By the host's clock, from NumPy arrays to NumPy arrays, until the session is synchronized; by the device's, the
    GPU's own time of 10 launches on inputs that are already there, by call. Raises Fault for what is no time.
    """
    if clock == "device":
        device = cast(DeviceSession, session)
        device.load(batch)
        taken = device.device_ms(DEVICE_CALLS)
    else:
        start = time.perf_counter_ns()
        session.run(batch)
        session.synchronize()
        taken = (time.perf_counter_ns() - start) / 1e6
    if not 0 < taken < math.inf:
        raise Fault("a call's time is no number", got=taken, expected="milliseconds above 0", do="check the engine")
    return taken


def speedup(timings: Mapping[str, Timing], name: str, versus: str, confidence: float, family: int = 1) -> Interval:
    """How many times faster `name` is than `versus`, paired by round.

    The interval holds with `confidence` for the `family` of speed-ups judged together, whenever the measurement was
    stopped. Raises Fault if the two aren't of one measurement: of other batches, clocks, rounds or looks.
    """
    fast, slow = timings[name], timings[versus]
    for what in ("batch", "clock", "looks", "horizon", "reopen_sd"):
        if getattr(fast, what) != getattr(slow, what):
            raise _apart(name, versus, f"{what} {getattr(fast, what)}", f"{what} {getattr(slow, what)}")
    if len(fast.medians) != len(slow.medians):
        raise _apart(name, versus, f"{len(fast.medians)} rounds", f"{len(slow.medians)} rounds")
    if not fast.medians:
        raise Fault("nothing was timed", got="no rounds", expected="at least 2", do="run the benchmark again")
    looks = fast.looks or (len(fast.medians),)
    return sequential.speedup(slow.medians, fast.medians, looks, fast.horizon, confidence, family, fast.reopen_sd)


@dataclass(frozen=True)
class Opening:
    """An engine's timing and the baseline's, of the same rounds of one opening of both."""

    timing: Timing
    baseline: Timing

    @classmethod
    def of(cls, timings: Mapping[str, Timing], name: str = "engine", versus: str = "baseline") -> Opening:
        """Two of the engines of one opening."""
        return cls(timings[name], timings[versus])

    def speedup(self, confidence: float, family: int = 1) -> Interval:
        """How many times faster the engine is; see `speedup`."""
        return speedup({"engine": self.timing, "baseline": self.baseline}, "engine", "baseline", confidence, family)

    def plain(self) -> Opening:
        """The same with nothing added for looks or openings: what its rounds tell."""
        bare = (replace(timing, looks=(), horizon=0, reopen_sd=0.0) for timing in (self.timing, self.baseline))
        return Opening(*bare)


def logs(openings: Sequence[Opening]) -> list[float]:
    """The logarithm of the speed-up that each opening tells."""
    return [float(np.log(opening.plain().speedup(0.95).value)) for opening in openings]


def over(
    openings: Sequence[Opening], confidence: float, family: int = 1, reopen_sd: float = 0.0, scatter: float = 0.0
) -> Interval:
    """The speed-up over one opening or several: the geometric mean of what each tells.

    The interval of several is a normal one: the errors that each opening's rounds tell, and `reopen_sd`, in quadrature,
    are those of a mean; or it is that of `scatter`, the deviation of one opening's ratio, rounds included, if that is
    more. It holds for the `family` together.
    """
    if len(openings) == 1:
        one = openings[0]
        timings = (replace(timing, reopen_sd=max(reopen_sd, scatter)) for timing in (one.timing, one.baseline))
        return Opening(*timings).speedup(confidence, family)
    plain = [opening.plain().speedup(confidence) for opening in openings]
    errors = np.array([np.hypot(log_error(found, confidence), reopen_sd) for found in plain])
    middle = float(np.mean(np.log([found.value for found in plain])))
    error = max(float(np.sqrt((errors**2).sum())) / len(plain), scatter / len(plain) ** 0.5)
    half = float(ndtri(1 - (1 - confidence) / family / 2)) * error
    return Interval(*(float(np.exp(middle + off)) for off in (0.0, -half, half)))


def too_few(timings: Sequence[Timing], confidence: float, family: int = 1) -> str | None:
    """Why an engine's rounds, one timing an opening, say nothing at `confidence` for the `family`, or None."""
    rounds = sum(len(timing.medians) for timing in timings)
    return sequential.too_few(rounds, confidence_over(timings, confidence, family))


def unusable(timings: Sequence[Timing], confidence: float, family: int = 1) -> str | None:
    """Why no verdict may rest on an engine's timings, one an opening, or None: disturbed, too few, or not settled."""
    busy = next((timing.busy for timing in timings if timing.busy), None)
    cold = None if all(timing.warm for timing in timings) else "its latency did not settle during warm-up"
    return busy or too_few(timings, confidence, family) or cold


def spoilt(openings: Sequence[Opening]) -> str | None:
    """Why no verdict may rest on these, or None: disturbed rounds had to be used, or an engine hadn't settled."""
    busy = next((timing.busy for o in openings for timing in (o.timing, o.baseline) if timing.busy), None)
    cold = dict.fromkeys(
        f"the {who}'s"
        for o in openings
        for who, timing in (("engine", o.timing), ("baseline", o.baseline))
        if not timing.warm
    )
    return busy or (f"{' and '.join(cold)} latency did not settle during warm-up" if cold else None)


def confidence_over(timings: Sequence[Timing], confidence: float, family: int = 1) -> float:
    """The confidence of the single interval that `over` gives, of an engine's timings in each opening."""
    if len(timings) == 1:
        return confidence_of(timings[0], confidence, family)
    return 1 - (1 - confidence) / family


def confidence_of(timing: Timing, confidence: float, family: int = 1) -> float:
    """The confidence of the single interval that `speedup` gives: more than asked for, by the looks and the family."""
    return sequential.confidence_at(timing.looks or (len(timing.medians),), timing.horizon, confidence, family)


def make_pool(inputs: Arrays, batch: int, min_bytes: int) -> list[Arrays]:
    """Batches of exactly `batch` samples, each with memory of its own, of `min_bytes` in all.

    Capped at 256 MiB. Samples repeat when there are too few of them.
    """
    n = len(next(iter(inputs.values())))
    sample_bytes = sum(v[:1].nbytes for v in inputs.values())
    count = max(4, min(min_bytes, MAX_POOL_BYTES) // max(1, sample_bytes * batch) + 1)
    repeated = {k: v[np.arange(count * batch) % n] for k, v in inputs.items()}
    return [{k: v[i : i + batch] for k, v in repeated.items()} for i in range(0, count * batch, batch)]


def relative_width(interval: Interval) -> float:
    """An interval's width over its value."""
    return (interval.high - interval.low) / interval.value


def _apart(name: str, versus: str, got: str, expected: str) -> Fault:
    return Fault(
        f"{name} and {versus} weren't timed together",
        got=got,
        expected=f"{expected}, as {versus}",
        do="compare timings of one measurement only",
    )

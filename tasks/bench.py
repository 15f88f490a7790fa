"""Compare engine folders directly, outside the pipeline: each against the first, in common rounds."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tasks import manifest, measure, target
from tasks.clustered import in_two_lines
from tasks.data import read
from tasks.disturbance import governor
from tasks.engines.protocol import open_engine
from tasks.errors import Fault, Unavailable
from tasks.gates import shown
from tasks.manifest import Manifest, TensorSpec
from tasks.monitor import Conditions, Monitor, lines, merged
from tasks.openings import bounds_of, latency_of
from tasks.reopening import Plan, Timings, again, share
from tasks.settings import BenchmarkParams
from tasks.stats import Interval
from tasks.timing import Timing
from tasks.together import Together
from tasks.workloads.protocol import Arrays

SAMPLES = 64
# What openings of one ResNet-50 in processes of their own differed by on an H200, as a ratio of two (docs/method.md).
REOPEN_SD_ON_GPU = 0.034


@dataclass(frozen=True)
class Environment:
    """The machine, and what else ran on it: the load average before and after, and more in `conditions`."""

    target_id: str
    name: str
    cores: int
    system: str
    python: str
    governor: str | None
    load_average: tuple[float, float]
    conditions: Conditions | None = None


@dataclass(frozen=True)
class Row:
    """One engine: its timing in each opening, and how many times the first one's speed it has."""

    engine: str
    backend: str
    engine_sha256: str
    timings: list[Timing]
    ratio: Interval | None
    verdict: str


@dataclass(frozen=True)
class BenchReport:
    """Engines timed in common rounds; `confidence` is that of all ratios together.

    All were opened as often as each row has timings: ratios allow for openings that differ by `reopen_sd`, or by what
    they were seen to. `data` is "random", or the name of the file the inputs came from. `broken` says why there are
    fewer openings than were asked for, if one failed.
    """

    rows: list[Row]
    batch: int
    clock: str
    data: str
    confidence: float
    reopen_sd: float
    interrupted: bool
    broken: str | None
    environment: Environment


def bench(
    folders: Sequence[Path], data: Path | None, params: BenchmarkParams, reopen_sd: float | None = None
) -> BenchReport:
    """Time the engines in `folders` on the inputs of an .npz file, or on random ones.

    They are opened `params.openings` times, each after the first in a process of its own. `reopen_sd` stands in for the
    one of `params`; see `allowed_for`. An interruption (Ctrl-C) ends the rounds of the first opening, or drops a later
    one, as does what goes wrong in a later one; what was measured until then is returned. Raises Fault for engines that
    don't take the same inputs, or not that batch, and for inputs that don't fit them; Unavailable for one that can't
    run here.
    """
    names = _names(folders)
    described = {name: manifest.read(folder) for name, folder in zip(names, folders, strict=True)}
    _require_alike(described, params.batch)
    first = described[names[0]]
    inputs = measure.inputs_of(first.inputs, _inputs(first, data, params.length), params.length)
    assumed = allowed_for(list(described.values()), params, reopen_sd)
    params = params.model_copy(update={"reopen_sd": assumed})
    before, interrupted, family = measure.load_average(), False, max(1, len(names) - 1)
    plan = Plan(dict(zip(names, folders, strict=True)), inputs, [share(params)], family)
    openings, conditions, broken = list[Timings](), list[Conditions](), None
    try:
        with ExitStack() as stack:
            sessions = {n: stack.enter_context(open_engine(f)) for n, f in zip(names, folders, strict=True)}
            watch = stack.enter_context(Monitor([session.device for session in sessions.values()], params))
            measured = measure.Measurement(sessions, inputs, plan.batches[0], family=family, disturbed=watch.disturbed)
            try:
                measured.run()
            except KeyboardInterrupt:
                interrupted = True
            openings.append(measured.timings())
            conditions.append(watch.conditions())
        for (timings,), seen in again(plan) if not interrupted else ():
            openings.append(timings)
            conditions.append(seen)
    except KeyboardInterrupt:
        if not conditions:
            raise
        interrupted = True
    except (Fault, Unavailable, RuntimeError) as error:
        if not conditions:
            raise
        broken = str(error)
    together = Together(openings, params.confidence, assumed, n_pairs=family)
    rows = [_row(name, described[name], together, names[0]) for name in names]
    source = data.name if data else "random"
    around = environment((before, measure.load_average()), merged(conditions))
    return BenchReport(
        rows, params.batch, params.clock, source, params.confidence, assumed, interrupted, broken, around
    )


def allowed_for(engines: Sequence[Manifest], params: BenchmarkParams, reopen_sd: float | None = None) -> float:
    """The `reopen_sd` asked for; else 0.034 with an engine on a GPU, where kernels are chosen at each opening.

    For others it is that of `params`.
    """
    if reopen_sd is not None:
        return reopen_sd
    return REOPEN_SD_ON_GPU if any(one.device == "cuda" for one in engines) else params.reopen_sd


def environment(load: tuple[float, float], conditions: Conditions | None = None) -> Environment:
    """This machine, with its load average before and after a measurement."""
    here = target.fingerprint()
    python = platform.python_version()
    return Environment(here.id, here.name, here.cores, here.system, python, governor(), load, conditions)


def show(report: BenchReport, console: Console) -> None:
    """Print a report as a table, with its environment below."""
    table = Table("engine", "backend", "p50 ms", "p90 ms", "p99 ms", "calls", "thrown away", "speed", "verdict")
    for row in report.rows:
        told, bounds = latency_of(row.timings), bounds_of(row.timings)
        cells = (in_two_lines(told[key], bounds.get(key), 4) for key in ("p50", "p90", "p99"))
        thrown = sum(sum(timing.discarded.values()) for timing in row.timings)
        gain = shown("speedup", row.ratio) if row.ratio else "1"
        calls = sum(timing.n for timing in row.timings)
        table.add_row(row.engine, row.backend, *cells, str(calls), str(thrown), gain, row.verdict)
    console.print(table)
    e, timings = report.environment, report.rows[0].timings
    rounds = " + ".join(str(len(timing.medians)) for timing in timings)
    seen = "" if len(timings) == 1 else ", or scatter by more in these"
    console.print(
        f"batch {report.batch}, {report.data} inputs, the {report.clock}'s clock, {rounds} rounds"
        f"{', interrupted' if report.interrupted else ''}; speed is the first engine's time over this one's, "
        f"all intervals together at {report.confidence:.0%}, allowing for openings that differ by "
        f"{report.reopen_sd:.1%} (--reopen-sd){seen}; engines were opened {len(timings)}×",
        *(
            [f"a later opening failed, so that there are no more (--openings 1 needs none): {report.broken}"]
            if report.broken
            else []
        ),
        f"{e.target_id} ({e.name}), {e.system}, Python {e.python}",
        *(lines(asdict(e.conditions)) if e.conditions else []),
        sep="\n",
        highlight=False,
    )


def random_inputs(described: Manifest, length: int | None, n: int = SAMPLES, seed: int = 0) -> Arrays:
    """Random inputs [n, …] for an engine: normal floats, and integers 0 or 1, which any vocabulary has."""
    rng = np.random.default_rng(seed)

    def draw(spec: TensorSpec) -> np.ndarray:
        sizes = [length or described.axes[d] if isinstance(d, str) else d for d in spec.shape[1:]]
        shape = (n, *(size or 1 for size in sizes))
        kind = manifest_type(spec.dtype)
        return rng.integers(0, 2, shape).astype(kind) if kind.kind in "biu" else rng.normal(size=shape).astype(kind)

    return {spec.name: draw(spec) for spec in described.inputs}


def manifest_type(name: str) -> np.dtype[np.generic]:
    """The NumPy type of a name in a manifest; bfloat16 and the like come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _inputs(described: Manifest, data: Path | None, length: int | None) -> Arrays:
    for axis, longest in described.axes.items():
        if length is not None and length > longest:
            raise _unfit(f"--length is longer than the engines' axis {axis}", length, f"at most {longest}", "lower it")
    if data is None:
        return random_inputs(described, length)
    if not data.is_file():
        raise _unfit(f"no data file {data}", "nothing there", "an .npz file of the inputs by name", "name another")
    samples = read(data)
    for spec in described.inputs:
        found = samples.get(spec.name, np.zeros(0))
        got = f"{found.dtype.name} {found.shape}" if spec.name in samples else f"{', '.join(samples) or 'nothing'}"
        alike = found.dtype.name == spec.dtype and found.ndim == len(spec.shape)
        if not alike or any(isinstance(d, int) and d != g for d, g in zip(spec.shape, found.shape, strict=True)):
            expected = f"{spec.dtype} {spec.shape}, None being the number of samples"
            raise _unfit(f"{data.name}: input {spec.name} doesn't fit", got, expected, "give the engines' own inputs")
        if not len(found):
            raise _unfit(f"{data.name}: input {spec.name} is empty", "0 samples", "at least one", "give some")
    return samples


def _require_alike(described: dict[str, Manifest], batch: int) -> None:
    (first, reference), *others = described.items()
    for name, other in others:
        if sorted(map(str, other.inputs)) != sorted(map(str, reference.inputs)) or other.axes != reference.axes:
            raise _unfit(
                f"{name} and {first} don't take the same inputs",
                f"{name}: {_told(other)}",
                f"{first}: {_told(reference)}",
                "compare engines of one workload only",
            )
    for name, one in described.items():
        if batch > one.max_batch:
            raise _unfit(f"{name} doesn't take that batch", batch, f"1 to {one.max_batch}", "lower --batch")


def _told(described: Manifest) -> str:
    return ", ".join(f"{i.name} {i.dtype} {i.shape}" for i in described.inputs)


def _row(name: str, described: Manifest, together: Together, first: str) -> Row:
    own, why = [timings[name] for timings in together.openings], together.unusable(name)
    if name == first:
        gain, verdict = None, f"unstable: {why}" if why else "the first"
    else:
        gain = together.gain(name, first)
        told = "faster" if gain.low > 1 else "slower" if gain.high < 1 else "not told apart"
        odd = together.unusable(first)
        why = why or (f"{first}: {odd}" if odd else None)
        verdict = f"unstable: {why}" if why else told
    return Row(name, described.backend, described.engine_sha256, own, gain, verdict)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths where two have one name; the same folder twice is told by a number."""
    counts = Counter(folder.name for folder in folders)
    named = [folder.name if counts[folder.name] == 1 else folder.as_posix() for folder in folders]
    return [f"{name} #{named[: i + 1].count(name)}" if named.count(name) > 1 else name for i, name in enumerate(named)]


def _unfit(what: str, got: object, expected: str, do: str) -> Fault:
    return Fault(what, got=got, expected=expected, do=do)

"""How near an engine is to what its device could do: the roofline model, layer by layer.

A layer can't be faster than its operations at the device's peak rate, nor than its bytes at the bandwidth of the
memory that they come from: its bound is the longer of the two (Williams, Waterman and Patterson 2009,
doi:10.1145/1498765.1498785). An engine's bound is the sum of its layers', which run in turn. It says how much is left
to gain; it is no measurement, and no gate can name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import datasheets, layers, layout, manifest, openings, peaks, systolic
from tasks.errors import Fault, Unavailable
from tasks.files import read_json, sha256
from tasks.manifest import Manifest
from tasks.params import Tree
from tasks.peaks import Peaks
from tasks.settings import MODEL_STEPS
from tasks.target import fingerprint

if TYPE_CHECKING:
    from tasks.datasheets import Datasheet
    from tasks.onnx_work import Work

FROM_PYTORCH = ("eager", "inductor")
UNTOLD = "no layers are told of it, so each node of its source stands alone: the bound is one without fusion, too high"


@dataclass(frozen=True)
class LayerBound:
    """A layer for one batch. `limit` is compute, memory, cache, or none for what moves nothing.

    `flops` are twice the multiply-adds, `intensity` is flops a byte, `tiles` the share of a matrix unit's tiles that
    isn't padding, `unrolled_bytes` what an implicit GEMM doesn't write.
    """

    name: str
    kind: str
    precision: str
    flops: int
    bytes: int
    intensity: float | None
    bound_ms: float
    limit: str
    measured_ms: float | None
    tiles: float | None
    unrolled_bytes: int


@dataclass(frozen=True)
class Predicted:
    """The bound on a GPU that isn't here, by its datasheet; None with the reason if the sheet lacks a format."""

    label: str
    device: str
    bound_ms: float | None
    limit: str | None
    why_not: str | None
    source: str


@dataclass(frozen=True)
class Roofline:
    """An engine's layers and their bounds on this machine, and what its batch took by the benchmark.

    `over` is measured over bound; both are None if that batch wasn't measured here, and `over` also where not all
    products could be counted. `limit` is what most of the bound is due to. `notes` are sentences on what to be
    careful with.
    """

    name: str
    target_id: str
    device: str
    threads: int
    batch: int
    lengths: dict[str, int]
    flops: int
    bytes: int
    bound_ms: float
    limit: str
    measured_ms: float | None
    over: float | None
    layers: tuple[LayerBound, ...]
    predicted: tuple[Predicted, ...]
    unit: int
    notes: tuple[str, ...]


def of_engine(tree: Tree, name: str, batch: int | None = None, unit: int = systolic.UNIT) -> Roofline | None:
    """The roofline of a built engine at `batch`, or the benchmark's; None if its device wasn't probed on this machine.

    Raises Fault if the engine or what it was made from isn't there, or isn't what the engine was built from, and
    Unavailable if its device's probe failed.
    """
    described, machine = manifest.read(layout.artifact(name)), fingerprint()
    here, probed = machine.id, peaks.known(machine)
    ceiling = probed.find(described.device, described.threads)
    if ceiling is None:
        if why := probed.why_not(described.device, described.threads):
            raise Unavailable(f"the peaks of its device couldn't be probed: {why}")
        return None
    many, lengths = batch or tree.params.benchmark.batch, lengths_of(tree, described)
    works, notes, lost = works_of(tree, name, described, many, lengths)
    times = layer_times(name, described, here, many, lengths)
    bounds = tuple(_layer(work, ceiling, times.get(work.name), unit) for work in works)
    measured, doubt = _measured(name, described, here, many)
    total = sum(layer.bound_ms for layer in bounds)
    return Roofline(
        name=name,
        target_id=here,
        device=described.device,
        threads=described.threads,
        batch=many,
        lengths=lengths,
        flops=sum(layer.flops for layer in bounds),
        bytes=sum(layer.bytes for layer in bounds),
        bound_ms=total,
        limit=_main([(layer.limit, layer.bound_ms) for layer in bounds]),
        measured_ms=measured,
        over=measured / total if measured and total and not lost else None,
        layers=bounds,
        predicted=tuple(predict(works, sheet) for sheet in datasheets.SHEETS),
        unit=unit,
        notes=tuple(notes + _left_out(lost) + doubt + _doubts(ceiling, works)),
    )


def lengths_of(tree: Tree, described: Manifest) -> dict[str, int]:
    """The size of an engine's dynamic axis in the benchmark, by its name; empty without one."""
    length = tree.params.benchmark.length
    return {axis: min(length or size, size) for axis, size in described.axes.items()}


def works_of(
    tree: Tree, name: str, described: Manifest, batch: int, lengths: Mapping[str, int]
) -> tuple[list[Work], list[str], list[str]]:
    """What each layer of an engine has to do, what to be careful with, and names of products that couldn't be counted.

    From the ONNX file that it was built from, or from the model that its program or checkpoint is of.
    """
    if described.backend in FROM_PYTORCH:
        from tasks import checkpoint, module_work

        model = [n for n in tree.lineage(name) if tree.nodes[n].step in MODEL_STEPS][-1]
        loaded = checkpoint.load(layout.artifact(model))
        length, compiled = next(iter(lengths.values()), None), described.backend == "inductor"
        asked = described.precision_asked
        return module_work.of_modules(loaded.model, loaded.workload, batch, length, asked, compiled), [], []
    from tasks import onnx_file, onnx_work

    source = layout.artifact(str(tree.nodes[name].parent))
    if not source.is_dir() or sha256(source) != described.onnx_sha256:
        raise Fault(
            f"engine {name} wasn't built from what is in {source}",
            got="another file, or none",
            expected=f"sha256 {str(described.onnx_sha256)[:12]}…",
            do=f"rebuild: {described.rebuild}",
        )
    told = layers.read(layout.artifact(name))
    works, lost = onnx_work.of_model(onnx_file.load(source), told, batch, lengths)
    return works, [] if told else [UNTOLD], lost


def bound(work: Work, flops_per_s: Mapping[str, float], bytes_per_s: float) -> tuple[float, str]:
    """Seconds that a layer takes at least, and which of the two limits. A format without a rate has the highest one."""
    flops = 2 * work.multiply_adds
    rate = flops_per_s.get(work.precision) or max(flops_per_s.values())
    computing, moving = flops / rate, work.bytes / bytes_per_s
    if not computing and not moving:
        return 0.0, "none"
    return max((computing, "compute"), (moving, "memory"))


def _layer(work: Work, ceiling: Peaks, measured_ms: float | None, unit: int) -> LayerBound:
    cached = work.bytes <= ceiling.cache_bytes
    seconds, limit = bound(work, ceiling.flops_per_s, (ceiling.cache if cached else ceiling.memory).best)
    return LayerBound(
        name=work.name,
        kind=work.kind,
        precision=work.precision,
        flops=2 * work.multiply_adds,
        bytes=work.bytes,
        intensity=2 * work.multiply_adds / work.bytes if work.bytes else None,
        bound_ms=seconds * 1e3,
        limit="cache" if cached and limit == "memory" else limit,
        measured_ms=measured_ms,
        tiles=systolic.utilisation(work.products, unit),
        unrolled_bytes=systolic.avoided_bytes(work.products),
    )


def predict(works: Sequence[Work], sheet: Datasheet) -> Predicted:
    """The bound on a GPU by its datasheet, all bytes at its memory's bandwidth."""
    rates = sheet.flops_per_s
    missing = sorted({w.precision for w in works if w.multiply_adds and w.precision not in rates})
    if missing:
        why = f"its source tells no dense rate for {', '.join(missing)}"
        return Predicted(datasheets.LABEL, sheet.name, None, None, why, sheet.source)
    found = [bound(work, rates, sheet.bytes_per_s) for work in works]
    total, limit = sum(seconds for seconds, _ in found), _main([(limit, seconds) for seconds, limit in found])
    return Predicted(datasheets.LABEL, sheet.name, total * 1e3, limit, None, sheet.source)


def _main(parts: Sequence[tuple[str, float]]) -> str:
    """The limit that most of the time is due to."""
    shares: dict[str, float] = {}
    for limit, taken in parts:
        shares[limit] = shares.get(limit, 0.0) + taken
    return max(shares, key=lambda limit: shares[limit], default="none")


def _measured(name: str, described: Manifest, here: str, batch: int) -> tuple[float | None, list[str]]:
    """Milliseconds per batch by the benchmark's record of this engine on this machine, and doubts about it."""
    file = layout.report("benchmark", name)
    if not file.is_file():
        return None, []
    raw = read_json(file)
    if raw.get("engine_sha256") != described.engine_sha256 or raw.get("target_id") != here or not raw.get("timing"):
        return None, []
    for found in (raw, *raw["also"]):
        if found["timing"]["batch"] == batch:
            p50: float | None = openings.latency(found)["p50"] or found["timing"]["mean"]
            doubts = [f"its timing is unstable: {found['unstable']}"] if found["unstable"] else []
            if described.device == "cuda" and found["timing"]["clock"] == "host":
                doubts.append("its timing holds copies to the GPU and back, the bound doesn't")
            return p50, doubts
    return None, []


def _left_out(lost: Sequence[str]) -> list[str]:
    return [f"products of unknown size are left out, {len(lost)} in all, such as {lost[0]}"] if lost else []


def _doubts(ceiling: Peaks, works: Sequence[Work]) -> list[str]:
    lacking = sorted({w.precision for w in works if w.multiply_adds} - set(ceiling.matrix))
    doubts = [f"no peak of this device for {', '.join(lacking)}: its highest rate stands in"] if lacking else []
    return doubts + (["the peaks were probed on a busy machine: `peaks --force`"] if ceiling.disturbed else [])


def times_file(name: str) -> Path:
    """Where the times of an engine's layers are kept, from its last profile."""
    return layout.STATE / "roofline" / f"{name}.json"


def profile_key(described: Manifest, here: str, batch: int, lengths: Mapping[str, int]) -> dict[str, Any]:
    """What a profile has to be of."""
    return {"engine": described.engine_sha256, "target": here, "batch": batch, "lengths": dict(lengths)}


def layer_times(name: str, described: Manifest, here: str, batch: int, lengths: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds by layer from the last profile of exactly this; empty without one."""
    try:
        raw = read_json(times_file(name))
        return dict(raw["layers_ms"]) if raw["of"] == profile_key(described, here, batch, lengths) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}

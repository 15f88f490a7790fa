"""Reads what was recorded of every engine, and computes each variant's numbers from it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tasks import costs, layout, manifest, openings
from tasks.costs import Cost
from tasks.data import read
from tasks.errors import Fault
from tasks.files import digest_of, read_json, size_bytes
from tasks.params import Tree
from tasks.scatter import Scatter, allowance, of_run
from tasks.settings import MODEL_STEPS, ExportParams
from tasks.stats import Interval, mean_score, paired_change
from tasks.target import Target
from tasks.timing import over, too_few

Reopened = Mapping[int, Scatter]
KINDS = {**dict.fromkeys(MODEL_STEPS, "model"), "export": "onnx", "quantize": "onnx"}


@dataclass(frozen=True)
class Evidence:
    """What `build` found out about an engine: where it runs, in which precision, how near to PyTorch.

    `precision_found` counts products by precision; `not_as_asked` and `slow` are sentences, or None. `parity` holds
    `{output, difference, tolerance, worst_sample, worst_batch, halved}` of each output, empty if the engine was not
    run where it was built. `nodes` of the source, None if unknown, became `kernels`.
    """

    device: str
    precision_asked: str
    precision_found: dict[str, int]
    not_as_asked: str | None
    slow: str | None
    parity: tuple[dict[str, Any], ...]
    nodes: int | None
    kernels: int
    signed: bool


@dataclass(frozen=True)
class Variant:
    """One engine with its numbers. Sizes in bytes by kind of artifact; shares in 0 … 1.

    `latency_ms`, `throughput_per_s` and `speedup` are of one batch size, `latency_ms["batch"]`;
    `speedup_at` and `throughput_at` hold those at others, by batch, without the ones whose timing was unstable.
    `latency_bounds_ms` holds intervals of the percentiles in `latency_ms`, by name, and `throughput_bounds` those of
    throughput, by batch, `latency_ms["batch"]` too, as far as they are known. `clock` is the one of all times. `also`
    names variants whose engine has the same bytes and settings.
    """

    name: str
    lineage: tuple[str, ...]
    backend: str
    also: tuple[str, ...] = ()
    accuracy: Interval | None = None
    samples: int = 0
    accuracy_change: Interval | None = None
    latency_ms: dict[str, float | int | None] | None = None
    throughput_per_s: float | None = None
    speedup: Interval | None = None
    speedup_at: dict[str, Interval] = field(default_factory=dict)
    throughput_at: dict[str, float] = field(default_factory=dict)
    latency_bounds_ms: dict[str, Interval] = field(default_factory=dict)
    throughput_bounds: dict[str, Interval] = field(default_factory=dict)
    clock: str = "host"
    versus: str = ""
    size_bytes: dict[str, int] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    evidence: Evidence | None = None
    verdict: str = "failed"
    reasons: tuple[str, ...] = ()
    engine_sha256: str | None = None
    test_sha256: str | None = None
    content: str | None = None

    @property
    def batch(self) -> str:
        """The batch size of its times, as text; empty without any."""
        return str(self.latency_ms["batch"]) if self.latency_ms else ""


def plain(variant: Variant) -> dict[str, Any]:
    """A variant as a JSON-like value."""
    return asdict(variant)


def restore(raw: dict[str, Any]) -> Variant:
    """A variant from `plain`'s value."""
    intervals: dict[str, Any] = {
        k: Interval(**raw[k]) if raw[k] else None for k in ("accuracy", "accuracy_change", "speedup")
    }
    for several in ("speedup_at", "latency_bounds_ms", "throughput_bounds"):
        intervals[several] = {key: Interval(**value) for key, value in raw.get(several, {}).items()}
    evidence = raw.get("evidence")
    intervals["evidence"] = Evidence(**{**evidence, "parity": tuple(evidence["parity"])}) if evidence else None
    intervals["cost"] = costs.restored(raw.get("cost", {}))
    return Variant(**{**raw, **intervals, **{k: tuple(raw[k]) for k in ("lineage", "reasons", "also")}})


def variants(tree: Tree, told: Reopened | None = None) -> list[Variant]:
    """Every engine of the tree, in its order; engines of equal bytes that run under equal settings are one variant.

    A variant without usable results comes as `failed` or `not_run` with the reason, others
    with an empty verdict for the gates to fill; reasons name further batches whose timing is unstable. `told` is what
    `reopened` gives, where that is known already.
    """
    told = reopened(tree) if told is None else told
    found = [_variant(tree, name, told) for name in tree.engines]
    groups: dict[Any, list[Variant]] = {}
    for variant in found:
        key = _content_key(variant.name) if variant.verdict != "failed" else variant.name
        groups.setdefault(key, []).append(variant)
    return [_merged(tree, group) for group in groups.values()]


def require_target(name: str, here: Target) -> None:
    """Raise Fault if an engine's times were measured on another machine than `here`."""
    report = layout.report("benchmark", name)
    measured = read_json(report).get("target_id") if report.is_file() else None
    if measured not in (None, here.id):
        raise Fault(
            f"{name} was measured on another machine",
            got=measured,
            expected=f"{here.id}, this one",
            do=f"make it here: `make run`, or `dvc repro --force build@{name} evaluate@{name} benchmark@{name}`",
        )


def reopened(tree: Tree) -> Reopened:
    """How far openings of the tree's engines differ, by batch, of those with usable results; see `scatter.of_run`."""
    several = [name for name in tree.engines if _opened_again(layout.report("benchmark", name))]
    usable = [name for name in several if _variant(tree, name, {}).verdict not in ("failed", "not_run")]
    return of_run({name: read_json(layout.report("benchmark", name)) for name in usable})


def _opened_again(report: Path) -> bool:
    """Whether a benchmark's report is of several openings; one that can't be read isn't."""
    try:
        return report.is_file() and bool(read_json(report).get("again"))
    except (ValueError, AttributeError):
        return False


def _merged(tree: Tree, group: list[Variant]) -> Variant:
    """One variant for equal engines: the baseline, or the plain engine, or one that is stable."""

    def rank(variant: Variant) -> tuple[bool, bool, bool]:
        plain_engine = variant.name == tree.plain(variant.backend)
        return variant.name != tree.params.baseline, not plain_engine, bool(variant.verdict)

    kept = min(group, key=rank)
    return replace(kept, also=tuple(v.name for v in group if v is not kept))


def _variant(tree: Tree, name: str, reopened: Reopened) -> Variant:
    lineage, backend = tree.lineage(name), tree.params.build[name].backend
    base = Variant(name, lineage, backend, versus=tree.params.baseline)
    missing = [s for s in ("build", "evaluate", "benchmark") if not layout.report(s, name).is_file()]
    failures = _failures(tree, name)
    if missing or failures:
        return replace(
            base, reasons=tuple(failures) or (f"no result of {missing[0]}: run `dvc repro {missing[0]}@{name}`",)
        )
    try:
        return _measured(tree, base, reopened)
    except Fault as fault:
        return replace(base, reasons=(fault.line,))
    except (ValueError, KeyError, TypeError) as error:
        return replace(base, reasons=(f"its records are not usable ({type(error).__name__}: {error})",))


def _measured(tree: Tree, variant: Variant, reopened: Reopened) -> Variant:
    """Fill in a variant's numbers; Fault if its records don't belong together."""
    name, baseline = variant.name, tree.params.baseline
    described = manifest.read(layout.artifact(name))
    built, evaluated, timed = (read_json(layout.report(step, name)) for step in ("build", "evaluate", "benchmark"))
    reference = read_json(layout.report("evaluate", baseline)) if layout.report("evaluate", baseline).is_file() else {}
    for what, record, key, expected in (
        ("proof", built, "engine_sha256", described.engine_sha256),
        ("accuracy", evaluated, "engine_sha256", described.engine_sha256),
        ("latency", timed, "engine_sha256", described.engine_sha256),
        ("baseline's latency", timed, "baseline_sha256", reference.get("engine_sha256")),
        ("test data", evaluated, "test_sha256", reference.get("test_sha256")),
        ("latency", timed, "target_id", reference.get("target_id")),
        ("accuracy", evaluated, "target_id", reference.get("target_id")),
    ):
        if record[key] != expected:
            raise Fault(
                f"the {what} of {name} was recorded of something else",
                got=str(record[key])[:12],
                expected=str(expected)[:12],
                do=f"run `dvc repro {'build' if record is built else 'benchmark'}@{name} evaluate@{name}`",
            )
    evidence = _evidence(built)
    variant = replace(
        variant,
        evidence=evidence,
        size_bytes=_sizes(tree, variant.lineage, described),
        cost=costs.of_record(
            timed,
            described.device == "cuda",
            tree.params.benchmark.reopen_sd,
            tree.params.benchmark.confidence,
        ),
        engine_sha256=described.engine_sha256,
        test_sha256=evaluated["test_sha256"],
    )
    not_run = evaluated["not_run"] or timed["not_run"]
    told = tuple(reason for reason in (evidence.not_as_asked, evidence.slow) if reason)
    if not_run:
        return replace(variant, verdict="not_run", reasons=(not_run, *told))
    scores, against = read(layout.scores(name))["scores"], read(layout.scores(baseline))["scores"]
    unstable = timed["unstable"] or _undecided(tree, timed)
    doubts = {at["timing"]["batch"]: at["unstable"] or _undecided(tree, at) for at in timed["also"]}
    stable = {str(at["timing"]["batch"]): at for at in timed["also"] if not doubts[at["timing"]["batch"]]}
    bounds = openings.bounds(timed)
    by_batch = {str(timed["timing"]["batch"]): bounds, **{b: openings.bounds(at) for b, at in stable.items()}}
    return replace(
        variant,
        accuracy=mean_score(scores, tree.params.evaluate.confidence),
        samples=len(scores),
        accuracy_change=paired_change(scores, against, tree.params.evaluate.confidence),
        latency_ms=openings.latency(timed),
        throughput_per_s=openings.throughput(timed),
        speedup=_gain(tree, name, timed, reopened),
        speedup_at={batch: _gain(tree, name, at, reopened) for batch, at in stable.items()},
        throughput_at={batch: openings.throughput(at) for batch, at in stable.items()},
        latency_bounds_ms={key: found for key, found in bounds.items() if key != openings.RATE},
        throughput_bounds={batch: at[openings.RATE] for batch, at in by_batch.items() if openings.RATE in at},
        clock=timed["timing"]["clock"],
        verdict="unstable" if unstable else "",
        reasons=(
            *([unstable] if unstable else ()),
            *(f"at batch {batch}: {why}" for batch, why in doubts.items() if why),
            *told,
        ),
    )


def _evidence(built: dict[str, Any]) -> Evidence:
    kept = {f.name: built[f.name] for f in fields(Evidence)}
    return Evidence(**{**kept, "parity": tuple(built["parity"] or ())})


def _gain(tree: Tree, name: str, timed: dict[str, Any], reopened: Reopened) -> Interval:
    """The speed-up, as sure as all engines' together have to be: the baseline's own is none of them."""
    params, told = tree.params.benchmark, reopened.get(timed["timing"]["batch"])
    allowed = allowance(told, [name], params.confidence, family(tree))
    return over(openings.of_record(timed), params.confidence, family(tree), params.reopen_sd, allowed)


def family(tree: Tree) -> int:
    """How many engines' speed-ups are judged together."""
    return max(1, len(tree.engines) - 1)


def _undecided(tree: Tree, timed: dict[str, Any]) -> str | None:
    """Why the rounds are too few for as many engines as there are now, or None."""
    own = [opening.timing for opening in openings.of_record(timed)]
    return too_few(own, tree.params.benchmark.confidence, family(tree))


def _failures(tree: Tree, name: str) -> list[str]:
    """Reasons of failed stages that an engine's results need, from the root."""
    needed = dict.fromkeys(stage for engine in (name, tree.params.baseline) for stage in tree.made_by(engine))
    stages = ["data", *needed, f"evaluate@{name}", f"benchmark@{name}"]
    found = [read_json(layout.failure(s)) for s in stages if layout.failure(s).is_file()]
    return [f"{f['stage']} failed: {f['reason']}" for f in found]


def _sizes(tree: Tree, lineage: tuple[str, ...], described: manifest.Manifest) -> dict[str, int]:
    """Bytes of the nearest artifact of each kind; what proves a model is no part of it."""
    sizes = {}
    for node in (tree.nodes[name] for name in lineage if tree.nodes[name].step in KINDS):
        folder, kind = layout.artifact(node.name), KINDS[node.step]
        if isinstance(node.settings, ExportParams):
            kind = node.settings.format
        evidence = folder / layout.PROOF
        sizes[kind] = size_bytes(folder) - (size_bytes(evidence) if evidence.is_file() else 0)
    return {**sizes, "engine": size_bytes(layout.artifact(lineage[-1]) / described.engine_file)}


def _content_key(name: str) -> tuple[Any, ...]:
    described = manifest.read(layout.artifact(name))
    return (
        described.backend,
        described.onnx_sha256 or described.engine_sha256,
        described.device,
        digest_of(described.settings),
        described.threads,
        described.max_batch,
        str(described.built_for),
    )


def required(path: Path, command: str) -> Any:
    """Read a JSON file that an earlier step wrote; Fault names the command that makes it."""
    if not path.is_file():
        raise Fault(f"no {path}", got="nothing there", expected="the file of an earlier step", do=f"run `{command}`")
    return read_json(path)

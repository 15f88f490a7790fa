"""A winner measured against the present champion of its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from tasks import evaluate, gates, layout, manifest, registry, results
from tasks.data import read
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault, in_words
from tasks.files import size_bytes
from tasks.monitor import Conditions
from tasks.params import Tree
from tasks.reopening import all_openings
from tasks.results import Variant
from tasks.scatter import in_series
from tasks.settings import BenchmarkParams
from tasks.stats import Interval, mean_score, paired_change
from tasks.timing import Opening, logs, over, spoilt, too_few
from tasks.workloads.protocol import load_workload

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

DEFENDED = ("accuracy", "accuracy_change", "size_bytes")


@dataclass(frozen=True)
class Challenge:
    """How the winner did against the champion: `gain` is how many times its speed, None if it had none to beat.

    `lost` says that the champion keeps its place.
    """

    gain: Interval | None
    reasons: tuple[str, ...]
    lost: bool = False
    openings: list[Opening] = field(default_factory=list)
    conditions: Conditions | None = None


def challenge(tree: Tree, workload: Path, data: Path, candidate: Variant, champion: ModelVersion | None) -> Challenge:
    """Measure the candidate against the champion, unless that can't defend its place."""
    if champion is None:
        return Challenge(None, (f"{candidate.name} is the first champion of this target",))
    label = f"champion version {champion.version} ({champion.tags.get('variant')})"
    with TemporaryDirectory() as scratch:
        try:
            folder = registry.download(champion, Path(scratch))
        except Fault as lost:
            return Challenge(None, (f"{label} can't be opened here any more: {lost.line}",))
        try:
            defender = open_engine(folder)
        except Exception as error:  # a backend may raise anything
            _require_works(candidate.name, label, error, lambda session: None)
            return Challenge(None, (f"{label} can't be opened here any more: {in_words(error)}",))
        with defender:
            try:
                fault = _fails_today(folder, defender, tree, workload, data)
            except Fault as error:
                fault = error.line
            except Exception as error:
                own = layout.artifact(candidate.name)
                _require_works(candidate.name, label, error, lambda one: _fails_today(own, one, tree, workload, data))
                fault = in_words(error)
        if fault:
            return Challenge(None, (f"{label} fails today's gates: {fault}",))
        pairs, conditions = _side_by_side(layout.artifact(candidate.name), folder, data, tree.params.benchmark)
    params, told = tree.params.benchmark, results.reopened(tree).get(tree.params.benchmark.batch)
    # A champion that isn't of this tree has no record, whatever its name.
    both = [candidate.name, registry.engine_of(tree, champion) or ""]
    ratios = logs(pairs)
    allowed = in_series(told, both, ratios, {candidate.name: ratios}, params.confidence)
    gain = over(pairs, params.confidence, 1, params.reopen_sd, allowed)
    unusable = spoilt(pairs) or too_few([one.timing for one in pairs], params.confidence)
    why = f"{candidate.name} side by side with {label}: {gates.shown('speedup', gain)} of its speed"
    stays = f"the champion stays, since that can't be used: {unusable}" if unusable else None
    if not unusable and not gain.low > 1:
        stays = "the champion stays, since that isn't above 1 with its whole interval"
    return Challenge(gain, (why, stays) if stays else (why,), bool(stays), pairs, conditions)


def _require_works(name: str, label: str, error: Exception, attempt: Callable[[Session], object]) -> None:
    """Raise Fault if the candidate can't do now either what the champion can't.

    That is the machine's state then, such as a card without memory left, and no champion falls by it.
    """
    try:
        with open_engine(layout.artifact(name)) as session:
            attempt(session)
    except Exception as other:
        raise Fault(
            f"neither {label} nor {name} can be opened and run now",
            got=f"{in_words(error)}; {in_words(other)}",
            expected="a machine with the memory and devices that they need",
            do="see what else runs here, and promote again; the champion stays until then",
        ) from None


def _side_by_side(
    challenger: Path, champion: Path, data: Path, params: BenchmarkParams
) -> tuple[list[Opening], Conditions]:
    """The two in common rounds, opened as often as a benchmark opens its engines, every other time the champion first.

    The first time the challenger is: what favours the engine that was opened last, favours the champion.
    """
    found, conditions = all_openings({"engine": challenger, "baseline": champion}, data, params)
    return [Opening.of(timings) for timings in found], conditions


def _fails_today(folder: Path, defender: Session, tree: Tree, workload: Path, data: Path) -> str | None:
    """Why the champion doesn't pass today's gates on today's test split, or None.

    Raises Fault if today's data doesn't fit it, or its outputs aren't finite.
    """
    task, samples, params, described = (
        load_workload(workload),
        read(data / "test.npz"),
        tree.params,
        manifest.read(folder),
    )
    if described.preprocessing not in (None, task.PREPROCESSING):
        return f"it expects preprocessing {described.preprocessing}, today's is {task.PREPROCESSING}"
    if described.max_batch < params.benchmark.batch:
        return f"it takes batches of at most {described.max_batch}, today's benchmark has {params.benchmark.batch}"
    outputs = evaluate.run(defender, task, samples, min(params.evaluate.batch, described.max_batch))
    scores = task.METRICS[params.evaluate.metric](outputs, samples["label"]).astype(np.float64)
    confidence, against = params.evaluate.confidence, read(layout.scores(params.baseline))["scores"]
    today = Variant(
        folder.name,
        (),
        described.backend,
        accuracy=mean_score(scores, confidence),
        accuracy_change=paired_change(scores, against, confidence),
        size_bytes={"engine": size_bytes(folder / described.engine_file)},
    )
    return "; ".join(gates.failures(today, params.gates, DEFENDED)) or None

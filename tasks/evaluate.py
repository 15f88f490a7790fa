"""Accuracy of a built engine on the held-out test split, sample by sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks import manifest
from tasks.data import read, write
from tasks.engines.protocol import Session, open_engine
from tasks.errors import Fault, Unavailable
from tasks.files import sha256
from tasks.settings import EvaluateParams
from tasks.stats import Interval, mean_score
from tasks.target import fingerprint
from tasks.workloads.protocol import Arrays, Workload, cut, lengths, load_workload

CLASSES = ("predictions", "labels")


@dataclass(frozen=True)
class EvaluateReport:
    """A metric's mean in 0 … 1 with its interval; None, with the reason, if the engine can't run here.

    `target_id` is the machine that it ran on.
    """

    metric: str
    accuracy: Interval | None
    n: int
    not_run: str | None
    engine_sha256: str
    test_sha256: str
    preprocessing: str
    target_id: str


def evaluate(source: Path, workload: Path, data: Path, target: Path, params: EvaluateParams) -> EvaluateReport:
    """Run `data/test.npz` through the engine in `source`; write each sample's score to `target`.

    Beside `scores` [n] it holds the `predictions` and `labels` that `predicted` finds. Raises Fault if the
    engine expects other preprocessing than the workload's, or outputs or scores are not finite.
    """
    task, split = load_workload(workload), data / "test.npz"
    described = manifest.read(source)
    if described.preprocessing not in (None, task.PREPROCESSING):
        raise Fault(
            f"engine {source.name} expects other inputs",
            got=f"preprocessing {described.preprocessing}",
            expected=task.PREPROCESSING,
            do=f"rebuild: {described.rebuild}",
        )
    samples = read(split)
    accuracy: Interval | None = None
    not_run: str | None = None
    try:
        with open_engine(source) as session:
            outputs = run(session, task, samples, params.batch)
    except Unavailable as reason:
        scores, not_run = np.zeros(0), str(reason)
        classes = dict.fromkeys(CLASSES, np.zeros(0, np.int64))
    else:
        scores = scored(task, params.metric, outputs, samples["label"])
        classes = predicted(task, outputs, samples["label"], scores)
        accuracy = mean_score(scores, params.confidence)
    write(target, {"scores": scores, **classes})
    return EvaluateReport(
        metric=params.metric,
        accuracy=accuracy,
        n=len(scores),
        not_run=not_run,
        engine_sha256=described.engine_sha256,
        test_sha256=sha256(split),
        preprocessing=task.PREPROCESSING,
        target_id=fingerprint().id,
    )


def run(session: Session, task: Workload, samples: Arrays, batch: int) -> Arrays:
    """Outputs [n, …] over all samples, a last partial batch included; Fault if any isn't finite.

    Along a dynamic axis, batches are of samples of similar length, cut to the longest of them; outputs come in
    the samples' order.
    """
    n, parts, used = len(samples["label"]), [], lengths(task, samples)
    order = np.arange(n) if used is None else np.argsort(used, kind="stable")
    for start in range(0, n, batch):
        rows = order[start : start + batch]
        part = {name: samples[name][rows] for name in task.INPUTS}
        parts.append(session.run(part if used is None else cut(task, part, int(used[rows].max()))))
    back = np.argsort(order)
    outputs = {name: np.concatenate([part[name] for part in parts])[back] for name in task.OUTPUTS}
    for name, values in outputs.items():
        bad = ~np.isfinite(values.reshape(n, -1)).all(axis=1)
        if bad.any():
            raise Fault(
                f"output {name} is not finite",
                got=f"NaN or infinity for {int(bad.sum())} of {n} samples, first {int(bad.argmax())}",
                expected="finite values",
                do="look at the quantisation and precision of this variant",
            )
    return outputs


def scored(task: Workload, metric: str, outputs: Arrays, labels: np.ndarray) -> np.ndarray:
    """Each sample's score by a metric of the workload, [n]; Fault if there isn't one finite number for each."""
    scores = np.asarray(task.METRICS[metric](outputs, labels)).astype(np.float64)
    bad = int((~np.isfinite(scores)).sum())
    if scores.shape != (len(labels),) or bad:
        raise Fault(
            f"metric {metric} gives no score of each sample",
            got=f"scores of shape {list(scores.shape)}, {bad} of them NaN or infinite",
            expected=f"{len(labels)} finite numbers in 0 … 1",
            do="mend the metric in the workload",
        )
    return scores


def predicted(task: Workload, outputs: Arrays, labels: np.ndarray, scores: np.ndarray) -> Arrays:
    """`predictions` and `labels`, both [n] and whole numbers, or both [0] where nothing is told apart by class.

    A workload may define `predictions(outputs)`. Without it they are the argmax of the first output, if that
    is [n, classes], the labels are whole numbers below `classes`, and every score is 0 or 1.
    """
    whole = labels.ndim == 1 and labels.dtype.kind in "iub"
    own = getattr(task, "predictions", None)
    if own is not None:
        found = np.asarray(own(outputs))
        if not whole or found.shape != labels.shape or found.dtype.kind not in "iub":
            raise Fault(
                "predictions(outputs) of the workload names no class of each sample",
                got=f"{found.dtype} {list(found.shape)} for labels {labels.dtype} {list(labels.shape)}",
                expected="whole numbers, one for each sample, as the labels are",
                do="mend the workload, or leave predictions out",
            )
    else:
        first = outputs[task.OUTPUTS[0]]
        classes = first.shape[1] if first.ndim == 2 else 0
        in_range = whole and classes > 1 and int(labels.min()) >= 0 and int(labels.max()) < classes
        if not in_range or not np.isin(scores, (0.0, 1.0)).all():
            return dict.fromkeys(CLASSES, np.zeros(0, np.int64))
        found = first.argmax(axis=1)
    return dict(zip(CLASSES, (found.astype(np.int64), labels.astype(np.int64)), strict=True))

"""Train a workload's model from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks import checkpoint, fit, layout
from tasks.data import read
from tasks.settings import TrainParams
from tasks.workloads.protocol import load_workload


@dataclass(frozen=True)
class TrainReport:
    """Parameter count, best validation score in 0 … 1, and the learning curve."""

    parameters: int
    validation: float
    curve: list[fit.Epoch]


def train(workload: Path, data: Path, target: Path, params: TrainParams) -> TrainReport:
    """Train on `data/train.npz`, keep the best epoch by `data/validation.npz`, write `target/model.pt`."""
    task = load_workload(workload)
    fit.seed_everything(params.seed, params.threads, params.device)
    model = task.model(**params.model)
    splits = read(data / "train.npz"), read(data / "validation.npz")
    curve = fit.fit(model, task, *splits, params, fit.task_loss(task), resume=layout.resume(target.name))
    checkpoint.save(checkpoint.Checkpoint(model, workload.as_posix(), params.model), target)
    return TrainReport(fit.parameters(model), max(e.validation for e in curve), curve)

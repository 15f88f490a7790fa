"""Knowledge distillation: Hinton, Vinyals and Dean 2015, arXiv:1503.02531."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from tasks import checkpoint, fit
from tasks.data import read
from tasks.errors import Fault
from tasks.settings import DistillParams
from tasks.train import TrainReport


@dataclass(frozen=True)
class DistillReport(TrainReport):
    """As TrainReport, with the scores of the teacher and of the student before, in 0 … 1."""

    teacher_validation: float
    before: float


def soft_loss(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, temperature: float, alpha: float
) -> torch.Tensor:
    """`alpha` T² KL(teacher ‖ student) at temperature T, plus (1 - `alpha`) cross-entropy.

    Logits are [n, classes], labels [n]; the T² keeps the gradients' scale (section 2 of the paper).
    """
    soft = kl_div(log_softmax(student / temperature, 1), softmax(teacher / temperature, 1), reduction="batchmean")
    return alpha * temperature**2 * soft + (1 - alpha) * cross_entropy(student, labels)


def distill(source: Path, teacher: Path, data: Path, target: Path, params: DistillParams) -> DistillReport:
    """Train the model of `source`, or a fresh `params.student`, on the teacher's soft labels.

    The teacher's logits are computed once over the training split and looked up by sample,
    so that they belong to the same shuffled samples. The first output is the one distilled.
    """
    parent, guide = checkpoint.load(source), checkpoint.load(teacher)
    if parent.workload_path != guide.workload_path:
        raise Fault(
            "teacher of another workload",
            got=guide.workload_path,
            expected=parent.workload_path,
            do=f"name another teacher than {teacher.name}",
        )
    task, student = parent.workload, parent
    fit.seed_everything(params.seed, params.threads)
    if params.student is not None:
        fresh = task.model(**params.student)
        student = checkpoint.Checkpoint(fresh, parent.workload_path, params.student)
    model = student.model
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    output = task.OUTPUTS[0]
    soft = torch.from_numpy(fit.predict(guide.model, task, train)[output])
    before = fit.score(model, task, validation)

    def loss(outputs: fit.Tensors, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return soft_loss(outputs[output], soft[index], labels, params.temperature, params.alpha)

    curve = fit.fit(model, task, train, validation, params, loss)
    checkpoint.save(replace(student, model=model), target)
    return DistillReport(
        parameters=fit.parameters(model),
        validation=max(e.validation for e in curve),
        curve=curve,
        teacher_validation=fit.score(guide.model, task, validation),
        before=before,
    )

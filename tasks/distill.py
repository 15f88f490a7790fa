"""Knowledge distillation from soft labels, hidden states and attention maps.

Hinton, Vinyals and Dean 2015, arXiv:1503.02531; FitNets, Romero et al. 2015, arXiv:1412.6550;
TinyBERT, Jiao et al. 2020, arXiv:1909.10351; MiniLM, Wang et al. 2020, arXiv:2002.10957.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tasks import account, checkpoint, device, fit, layout
from tasks.checkpoint import Checkpoint
from tasks.data import read
from tasks.distill_layers import Plan, Recorder, plan
from tasks.distill_objective import Objective, Pupil, Terms
from tasks.errors import Fault
from tasks.settings import DistillParams
from tasks.train import TrainReport
from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload


@dataclass(frozen=True)
class Mapped:
    """A layer of the student, the teacher's layer it learned from, and by what: "hidden" or "attention"."""

    student: str
    teacher: str
    by: str


@dataclass(frozen=True)
class DistillReport(TrainReport):
    """As TrainReport, with the scores of the teacher and of the student before, in 0 … 1.

    `terms` are the losses' means epoch by epoch, `cost` compares with the parent.
    `relation_heads` is the number of heads that attention maps were compared by.
    """

    teacher_validation: float
    before: float
    terms: list[Terms]
    layers: list[Mapped]
    relation_heads: int | None
    cost: account.Difference


def distill(source: Path, teacher: Path, data: Path, target: Path, params: DistillParams) -> DistillReport:
    """Train the model of `source`, or a fresh `params.student`, on what the teacher makes of the training split.

    The teacher's logits are computed once and looked up by sample; its hidden states and
    attention maps are computed on each batch. The first output is the one distilled. Raises
    Fault, before any training, if student and teacher can't be compared.
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
    fit.seed_everything(params.seed, params.threads, params.device)
    if params.student is not None:
        student = Checkpoint(task.model(**params.student), parent.workload_path, params.student)
    check_outputs(task, params.alpha, student=student.model, parent=parent.model, teacher=guide.model)
    how = plan(student.model, guide.model, task, params)
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    cost, before = account.count(parent.model, task), fit.score(student.model, task, validation, params.device)
    curve, terms = learn(student, guide.model, how, (train, validation), params, layout.resume(target.name))
    checkpoint.save(student, target)
    return DistillReport(
        parameters=fit.parameters(student.model),
        validation=max(e.validation for e in curve),
        curve=curve,
        teacher_validation=fit.score(guide.model, task, validation, params.device),
        before=before,
        terms=terms,
        layers=[Mapped(m.student, m.teacher, "hidden") for m in how.hidden]
        + [Mapped(m.student, m.teacher, "attention") for m in how.attention or ()],
        relation_heads=how.heads or None,
        cost=account.difference(cost, account.count(student.model, task)),
    )


def learn(
    student: Checkpoint,
    teacher: nn.Module,
    how: Plan,
    splits: tuple[Arrays, Arrays],
    params: DistillParams,
    resume: Path | None = None,
) -> tuple[list[fit.Epoch], list[Terms]]:
    """Train the student in place, under its masks; returns the curve and the losses' means."""
    task, (train, validation) = student.workload, splits
    soft = torch.empty(len(train["label"]), 0)
    if params.alpha:
        soft = torch.from_numpy(fit.predict(teacher, task, train, on=params.device)[task.OUTPUTS[0]])
    pupil = Pupil(student.model, how, params.epochs)
    with (
        device.placed(device.resolve(params.device), teacher, channels_last=params.precision == "bf16"),
        Recorder(student.model, [m.student for m in how.matches]) as ours,
        Recorder(teacher, [m.teacher for m in how.matches]) as theirs,
    ):
        objective = Objective(task, pupil, teacher, soft, how, (ours, theirs), params)
        masks = pupil.masks(student.masks)
        curve = fit.fit(pupil, task, train, validation, params, objective, masks=masks, resume=resume)
    return curve, objective.terms()


def check_outputs(task: Workload, alpha: float, **models: nn.Module) -> None:
    """Raise Fault if models differ in the shapes of their outputs, or if there are no logits to soften."""
    shapes = {whose: _outputs(model, task) for whose, model in models.items()}
    student = shapes["student"]
    for whose, other in shapes.items():
        if other != student:
            raise Fault(
                f"student and {whose} have different outputs",
                got=f"{student} of the student, {other} of the {whose}",
                expected="the same shapes",
                do="mend distill.*.student, or name another from or teacher",
            )
    first = student[task.OUTPUTS[0]]
    if alpha and not (len(first) == 2 and first[1] > 1):
        raise Fault(
            f"output {task.OUTPUTS[0]} has no soft labels",
            got=f"shape {first} for 2 samples",
            expected="logits [n, classes] of at least 2 classes",
            do="set alpha to 0, with hidden or attention above 0",
        )


def _outputs(model: nn.Module, task: Workload) -> dict[str, tuple[int, ...]]:
    with torch.no_grad(), fit.eval_mode(model):
        outputs = fit.forward(model, task, fit.tensors(protocol.example(task, 2)))
    return {name: tuple(value.shape) for name, value in outputs.items()}

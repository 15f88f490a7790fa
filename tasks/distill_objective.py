"""The loss of a distillation, as the training loop calls it, and what it adds up on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tasks import distill_losses as losses
from tasks import fit
from tasks.distill_layers import Match, Plan, Recorder, rows
from tasks.settings import DistillParams
from tasks.workloads import protocol
from tasks.workloads.protocol import Workload

NAMES = ("soft", "task", "hidden", "attention")


@dataclass(frozen=True)
class Terms:
    """Means of an epoch, before the weights; None for a term whose weight is 0.

    loss = alpha · soft + (1 - alpha) · task + hidden weight · hidden + attention weight · attention
    """

    epoch: int
    soft: float | None
    task: float | None
    hidden: float | None
    attention: float | None


class Pupil(nn.Module):
    """A student in training, with the projections of its hidden states to the teacher's widths.

    What was added up stands in a buffer, so that a training that goes on after a kill has it. `fullest` is
    the buffer of the most samples that was loaded: the loop ends with that of the best epoch.
    """

    sums: torch.Tensor

    def __init__(self, student: nn.Module, plan: Plan, epochs: int) -> None:
        super().__init__()
        self.student = student
        self.projections = nn.ModuleList(_projection(match) for match in plan.hidden)
        self.inputs: tuple[torch.Tensor, ...] = ()
        self.register_buffer("sums", torch.zeros(epochs, len(NAMES) + 1, dtype=torch.float64))
        self.fullest = self.sums.clone()
        self.register_load_state_dict_post_hook(lambda module, _: self._keep())

    def _keep(self) -> None:
        self.fullest = max(self.fullest, self.sums.clone(), key=_samples)

    def forward(self, *inputs: torch.Tensor) -> object:
        self.inputs = inputs
        return self.student(*inputs)

    def masks(self, masks: fit.Masks) -> fit.Masks:
        """Masks of the student's parameters, by their names here."""
        return {f"student.{name}": mask for name, mask in masks.items()}


def _samples(sums: torch.Tensor) -> float:
    return float(sums[:, -1].sum())


def _projection(match: Match) -> nn.Module:
    if match.width == match.teacher_width:
        return nn.Identity()
    return nn.Linear(match.width, match.teacher_width, bias=False)


def _valid(match: Match, states: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor | None:
    """Which positions of states [n, t, d] are no padding, boolean [n, t]; None if all are."""
    if lengths is None or not match.padded:
        return None
    return torch.arange(states.shape[1], device=states.device) < lengths[:, None]


class Objective:
    """The weighted sum of the losses, for `fit.fit` of a Pupil.

    `soft` are the teacher's logits [samples, classes], by the rows of the training split. The
    teacher's hidden states and attention maps are those of the very inputs that the student just saw.
    """

    def __init__(
        self,
        task: Workload,
        pupil: Pupil,
        teacher: nn.Module,
        soft: torch.Tensor,
        plan: Plan,
        recorders: tuple[Recorder, Recorder],
        params: DistillParams,
    ) -> None:
        self.task, self.pupil, self.teacher, self.soft = task, pupil, teacher, soft
        self.plan, self.params, (self.ours, self.theirs) = plan, params, recorders
        self.weights = dict(zip(NAMES, (params.alpha, 1 - params.alpha, params.hidden, params.attention), strict=True))
        self._sums = pupil.sums.clone()

    def __call__(self, outputs: fit.Tensors, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        found = {}
        if self.weights["soft"]:
            ours = outputs[self.task.OUTPUTS[0]].float()
            found["soft"] = losses.soft_labels(ours, self.soft[index].to(ours.device), self.params.temperature)
        if self.weights["task"]:
            found["task"] = self.task.loss(outputs, labels)
        if self.plan.matches:
            with torch.no_grad(), fit.eval_mode(self.teacher):
                self.teacher(*self.pupil.inputs)
            lengths = self._lengths()
            if self.plan.hidden:
                found["hidden"] = self._hidden(lengths)
            if self.plan.attention:
                found["attention"] = self._attention(*self.plan.attention, lengths)
        self._add(found, len(index))
        return torch.stack([self.weights[name] * value for name, value in found.items()]).sum()

    def _hidden(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """Mean over the layers; differences are taken in FP32, also of states in mixed precision."""
        values = []
        for match, projection in zip(self.plan.hidden, self.pupil.projections, strict=True):
            ours, theirs = projection(rows(self.ours[match.student])), rows(self.theirs[match.teacher])
            values.append(losses.hidden_states(ours.float(), theirs.float(), _valid(match, ours, lengths)))
        return torch.stack(values).mean()

    def _attention(self, query: Match, key: Match, lengths: torch.Tensor | None) -> torch.Tensor:
        ours = self.ours[query.student], self.ours[key.student]
        theirs = self.theirs[query.teacher], self.theirs[key.teacher]
        return losses.attention_maps(ours, theirs, self.plan.heads, _valid(query, ours[0], lengths))

    def _lengths(self) -> torch.Tensor | None:
        """How much of the dynamic axis each sample of the batch uses, at least 1; None without such an axis."""
        inputs = dict(zip(self.task.INPUTS, self.pupil.inputs, strict=True))
        lengths = protocol.lengths(self.task, {name: value.cpu().numpy() for name, value in inputs.items()})
        return None if lengths is None else torch.from_numpy(lengths).clamp(min=1).to(self.pupil.inputs[0].device)

    def _add(self, found: fit.Tensors, n: int) -> None:
        sums = self.pupil.sums
        epoch = min(int(sums[:, -1].sum()) // len(self.soft), len(sums) - 1)
        for i, name in enumerate(NAMES):
            sums[epoch, i] += found[name].item() * n if name in found else math.nan
        sums[epoch, -1] += n
        self._sums = sums.clone()

    def terms(self) -> list[Terms]:
        """The means of every epoch."""
        # A training that is taken over when it was done adds nothing: its sums are those that were loaded.
        sums = max(self._sums, self.pupil.fullest, key=_samples)
        means = [row[:-1] / row[-1] for row in sums if row[-1]]
        values = [[None if v.isnan() else float(v) for v in row] for row in means]
        return [Terms(epoch, *row) for epoch, row in enumerate(values, 1)]

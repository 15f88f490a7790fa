"""The state of one training between epochs: steps, curve, best weights, and the file it goes on from."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tasks import batches, device, threads
from tasks import resume as states
from tasks.settings import FitParams

LONG_EPOCH_S = 20.0
EVERY_S = 10.0
STEPS_TIMED = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Epoch:
    """One point of a learning curve; `validation` is the mean of the workload's first metric, in 0 … 1.

    `seconds` are since the start, `threads` those that PyTorch ran on; `device` is "cpu" or the GPU's name.
    """

    epoch: int
    loss: float
    validation: float
    seconds: float
    threads: int
    device: str = "cpu"


class Training:
    """A model in training: `curve` says how far it came, `weights` are those of the best epoch.

    `value(rows)` is the loss of a batch of the `n` samples, `after_step` is called after each step of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        params: FitParams,
        n: int,
        lengths: np.ndarray | None,
        value: Callable[[torch.Tensor], torch.Tensor],
        after_step: Callable[[], None],
        where: torch.device = CPU,
    ) -> None:
        self.where = where
        self.model, self.params, self.steps = model, params, -(-n // params.batch)
        self._batches = lambda: batches.shuffled(n, self.steps, lengths)
        self._value, self._after_step = value, after_step
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=params.lr, weight_decay=1e-2, fused=True)
        total = max(2, self.steps * params.epochs)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, params.lr, total_steps=total)
        self.weights, self.curve, self._first = copy.deepcopy(model.state_dict()), list[Epoch](), math.nan
        self._start, self._told, self._saving = time.monotonic(), time.monotonic(), 0.0

    @property
    def best(self) -> int:
        """The epoch of the best validation score, the first of equals; 0 before the first."""
        return max(self.curve, key=lambda e: e.validation).epoch if self.curve else 0

    @property
    def finished(self) -> bool:
        done, patience = len(self.curve), self.params.patience
        return done == self.params.epochs or (patience is not None and done - self.best >= patience)

    def epoch(self) -> float:
        """One epoch of steps; returns the mean loss."""
        self.model.train()
        total, seen, began = 0.0, 0, time.monotonic()
        for step, rows in enumerate(self._batches(), 1):
            value = self._value(rows)
            if not torch.isfinite(value):
                number, lr = len(self.curve) + 1, self.params.lr
                raise ValueError(f"the loss is {value.item()} in epoch {number}: lower lr (got {lr})")
            self.optimizer.zero_grad(set_to_none=True)
            value.backward()
            self.optimizer.step()
            self._after_step()
            self.schedule.step()
            total, seen = total + value.item() * len(rows), seen + len(rows)
            if not self.curve and step == 1:
                self._first = value.item()
            self._tell_step(step, total / seen, time.monotonic() - began)
        return total / seen

    def end_epoch(self, loss: float, held_out: float) -> None:
        """Add a point to the curve, keep the weights if they are the best, and tell it."""
        number, of = len(self.curve) + 1, self.params.epochs
        if not math.isfinite(held_out):
            raise ValueError(f"the validation score is {held_out} in epoch {number}: mend the workload's metric")
        seconds, place = time.monotonic() - self._start, device.name(self.where)
        self.curve.append(Epoch(number, loss, held_out, seconds, torch.get_num_threads(), place))
        if self.best == number:
            self.weights = copy.deepcopy(self.model.state_dict())
        self._tell(f"epoch {number}/{of} · loss {loss:.3f} · validation {held_out:.1%}", number / of)
        if self.finished and number < of:
            print(f"stopped after epoch {number} of {of}: none better than epoch {self.best}", flush=True)

    def _tell_step(self, step: int, loss: float, seconds: float) -> None:
        lasts = seconds / step * self.steps
        if step < self.steps and lasts > LONG_EPOCH_S and time.monotonic() - self._told >= EVERY_S:
            done, of = len(self.curve), self.params.epochs
            text = f"epoch {done + 1}/{of} · {step / self.steps:.0%} of it · loss {loss:.3f}"
            self._tell(text, (done + step / self.steps) / of)

    def _tell(self, text: str, share: float) -> None:
        self._told = time.monotonic()
        left = (self._told - self._start) * (1 / share - 1)
        print(f"{text} · {f'{left:.0f} s' if left < 120 else f'{left / 60:.0f} min'} left", flush=True)

    def choose_threads(self) -> None:
        """With `threads: auto`, time a few steps with each number; weights and the random state stay as they are.

        On a GPU the threads only hand out work: there is nothing to choose.
        """
        if self.params.threads != "auto" or self.where.type != "cpu":
            return
        with torch.random.fork_rng(devices=[]):
            some = self._batches()[:STEPS_TIMED]
            self.model.train()
            threads.choose(lambda: [self._value(rows).backward() for rows in some])
        self._reset()

    def _reset(self) -> None:
        """The weights kept, and no gradients."""
        self.model.load_state_dict(self.weights)
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, path: Path, belongs_to: str) -> None:
        """Write the state, unless that took above a second and a tenth of the time so far."""
        began = time.monotonic()
        if self._saving > max(1.0, 0.1 * (began - self._start)) and not self.finished:
            return
        state = {
            "digest": belongs_to,
            "first": self._first,
            "curve": [asdict(e) for e in self.curve],
            "model": states.on_cpu(self.model.state_dict()),
            "weights": None if self.best == len(self.curve) else states.on_cpu(self.weights),
            "optimizer": states.on_cpu(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.where) if self.where.type == "cuda" else None,
        }
        states.save(path, state)
        self._saving += time.monotonic() - began

    def go_on(self, state: dict[str, Any] | None) -> bool:
        """Take over a state, if its first batch had the loss that it has now: the loss may know a teacher."""
        if state is None:
            return False
        try:
            curve = [Epoch(**point) for point in state["curve"]]
        except TypeError as error:
            print(f"the saved state can't be read ({error}): training from the start", flush=True)
            return False
        torch.set_num_threads(curve[-1].threads)
        torch.manual_seed(self.params.seed)
        self.model.train()
        first = self._value(self._batches()[0]).item()
        self._reset()
        if first != state["first"]:
            print("the loss is another one than the saved state's: training from the start", flush=True)
            return False
        self.curve, self._first, self.weights = curve, first, state["weights"] or copy.deepcopy(state["model"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self.where)
        self._start = time.monotonic() - curve[-1].seconds
        done, of = len(curve), self.params.epochs
        print(f"{done} epochs are done" if self.finished else f"going on from epoch {done + 1} of {of}", flush=True)
        return True

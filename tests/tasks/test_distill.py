"""Distillation: the loss written out, and the teacher's rows beside the right samples."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks import checkpoint, fit
from tasks import distill as module
from tasks.data import read
from tasks.distill import distill, soft_loss
from tasks.errors import Fault
from tasks.files import read_json
from tasks.settings import DistillParams


def params(**changes: Any) -> DistillParams:
    return DistillParams(**{"from": "slim", "teacher": "base", "epochs": 1, "batch": 32, **changes})


def soft(logits: list[float], temperature: float) -> list[float]:
    powers = [math.exp(v / temperature) for v in logits]
    return [p / sum(powers) for p in powers]


@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 0.5), (4.0, 0.7), (3.0, 1.0), (2.0, 0.0)])
def test_the_loss_is_hintons_written_out(temperature: float, alpha: float) -> None:
    rng = np.random.default_rng(0)
    student, teacher, labels = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), [0, 2, 1, 1, 0]
    total = 0.0
    for s, t, label in zip(student.tolist(), teacher.tolist(), labels, strict=True):
        p, q = soft(t, temperature), soft(s, temperature)
        divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        total += alpha * temperature**2 * divergence - (1 - alpha) * math.log(soft(s, 1)[label])
    got = soft_loss(torch.tensor(student), torch.tensor(teacher), torch.tensor(labels), temperature, alpha)
    assert got.item() == pytest.approx(total / 5)


def test_a_student_that_equals_its_teacher_has_no_soft_loss() -> None:
    logits = torch.randn(4, 3)
    assert soft_loss(logits, logits, torch.zeros(4, dtype=torch.long), 4.0, 1.0).item() == pytest.approx(0, abs=1e-5)


def test_the_teachers_rows_belong_to_the_shuffled_samples(
    artifact: Any, data_folder: Path, tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each teacher row must be what the teacher says of the very image whose label is beside it."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    images: list[torch.Tensor] = []
    true_loss, true_forward = module.soft_loss, fit.forward

    def watch_loss(student: Any, teacher: Any, labels: Any, temperature: float, alpha: float) -> torch.Tensor:
        calls.append((teacher, labels))
        return true_loss(student, teacher, labels, temperature, alpha)

    def watch_forward(model: Any, workload: Any, inputs: Any) -> Any:
        if model.training:
            images.append(inputs["image"])
        return true_forward(model, workload, inputs)

    monkeypatch.setattr(module, "soft_loss", watch_loss)
    monkeypatch.setattr(fit, "forward", watch_forward)
    distill(artifact("slim"), artifact("base"), data_folder, tmp_path / "out", params(epochs=2))
    monkeypatch.undo()
    teacher = checkpoint.load(artifact("base")).model
    assert len(calls) == len(images) == 26
    for (rows, labels), batch in zip(calls, images, strict=True):
        alone = teacher(batch).detach()
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=1e-4)
        assert (tiny.oracle(batch.numpy()) == labels.numpy()).all()
    train = read(data_folder / "train.npz")["image"]
    assert not np.array_equal(torch.cat(images[:13]).numpy(), train)


def test_recovery_keeps_the_shape_of_the_parent(artifact: Any, line: Path) -> None:
    slim, recovered = (checkpoint.load(artifact(n)) for n in ("slim", "slim-kd"))
    assert repr(slim.model) == repr(recovered.model)
    report = read_json(line / "results/distill/slim-kd.json")
    assert report["parameters"] == sum(p.numel() for p in recovered.model.parameters())
    assert report["teacher_validation"] > 0.9


def test_a_fresh_student_learns_from_the_teacher_alone(
    artifact: Any, data_folder: Path, tmp_path: Path, tiny: Any
) -> None:
    """With alpha 1 the labels count for nothing: what is learnt comes from the teacher."""
    settings = params(**{"from": "base"}, student={"width": 6}, epochs=4, lr=2e-2, alpha=1.0)
    report = distill(artifact("base"), artifact("base"), data_folder, tmp_path / "out", settings)
    loaded = checkpoint.load(tmp_path / "out")
    assert loaded.architecture == {"width": 6}
    assert loaded.model.stem[0].out_channels == 6
    assert report.before < 0.6 < 0.8 < report.validation


def test_a_teacher_of_another_workload_is_refused(
    artifact: Any, data_folder: Path, tmp_path: Path, write_workload: Any, workload_path: Path
) -> None:
    other = write_workload(workload_path.read_text().replace("Path(__file__).parent", repr(str(workload_path.parent))))
    guide = checkpoint.load(artifact("base"))
    guide = replace(guide, workload_path=str(other))
    checkpoint.save(guide, tmp_path / "teacher")
    with pytest.raises(Fault, match="teacher of another workload"):
        distill(artifact("slim"), tmp_path / "teacher", data_folder, tmp_path / "out", params())
    assert not (tmp_path / "out").exists()

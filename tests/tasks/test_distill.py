"""Distillation: the teacher's outputs beside the right samples, what is trained, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import batches, checkpoint, distill_losses, fit
from tasks.checkpoint import Checkpoint
from tasks.distill import check_outputs, distill, learn
from tasks.distill_layers import plan
from tasks.errors import Fault
from tasks.files import read_json
from tasks.settings import DistillParams
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parent.parent / "tiny"
LAYER = "net.bert.encoder.layer"


def params(**changes: Any) -> DistillParams:
    return DistillParams.model_validate({"from": "slim", "teacher": "base", "epochs": 1, "batch": 32, **changes})


@pytest.fixture(scope="module")
def words(text: Any) -> Any:
    """The text workload with an untrained teacher, and splits of 96 and 32 samples."""
    arrays, _ = text.samples(0)
    torch.manual_seed(1)
    teacher = lively(text.model(layers=4, width=16).eval())
    train, validation = ({k: v[part] for k, v in arrays.items()} for part in (slice(96), slice(96, 128)))
    return SimpleNamespace(task=text, teacher=teacher, splits=(train, validation))


def lively(model: nn.Module) -> nn.Module:
    """With larger weights, so that an untrained model says something else of each sample."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    return model


def still(model: nn.Module) -> nn.Module:
    """Without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("name", ["tiny", "text"])
def test_the_teachers_rows_belong_to_the_shuffled_samples(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row must be what the teacher says of the very inputs whose label is beside it, also in bucketed batches."""
    task = request.getfixturevalue(name)
    arrays, _ = task.samples(0)
    train, validation = {k: v[:120] for k, v in arrays.items()}, {k: v[120:152] for k, v in arrays.items()}
    torch.manual_seed(0)
    teacher, small = lively(task.model(width=16).eval()), task.model(width=8)
    seen: list[list[Any]] = []
    true_loss, true_labels, true_forward = task.loss, distill_losses.soft_labels, fit.forward

    def forward(model: Any, workload: Any, inputs: Any) -> Any:
        if model.training:
            seen.append([inputs])
        return true_forward(model, workload, inputs)

    def soft(student: Any, rows: torch.Tensor, temperature: float) -> torch.Tensor:
        seen[-1].append(rows)
        return true_labels(student, rows, temperature)

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        seen[-1].append(labels)
        return true_loss(outputs, labels)

    monkeypatch.setattr(fit, "forward", forward)
    monkeypatch.setattr(distill_losses, "soft_labels", soft)
    monkeypatch.setattr(Checkpoint, "workload", task)
    monkeypatch.setattr(task, "loss", loss)
    settings = params(epochs=2, batch=8)
    learn(Checkpoint(small, ""), teacher, plan(small, teacher, task, settings), (train, validation), settings)
    monkeypatch.undo()
    assert len(seen) == 30
    for inputs, rows, labels in seen:
        alone = true_forward(teacher, task, inputs)["logits"].detach()
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=1e-4)
        assert (rows - rows.roll(1, 0)).abs().mean() > 0.01
        first = inputs[next(iter(task.INPUTS))].numpy()
        assert (task.oracle(first) == labels.numpy()).all()
    if name == "text":
        assert len({inputs["input_ids"].shape[1] for inputs, _, _ in seen}) > 1
    order = torch.cat([labels for _, _, labels in seen[:15]]).numpy()
    assert not np.array_equal(order, train["label"])


def test_a_student_that_equals_its_teacher_loses_nothing_and_one_beside_a_shifted_sample_does(words: Any) -> None:
    """Logits, hidden states and attention maps, each of the same samples: all losses are 0, and none if shifted."""
    teacher, task = still(words.teacher), words.task
    settings = params(alpha=1.0, hidden=1, attention=1, lr=1e-12)
    means = []
    for shift in (0, 1):
        torch.manual_seed(1)
        student = still(task.model(layers=4, width=16))
        student.load_state_dict(teacher.state_dict())
        guide = teacher if not shift else Shifted(teacher)
        how = plan(student, teacher, task, settings)
        if shift:
            how = replace(
                how,
                hidden=tuple(replace(m, teacher=f"teacher.{m.teacher}") for m in how.hidden),
                attention=tuple(replace(m, teacher=f"teacher.{m.teacher}") for m in how.attention or ()),
            )
        source = Checkpoint(student, str(TINY / "text.py"))
        means.append(learn(source, guide, how, words.splits, settings)[1][0])
    right, wrong = means
    assert right.task is None and wrong.task is None
    for name in ("soft", "hidden", "attention"):
        assert getattr(right, name) == pytest.approx(0, abs=1e-5)
        assert getattr(wrong, name) > 1e-3


class Shifted(nn.Module):
    """A teacher that answers for the sample before."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.teacher(*(value.roll(1, 0) for value in inputs))


def test_losses_are_the_same_in_batches_of_one_which_have_no_padding(words: Any) -> None:
    train = {name: value[:24] for name, value in words.splits[0].items()}
    assert len(set(words.task.lengths(train))) > 4
    means = []
    for batch in (24, 1):
        torch.manual_seed(5)
        student = still(lively(words.task.model(layers=2, width=8)))
        settings = params(alpha=0.5, hidden=1, attention=1, lr=1e-12, batch=batch)
        how = plan(student, words.teacher, words.task, settings)
        source = Checkpoint(student, str(TINY / "text.py"))
        means.append(learn(source, words.teacher, how, (train, words.splits[1]), settings)[1][0])
    together, alone = means
    for name in ("soft", "task", "hidden", "attention"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-4)
        assert getattr(alone, name) > 1e-3


def test_the_loss_is_the_weighted_sum_of_its_terms(words: Any) -> None:
    torch.manual_seed(2)
    student = words.task.model(layers=2, width=8)
    settings = params(alpha=0.3, hidden=0.5, attention=2.0, epochs=2)
    how = plan(student, words.teacher, words.task, settings)
    curve, terms = learn(Checkpoint(student, str(TINY / "text.py")), words.teacher, how, words.splits, settings)
    for epoch, t in zip(curve, terms, strict=True):
        values = (t.soft, t.task, t.hidden, t.attention)
        total = sum(w * v for w, v in zip((0.3, 0.7, 0.5, 2.0), values, strict=True) if v is not None)
        assert epoch.loss == pytest.approx(total, rel=1e-5)


def test_a_narrower_student_comes_nearer_to_the_teacher_inside_and_its_projections_are_not_kept(
    words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.data import write

    monkeypatch.chdir(tmp_path)
    for name, split in zip(("train", "validation"), words.splits, strict=True):
        write(tmp_path / f"{name}.npz", split)
    path, architecture = str(TINY / "text.py"), {"layers": 4, "width": 16}
    checkpoint.save(Checkpoint(words.teacher, path, architecture), tmp_path / "base")
    settings = params(student={"layers": 2, "width": 8}, alpha=0.0, hidden=1, attention=50, epochs=6, lr=2e-2)
    report = distill(tmp_path / "base", tmp_path / "base", tmp_path, tmp_path / "out", settings)
    first, last = report.terms[0], report.terms[-1]
    assert first.soft is None and first.hidden and first.attention and last.hidden and last.attention
    assert last.hidden < 0.8 * first.hidden
    assert last.attention < 0.8 * first.attention
    hidden = [(m.student, m.teacher) for m in report.layers if m.by == "hidden"]
    assert hidden == [(f"{LAYER}.0", f"{LAYER}.1"), (f"{LAYER}.1", f"{LAYER}.3")]
    assert report.relation_heads == 4
    student = checkpoint.load(tmp_path / "out")
    assert student.architecture == {"layers": 2, "width": 8}
    assert report.parameters == fit.parameters(student.model) == report.cost.parameters_after
    assert report.cost.parameters_before == fit.parameters(words.teacher)
    assert report.validation == fit.score(student.model, words.task, words.splits[1])


def test_masks_of_a_sparse_student_hold(words: Any) -> None:
    torch.manual_seed(3)
    student = words.task.model(layers=2, width=8)
    masks = {n: torch.rand_like(p) > 0.5 for n, p in student.named_parameters() if n.endswith("dense.weight")}
    before = {name: value.clone() for name, value in student.state_dict().items()}
    settings = params(hidden=1, attention=1, lr=1e-2)
    how = plan(student, words.teacher, words.task, settings)
    learn(Checkpoint(student, str(TINY / "text.py"), masks=masks), words.teacher, how, words.splits, settings)
    assert len(masks) > 4
    for name, mask in masks.items():
        value = student.state_dict()[name]
        assert not value[~mask].any()
        assert (value[mask] != before[name][mask]).any()


def test_a_killed_training_goes_on_with_its_terms(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all epochs, also of those after the best, and when nothing but the report was left to do."""
    settings = params(hidden=1, epochs=3)
    monkeypatch.setattr(fit, "score", lambda pupil, *_: 1 / float(1 + pupil.sums[:, -1].sum()))

    def start() -> Any:
        torch.manual_seed(4)
        student = words.task.model(layers=1, width=8)
        how = plan(student, words.teacher, words.task, settings)
        source = Checkpoint(student, str(TINY / "text.py"))
        return learn(source, words.teacher, how, words.splits, settings, tmp_path / "state.pt")

    curve, whole = start()
    assert max(curve, key=lambda e: e.validation).epoch == 1 and len(whole) == 3
    (tmp_path / "state.pt").unlink()
    true_take, taken = batches.take, 0

    def killed(*given: Any) -> Any:
        nonlocal taken
        taken += len(given[2]) == 32
        if taken > 7:
            raise KeyboardInterrupt
        return true_take(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(batches, "take", killed)
        start()
    assert (tmp_path / "state.pt").is_file()
    assert start()[1] == whole
    assert start()[1] == whole


def test_an_lstm_learns_from_a_transformer(words: Any) -> None:
    """Also from its hidden states, in batches cut to their longest sample."""
    task = load_workload(TINY / "lstm.py")
    arrays, _ = task.samples(0)
    train, validation = {k: v[:600] for k, v in arrays.items()}, {k: v[600:800] for k, v in arrays.items()}
    torch.manual_seed(0)
    student = task.model(kind="lstm", width=16)
    settings = params(alpha=0.1, hidden=0.1, pairs={"ahead": f"{LAYER}.3"}, epochs=6, lr=2e-2)
    how = plan(student, words.teacher, task, settings)
    majority = max(validation["label"].mean(), 1 - validation["label"].mean())
    curve, terms = learn(Checkpoint(student, str(TINY / "lstm.py")), words.teacher, how, (train, validation), settings)
    assert max(e.validation for e in curve) > majority + 0.15
    assert terms[0].hidden and terms[-1].hidden and terms[-1].hidden < terms[0].hidden


def test_recovery_keeps_the_shape_of_the_parent(artifact: Any, line: Path) -> None:
    slim, recovered = (checkpoint.load(artifact(n)) for n in ("slim", "slim-kd"))
    assert repr(slim.model) == repr(recovered.model)
    report = read_json(line / "results/distill/slim-kd.json")
    assert report["parameters"] == sum(p.numel() for p in recovered.model.parameters())
    assert report["cost"]["parameters_before"] == report["cost"]["parameters_after"] == report["parameters"]
    assert report["teacher_validation"] > 0.9


def test_a_fresh_student_learns_from_the_teacher_alone(
    artifact: Any, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With alpha 1 the labels count for nothing: what is learnt comes from the teacher."""
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize("whose", ["teacher", "parent"])
def test_other_outputs_are_refused(whose: str, make_workload: Any) -> None:
    task = make_workload(None, {"x": ("float32", (4,))})
    models = {"student": nn.Linear(4, 3), "parent": nn.Linear(4, 3), "teacher": nn.Linear(4, 3), whose: nn.Linear(4, 2)}
    with pytest.raises(Fault, match=f"student and {whose} have different outputs"):
        check_outputs(task, 0.5, **models)


def test_what_has_no_classes_has_no_soft_labels(make_workload: Any) -> None:
    task, model = make_workload(None, {"x": ("float32", (4,))}), nn.Linear(4, 1)
    with pytest.raises(Fault, match="no soft labels"):
        check_outputs(task, 0.5, student=model, teacher=model)
    check_outputs(task, 0.0, student=model, teacher=model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpha": 0}, "nothing to distil"),
        ({"pairs": {"a": "b"}}, "no pairs"),
        ({"hidden": -1}, "greater than or equal to 0"),
        ({"hidden": 1, "pairs": {}}, "at least 1"),
    ],
)
def test_settings_that_do_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params(**given)

"""A killed training goes on to the weights that an uninterrupted one ends with."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import __main__ as command_line
from tasks import fit, layout, resume
from tasks.settings import FitParams

PARAMS = FitParams(epochs=4, batch=20, lr=1e-2)
EPOCH_STEPS = 10


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def splits(tiny: Any) -> Any:
    arrays, _ = tiny.samples(1)
    return {k: v[:200] for k, v in arrays.items()}, {k: v[200:260] for k, v in arrays.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "resume" / "base.pt"


def model_of(tiny: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return tiny.model(width=4)


def train(
    tiny: Any, splits: Any, file: Path | None, params: FitParams = PARAMS, kill_at: int = 10**9, **given: Any
) -> tuple[dict[str, torch.Tensor], list[tuple[int, float, float]], int]:
    """Weights, curve and the number of steps of a training; Killed at the step `kill_at`."""
    steps, scale, model = 0, given.get("scale", 1.0), given.get("model") or model_of(tiny)

    def loss(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            raise Killed
        return scale * tiny.loss(outputs, labels)

    curve = fit.fit(model, tiny, *splits, params, loss, masks=given.get("masks"), resume=file)
    return dict(model.state_dict()), [(e.epoch, e.loss, e.validation) for e in curve], steps


def killed(tiny: Any, splits: Any, file: Path, params: FitParams = PARAMS, **given: Any) -> None:
    with pytest.raises(Killed):
        train(tiny, splits, file, params, kill_at=2 * EPOCH_STEPS + 5, **given)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def whole(tiny: Any, splits: Any) -> Any:
    return train(tiny, splits, None)


def test_a_resumed_training_ends_with_the_same_weights_and_curve(
    tiny: Any, splits: Any, whole: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(tiny, splits, file)
    torch.rand(100)
    weights, curve, steps = train(tiny, splits, file)
    assert "going on from epoch 3 of 4" in capsys.readouterr().out
    assert same(weights, whole[0]) and curve == whole[1]
    assert steps == 2 * EPOCH_STEPS + 1


def test_masks_hold_over_a_resume(tiny: Any, splits: Any, file: Path) -> None:
    masks = {"head.weight": torch.rand(4, 16) < 0.5}
    expected, _, _ = train(tiny, splits, None, masks=masks)
    killed(tiny, splits, file, masks=masks)
    weights, _, _ = train(tiny, splits, file, masks=masks)
    assert same(weights, expected) and not weights["head.weight"][~masks["head.weight"]].any()


def test_a_finished_training_is_taken_over_with_its_best_weights(
    tiny: Any, splits: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = PARAMS.model_copy(update={"patience": 1, "epochs": 9, "lr": 0.1})
    weights, curve, _ = train(tiny, splits, file, params)
    again, curve_again, steps = train(tiny, splits, file, params)
    assert len(curve) < 9 and f"{len(curve)} epochs are done" in capsys.readouterr().out
    assert same(weights, again) and curve == curve_again and steps == 1


def changed_label(splits: Any) -> Any:
    train, validation = splits
    label = train["label"].copy()
    label[-1] = (label[-1] + 1) % 4
    return {**train, "label": label}, validation


@pytest.mark.parametrize(
    "what",
    [
        *("settings", "weights", "labels", "masks", "torch", "workload", "code"),
        *("damaged", "cut off", "no state", "other epochs"),
    ],
)
def test_another_trainings_state_is_left(
    tiny: Any,
    splits: Any,
    file: Path,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed(tiny, splits, file)
    params, given = PARAMS, {}
    if what == "settings":
        params = PARAMS.model_copy(update={"seed": 1})
    elif what == "weights":
        given = {"model": model_of(tiny, 1)}
    elif what == "labels":
        splits = changed_label(splits)
    elif what == "masks":
        given = {"masks": {"head.weight": torch.rand(4, 16) < 0.5}}
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    elif what in ("workload", "code"):
        true = Path(tiny.__file__) if what == "workload" else resume.CODE[0]
        other = tmp_path / true.name
        other.write_text(f"{true.read_text()}\n# edited\n")
        if what == "workload":
            monkeypatch.setattr(tiny, "__file__", str(other))
        else:
            monkeypatch.setattr(resume, "CODE", (other, *resume.CODE[1:]))
    elif what == "other epochs":
        state = torch.load(file)
        torch.save({**state, "curve": [{**e, "grade": 1} for e in state["curve"]]}, file)
    elif what == "no state":
        torch.save([1], file)
    else:
        file.write_bytes(b"PK\x03\x04" if what == "damaged" else file.read_bytes()[:-500])
    _, _, steps = train(tiny, splits, file, params, **given)
    assert steps == 4 * EPOCH_STEPS
    assert "training from the start" in capsys.readouterr().out


def test_a_state_of_another_loss_is_left(
    tiny: Any, splits: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a retrained teacher's would be: nothing else tells the difference."""
    expected, _, _ = train(tiny, splits, None, scale=2.0)
    killed(tiny, splits, file)
    weights, curve, _ = train(tiny, splits, file, scale=2.0)
    assert same(weights, expected) and len(curve) == 4
    assert "another one than the saved state's" in capsys.readouterr().out


def test_a_text_training_resumes_its_bucketed_batches(text: Any, file: Path) -> None:
    arrays, _ = text.samples(0)
    splits = {k: v[:200] for k, v in arrays.items()}, {k: v[200:260] for k, v in arrays.items()}

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return text.model(layers=1, width=8)

    expected, curve, _ = train(text, splits, None, model=fresh())
    killed(text, splits, file, model=fresh())
    weights, curve_again, _ = train(text, splits, file, model=fresh())
    assert same(weights, expected) and curve == curve_again


def test_slow_writes_are_skipped_but_the_last(
    tiny: Any, splits: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    clock = [0.0]
    monkeypatch.setattr("tasks.training.time.monotonic", lambda: clock[0])

    def slow(path: Path, state: Any) -> None:
        saved.append(len(state["curve"]))
        clock[0] += 5

    monkeypatch.setattr(resume, "save", slow)
    train(tiny, splits, file)
    assert saved == [1, 4]


SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tasks import checkpoint, fit, layout
from tasks.data import write
from tasks.settings import TrainParams
from tasks.train import train
from tasks.training import Training
from tasks.workloads.protocol import load_workload

workload = Path(sys.argv[1])
arrays, _ = load_workload(workload).samples(1)
for split, rows in {"train": slice(200), "validation": slice(200, 260)}.items():
    write(Path(f"{split}.npz"), {k: v[rows] for k, v in arrays.items()})
if sys.argv[2] == "kill":
    save = Training.save
    def save_and_die(self, path, belongs_to):
        save(self, path, belongs_to)
        if len(self.curve) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    Training.save = save_and_die
for target in ("killed/model", "whole/model"):
    train(workload, Path(), Path(target), TrainParams(epochs=3, batch=20, lr=1e-2, model={"width": 4}))
    layout.resume("model").unlink()
"""


def test_a_killed_process_resumes_to_the_same_bytes(workload_path: Path, tmp_path: Path) -> None:
    def run(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SCRIPT, str(workload_path), how]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("kill").returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    resumed = run("go")
    assert resumed.stdout.count("going on from epoch 3 of 3") == 1, resumed.stderr
    assert resumed.stdout.count("epoch 3/3") == 2
    assert (tmp_path / "killed/model/model.pt").read_bytes() == (tmp_path / "whole/model/model.pt").read_bytes()


def test_a_finished_step_removes_its_states_and_no_other_artifacts() -> None:
    tree: Any = SimpleNamespace(nodes={"base": None, "base-2": None})
    for name in ("base", "base-1", "base-2", "base-kd", "base-1-x", "mybase"):
        layout.resume(name).parent.mkdir(parents=True, exist_ok=True)
        layout.resume(name).touch()
    command_line._remove_states("base", tree)
    left = sorted(file.stem for file in layout.resume("base").parent.iterdir())
    assert left == ["base-1-x", "base-2", "base-kd", "mybase"]


def test_a_digest_knows_every_entry(tiny: Any, text: Any) -> None:
    model, data = model_of(tiny), {"x": np.zeros(3, np.float32)}
    found = {
        resume.digest(PARAMS, tiny, model, None, data),
        resume.digest(PARAMS, tiny, model, {}, {"x": np.zeros(3, np.float64)}),
        resume.digest(PARAMS, tiny, model, {}, {"x": np.zeros((3, 1), np.float32)}),
        resume.digest(PARAMS, tiny, model, {}, {"y": np.zeros(3, np.float32)}),
        resume.digest(PARAMS, tiny, model, {}, data, data),
        resume.digest(PARAMS, text, model, None, data),
    }
    assert len(found) == 6


def test_a_state_of_another_device_is_left(
    tiny: Any, splits: Any, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        train(tiny, splits, file, kill_at=2 * EPOCH_STEPS + 1)
    with monkeypatch.context() as other:
        other.setattr("tasks.resume.device.name", lambda _: "another GPU")
        assert train(tiny, splits, file)[2] == PARAMS.epochs * EPOCH_STEPS
    assert "training from the start" in capsys.readouterr().out


def test_what_is_saved_keeps_its_form(tiny: Any) -> None:
    state = model_of(tiny).state_dict()
    kept = resume.on_cpu({"model": state, "groups": [{"betas": (0.9, 0.99), "step": torch.ones(())}], "none": None})
    assert list(kept["model"]) == list(state) and kept["model"]._metadata == state._metadata
    assert kept["groups"] == [{"betas": (0.9, 0.99), "step": torch.ones(())}] and kept["none"] is None

"""Checkpoints: exact, free of code, and refused with a cause when they aren't one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import checkpoint
from tasks.data import read
from tasks.errors import Fault
from tasks.fit import predict

OWN = """
import torch
from torch import nn
NAME = PREPROCESSING = "own"
INPUTS, OUTPUTS, METRICS = {"x": ("float32", (6,))}, ("logits",), {}
samples = loss = None
def model(**_):
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.PReLU(16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )
"""


LOAD = """
import sys
from pathlib import Path
import numpy as np
import torch
from tasks import checkpoint
from tasks.data import read
from tasks.fit import predict
torch.set_num_threads(1)
for name in ("base", "slim", "slim-kd"):
    loaded = checkpoint.load(Path(sys.argv[1]) / "artifacts" / name)
    outputs = predict(loaded.model, loaded.workload, read(Path(sys.argv[1]) / "data/test.npz"))
    np.save(f"{name}.npy", outputs["logits"])
"""


def test_models_load_in_a_new_process_with_identical_outputs(
    line: Path, artifact: Any, tiny: Any, data_folder: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", LOAD, str(line)], check=True, cwd=tmp_path)
    torch.set_num_threads(1)
    for name in ("base", "slim", "slim-kd"):
        here = predict(checkpoint.load(artifact(name)).model, tiny, read(data_folder / "test.npz"))["logits"]
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), here)


def test_a_pruned_model_is_saved_with_its_shapes(artifact: Any) -> None:
    loaded = checkpoint.load(artifact("slim")).model
    convs = [m for m in loaded.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convs] == [8] * len(convs)
    assert all(m.weight.shape[:2] == (m.out_channels, m.in_channels) for m in convs)


def test_layers_of_any_kind_keep_the_shapes_pruning_left(write_workload: Any, tmp_path: Path) -> None:
    import torch_pruning as tp

    path = write_workload(OWN)
    model = checkpoint.load_workload(path).model()
    example = torch.randn(5, 6)
    tp.pruner.MagnitudePruner(
        model, example, tp.importance.GroupMagnitudeImportance(), pruning_ratio=0.5, ignored_layers=[model[-1]]
    ).step()
    checkpoint.save(checkpoint.Checkpoint(model, str(path)), tmp_path / "saved")
    loaded = checkpoint.load(tmp_path / "saved").model
    assert repr(loaded) == repr(model)
    assert torch.equal(loaded(example), model.eval()(example))


def test_the_same_model_gives_the_same_bytes(artifact: Any, tmp_path: Path) -> None:
    checkpoint.save(checkpoint.load(artifact("slim")), tmp_path)
    assert (tmp_path / "model.pt").read_bytes() == (artifact("slim") / "model.pt").read_bytes()


def test_a_model_loads_in_eval_mode(artifact: Any) -> None:
    assert not any(m.training for m in checkpoint.load(artifact("base")).model.modules())


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_pickle_is_refused_and_never_executed(tmp_path: Path, how: str) -> None:
    path, sprung = tmp_path / "model.pt", tmp_path / "sprung"
    if how == "torch":
        torch.save({"format": 1, "trap": Trap(sprung)}, path)
    else:
        path.write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(Fault, match="a pickle of a whole module, which is never loaded"):
        checkpoint.load(tmp_path)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()


def test_a_whole_module_is_refused_with_the_cause(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(Fault, match="a pickle of a whole module, which is never loaded"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message", "cause"),
    [
        (b"", "is empty", "a write was cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer", "git lfs pull"),
        (b"<html>not found</html>", "is not a checkpoint", "not a PyTorch file"),
        (b"weights_only", "is not a checkpoint", "not a PyTorch file"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named_with_size_and_cause(
    tmp_path: Path, content: bytes, message: str, cause: str
) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(Fault, match=message) as caught:
        checkpoint.load(tmp_path)
    text = str(caught.value)
    assert str(tmp_path / "model.pt") in text
    assert f"{len(content)} bytes" in text
    assert cause in text


def test_a_truncated_checkpoint_is_named_so(artifact: Any, tmp_path: Path) -> None:
    content = (artifact("base") / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(Fault, match=f"{len(content) // 2} bytes; likely truncated"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("state", "found"),
    [({"format": 99}, "format 99"), ({"weight": torch.ones(2)}, "weights without a layout")],
)
def test_other_contents_are_named(tmp_path: Path, state: dict[str, Any], found: str) -> None:
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(Fault, match=found):
        checkpoint.load(tmp_path)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"no checkpoint .*nowhere"):
        checkpoint.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def model(**_):", "def model(needed, **_):"),
        ("def model(**_):", "def model(**_):\n    return nn.Linear(2, 2)\n\ndef former(**_):"),
    ],
    ids=["other keywords", "other layers"],
)
def test_a_workload_that_makes_another_model_now_is_a_fault(
    write_workload: Any, tmp_path: Path, old: str, new: str
) -> None:
    path = write_workload(OWN)
    model = checkpoint.load_workload(path).model()
    model[0] = nn.Linear(6, 20)
    checkpoint.save(checkpoint.Checkpoint(model, str(path)), tmp_path)
    checkpoint.load(tmp_path)
    assert old in OWN
    write_workload(OWN.replace(old, new))
    with pytest.raises(Fault, match="doesn't fit its workload any more"):
        checkpoint.load(tmp_path)


def test_the_workload_file_is_named_without_running_it(write_workload: Any, tmp_path: Path) -> None:
    path = write_workload(OWN)
    checkpoint.save(checkpoint.Checkpoint(checkpoint.load_workload(path).model(), str(path)), tmp_path)
    path.unlink()
    assert checkpoint.workload_file(tmp_path) == path

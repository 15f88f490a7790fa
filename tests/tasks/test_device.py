"""Where a model step computes: refused without a GPU, the same way back, and on a GPU the same weights again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks import checkpoint, device, fit
from tasks.errors import Fault
from tasks.settings import FitParams, TrainParams
from tasks.train import train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
CPU = torch.device("cpu")


class Tied(nn.Module):
    """A convolution, a weight and a buffer that two modules hold, and a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.norm, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.other.running_mean = self.norm.running_mean
        self.words = nn.Embedding(5, 4)
        self.words.requires_grad_(False)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    made = Tied()
    made.conv.weight.grad = torch.ones_like(made.conv.weight)
    return made


@pytest.fixture(scope="module")
def splits(tiny: Any) -> Any:
    arrays, _ = tiny.samples(1)
    return {k: v[:200] for k, v in arrays.items()}, {k: v[200:260] for k, v in arrays.items()}


@without_gpu
def test_cuda_without_a_gpu_is_a_fault_and_auto_is_the_cpu() -> None:
    with pytest.raises(Fault, match="no CUDA device to train on") as caught:
        device.resolve("cuda")
    assert torch.__version__ in str(caught.value.got) and "device: cpu" in caught.value.do
    assert device.resolve("auto") == device.resolve("cpu") == CPU
    assert device.name(device.resolve("auto")) == "cpu"


@without_gpu
def test_a_step_is_refused_before_it_reads_or_writes(workload_path: Path, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no CUDA device"):
        train(workload_path, tmp_path / "no data", tmp_path / "model", TrainParams(device="cuda"))
    assert not (tmp_path / "model").exists()


def test_mixed_precision_multiplies_in_bfloat16_and_normalises_in_fp32() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with device.mixed(CPU, "bf16"):
        assert layer(x).dtype == torch.bfloat16
        assert nn.functional.cross_entropy(layer(x), torch.zeros(2, dtype=torch.int64)).dtype == torch.float32
    with device.mixed(CPU, "fp32"):
        assert layer(x).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


def test_a_move_keeps_parameters_ties_gradients_and_values(model: Tied) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    device._move(model, CPU, torch.channels_last)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    device._move(model, CPU, torch.contiguous_format)
    assert model.conv.weight.is_contiguous()
    check_same(model, before, parameters)


def check_same(model: Tied, before: dict[str, torch.Tensor], parameters: dict[str, int]) -> None:
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert model.other.running_mean is model.norm.running_mean
    assert model.b.weight is model.a.weight
    assert not model.words.weight.requires_grad and model.a.weight.requires_grad
    assert model.conv.weight.grad is not None and bool((model.conv.weight.grad == 1).all())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_no_move_inside_inference_mode(model: Tied) -> None:
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match="inference_mode"),
        device.placed(torch.device("cuda"), model),
    ):
        pass


def test_on_the_cpu_nothing_moves(model: Tied) -> None:
    storage = model.conv.weight.data_ptr()
    with device.placed(CPU, model, channels_last=True):
        assert model.conv.weight.data_ptr() == storage and model.conv.weight.is_contiguous()


@pytest.mark.gpu
@needs_gpu
def test_a_model_goes_to_the_gpu_and_back(model: Tied) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    where = device.resolve("cuda")
    with pytest.raises(ZeroDivisionError), device.placed(where, model, channels_last=True):
        assert {value.device for value in model.state_dict().values()} == {where}
        assert model.other.running_mean is model.norm.running_mean
        raise ZeroDivisionError
    check_same(model, before, parameters)
    assert {value.device for value in model.state_dict().values()} == {CPU}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_on_the_gpu_learns_and_a_seed_fixes_the_weights(tiny: Any, splits: Any, precision: Any) -> None:
    params = FitParams(epochs=3, batch=20, lr=1e-2, device="cuda", precision=precision)
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = tiny.model(width=4)
        curve = fit.fit(model, tiny, *splits, params, fit.task_loss(tiny))
        states.append(model.state_dict())
        assert {e.device for e in curve} == {torch.cuda.get_device_name()}
    assert max(e.validation for e in curve) > 0.8
    assert all(v.device == CPU and torch.equal(v, states[1][k]) for k, v in states[0].items())


@pytest.mark.gpu
@needs_gpu
def test_fp32_scores_on_the_gpu_are_the_cpus(tiny: Any, splits: Any) -> None:
    model = tiny.model(width=4).eval()
    device.prepare(device.resolve("cuda"))
    here, there = (fit.predict(model, tiny, splits[1], on=on)["logits"] for on in ("cpu", "cuda"))
    assert abs(here - there).max() < 1e-4 * abs(here).max()


@pytest.mark.gpu
@needs_gpu
def test_a_killed_training_on_the_gpu_goes_on_to_the_same_weights(tiny: Any, splits: Any, tmp_path: Path) -> None:
    params = FitParams(epochs=4, batch=20, lr=1e-2, device="cuda")

    class Killed(BaseException):
        pass

    def run(file: Path, kill_at: int) -> dict[str, torch.Tensor]:
        steps = 0

        def loss(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == kill_at:
                raise Killed
            return tiny.loss(outputs, labels)

        torch.manual_seed(0)
        model = tiny.model(width=4)
        fit.fit(model, tiny, *splits, params, loss, resume=file)
        return dict(model.state_dict())

    whole = run(tmp_path / "whole.pt", 10**9)
    with pytest.raises(Killed):
        run(tmp_path / "cut.pt", 25)
    saved = torch.load(tmp_path / "cut.pt", weights_only=True)
    assert {v.device for v in saved["model"].values()} == {CPU}
    resumed = run(tmp_path / "cut.pt", 10**9)
    assert all(torch.equal(v, resumed[k]) for k, v in whole.items())


@pytest.mark.gpu
@needs_gpu
def test_a_checkpoint_of_the_gpu_is_read_on_the_cpu(workload_path: Path, data_folder: Path, tmp_path: Path) -> None:
    train(workload_path, data_folder, tmp_path, TrainParams(epochs=1, device="cuda", model={"width": 4}))
    saved = torch.load(tmp_path / checkpoint.FILE, weights_only=True)["state"]
    assert {v.device for v in saved.values()} == {CPU}
    assert {p.device for p in checkpoint.load(tmp_path).model.parameters()} == {CPU}

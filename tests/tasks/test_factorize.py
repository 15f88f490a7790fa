from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tasks import account, checkpoint, factorize
from tasks.errors import Fault
from tasks.settings import FactorizeParams

ROOT = Path(__file__).resolve().parents[2]


def params(**given: object) -> FactorizeParams:
    return FactorizeParams.model_validate({"from": "x", "epochs": 0, "round_to": 1, **given})


def task(*shape: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(INPUTS={"x": ("float32", shape)}, OUTPUTS=("y",))


def data(*shape: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(40, *shape)).astype(np.float32), "label": np.zeros(40, np.int64)}


def test_the_weight_s_best_rank_r_error_is_its_discarded_singular_values() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 8)
    first, second, rank, energy = factorize.decompose(layer, params(rank=0.5, samples=0), None)
    singular = np.linalg.svd(layer.weight.detach().numpy(), compute_uv=False)
    error = float(((second @ first - layer.weight) ** 2).sum())
    assert rank == 4 and first.shape == (4, 12) and second.shape == (8, 4)
    assert error == pytest.approx(float((singular[4:] ** 2).sum()), rel=1e-4)
    assert energy == pytest.approx(float((singular[:4] ** 2).sum() / (singular**2).sum()), rel=1e-5)


def test_data_makes_the_output_s_error_least_among_rank_r() -> None:
    """The closed form: project the outputs on the top singular vectors of W·X."""
    torch.manual_seed(0)
    layer = nn.Linear(12, 8, bias=False)
    x = torch.randn(4000, 12) @ torch.diag(torch.logspace(0, -2, 12)) @ torch.linalg.qr(torch.randn(12, 12))[0]
    aware, blind = (factorize.decompose(layer, params(rank=0.4), moment)[:2] for moment in (x.T @ x / len(x), None))

    def error(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(((x @ (pair[1] @ pair[0]).T - layer(x)) ** 2).sum())

    outputs = layer(x).detach()
    singular = torch.linalg.svdvals(outputs)
    best = float((singular[3:] ** 2).sum())
    assert error(aware) == pytest.approx(best, rel=0.02)
    assert error(blind) > 1.5 * error(aware)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Conv2d(4, 6, (3, 1), dilation=2, bias=False), nn.Conv2d(5, 7, 1)],
)
def test_a_convolution_of_full_rank_is_unchanged(layer: nn.Conv2d) -> None:
    x = torch.randn(2, layer.in_channels, 9, 9)
    full = params(energy=0.9999999, samples=0)
    first, second, rank, _ = factorize.decompose(layer, full, None)
    pair = factorize.factors(layer, rank)
    factorize._fill(pair, layer, first, second)
    assert torch.allclose(pair(x), layer(x), atol=1e-4)


def test_second_moments_are_those_of_the_patches_that_the_layer_sees() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    model, arrays = nn.Sequential(layer), data(2, 4, 4)
    found = factorize.second_moments(model, task(2, 4, 4), arrays, [layer], 40)[layer]
    padded = np.pad(arrays["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches = [padded[n, :, r : r + 3, c : c + 3].ravel() for n in range(40) for r in range(4) for c in range(4)]
    expected = sum(np.outer(p, p) for p in patches) / len(patches)
    assert np.allclose(found, expected, atol=1e-4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.grouped = nn.Linear(16, 2), nn.Conv2d(1, 1, 1)
        self.a, self.b, self.wide = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.b.weight = self.a.weight
        self.head = nn.Linear(34, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        return self.head(torch.cat([self.small(y), self.wide(y)], 1))


def test_layers_that_would_grow_or_are_shared_or_make_outputs_stay_and_say_so() -> None:
    model = Net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    layers, structure = factorize.factorize_layers(model, task(16), data(16), params(rank=0.25, round_to=2))
    reasons = {layer.name: layer.kept_because for layer in layers}
    assert [s.name for s in structure] == ["wide"]
    assert "multiply-adds" in str(reasons["small"])
    assert "shared" in str(reasons["a"]) and reasons["head"] == "it makes an output of the model"
    for name in ("small.weight", "a.weight", "head.weight", "head.bias"):
        assert torch.equal(model.get_parameter(name), before[name])


def test_reported_costs_are_the_counted_ones() -> None:
    from tasks.workloads import digits

    torch.manual_seed(0)
    model = digits.model(width=16)
    arrays = {"image": np.random.default_rng(0).normal(size=(8, 1, 28, 28)).astype(np.float32), "label": np.zeros(8)}
    layers, structure = factorize.factorize_layers(model, digits, arrays, params(rank=0.5, samples=8))
    counted = account.count(model, digits)
    assert structure
    assert sum(layer.multiply_adds_after for layer in layers) == counted.multiply_adds
    for layer in layers:
        if layer.rank:
            pair = [c.multiply_adds for c in counted.layers if c.name.startswith(f"{layer.name}.")]
            assert sum(pair) == layer.multiply_adds_after < layer.multiply_adds_before


@pytest.mark.parametrize(("energy", "expected"), [(0.5, 1), (0.7, 2), (0.95, 3), (0.9999, 4)])
def test_energy_takes_the_least_rank_that_keeps_it(energy: float, expected: int) -> None:
    squares = torch.tensor([0.6, 0.25, 0.1, 0.05])
    assert factorize.choose_rank(squares.cumsum(0), params(energy=energy)) == expected


def test_ranks_are_rounded_up_to_multiples_and_never_beyond_full() -> None:
    energy = torch.linspace(0.1, 1, 20)
    assert factorize.choose_rank(energy, params(rank=0.3, round_to=8)) == 8
    assert factorize.choose_rank(energy, params(rank=0.9, round_to=8)) == 20


@pytest.mark.parametrize("given", [{}, {"rank": 0.5, "energy": 0.5}, {"rank": 1.0}, {"energy": 0.0}])
def test_exactly_one_of_rank_and_energy_within_0_and_1(given: dict) -> None:
    with pytest.raises(ValueError):
        params(**given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained digits model, saved."""
    from tasks.workloads import digits

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    path = str(ROOT / "tasks/workloads/digits.py")
    checkpoint.save(checkpoint.Checkpoint(digits.model(width=16).eval(), path, {"width": 16}), folder)
    return folder


def test_a_factorised_model_reloads_in_a_new_process_with_the_same_outputs(saved: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(saved)
    x = torch.randn(3, 1, 28, 28)
    arrays = {"image": x.numpy(), "label": np.zeros(3)}
    _, structure = factorize.factorize_layers(loaded.model, loaded.workload, arrays, params(rank=0.5, samples=0))
    checkpoint.save(replace(loaded, structure=tuple(structure)), tmp_path)
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys, torch; from pathlib import Path; from tasks import checkpoint; f = Path(sys.argv[1]); "
        "torch.save(checkpoint.load(f).model(torch.load(f / 'x.pt')), f / 'y.pt')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y.pt"), loaded.model(x))


def test_a_factorised_model_can_be_pruned_and_factorised_again(saved: Path, tmp_path: Path) -> None:
    from tasks.prune import prune_channels
    from tasks.settings import PruneParams

    loaded = checkpoint.load(saved)
    arrays = {"image": np.random.default_rng(0).normal(size=(4, 1, 28, 28)).astype(np.float32), "label": np.zeros(4)}
    task_ = loaded.workload
    _, one = factorize.factorize_layers(loaded.model, task_, arrays, params(rank=0.5, round_to=8, samples=0))
    prune_channels(loaded.model, task_, arrays, PruneParams.model_validate({"from": "x", "ratio": 0.5, "round_to": 4}))
    _, two = factorize.factorize_layers(loaded.model, task_, arrays, params(rank=0.25, round_to=2, samples=0))
    checkpoint.save(replace(loaded, structure=(*one, *two)), tmp_path)
    again = checkpoint.load(tmp_path)
    x = torch.from_numpy(arrays["image"])
    with torch.no_grad():
        assert torch.equal(again.model(x), loaded.model.eval()(x))
    assert (
        account.count(again.model, task_).multiply_adds
        < account.count(checkpoint.load(saved).model, task_).multiply_adds
    )


def test_nothing_to_factorise_is_a_fault(tmp_path: Path) -> None:
    workload = tmp_path / "w.py"
    workload.write_text(
        "import numpy as np, torch\nNAME = PREPROCESSING = 'w'\nINPUTS = {'x': ('float32', (4,))}\nOUTPUTS = ('y',)\n"
        "METRICS = {'m': lambda o, l: np.ones(len(l))}\ndef samples(seed): ...\n"
        "def model(): return torch.nn.Linear(4, 3)\ndef loss(o, l): return o['y'].sum()\n"
    )
    from tasks.data import write

    for split in ("train", "validation"):
        write(tmp_path / f"{split}.npz", data(4))
    checkpoint.save(checkpoint.Checkpoint(nn.Linear(4, 3), str(workload)), tmp_path / "source")
    with pytest.raises(Fault, match=r"nothing to factorise in source"):
        factorize.factorize(tmp_path / "source", tmp_path, tmp_path / "target", params(rank=0.5))
    assert not (tmp_path / "target").exists()

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import fit, permute


def data(task: Any, count: int = 16) -> dict[str, np.ndarray]:
    return {key: value[:count] for key, value in task.samples(0)[0].items()}


def layers(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def share(module: Any) -> float:
    """The magnitude that two of four inputs keep, group by group."""
    weight, total = module.weight.detach().abs(), 0.0
    for row in weight.movedim(1, -1).reshape(-1, weight.shape[1]).tolist():
        total += sum(sum(sorted(row[i : i + 4])[2:]) for i in range(0, len(row), 4))
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_search_ends_where_no_swap_helps(seed: int) -> None:
    rows = torch.randn(24, 12, generator=torch.Generator().manual_seed(seed))
    order = permute.search(rows)
    assert sorted(order) == list(range(12))
    found = permute.kept(rows[:, order])
    assert found > permute.kept(rows)
    for i in range(12):
        for j in range(i):
            swapped = list(order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert permute.kept(rows[:, swapped]) <= found * (1 + 1e-5)


def test_the_search_parts_large_columns_that_stand_together() -> None:
    rows = torch.full((5, 8), 0.1)
    rows[:, :4] = 1
    assert permute.kept(rows[:, permute.search(rows)]) == pytest.approx(permute.kept(torch.ones(5, 4)) * 2)


@pytest.mark.parametrize("workload", ["tiny", "text"])
def test_a_permuted_model_is_the_same_function_and_keeps_more(workload: str, request: pytest.FixtureRequest) -> None:
    task = request.getfixturevalue(workload)
    torch.manual_seed(0)
    model = task.model(layers=2).eval()
    arrays, before = data(task), {n: share(m) for n, m in layers(model).items()}
    expected = fit.predict(model, task, arrays)["logits"]
    eligible = {n: m for n, m in layers(model).items() if m.weight.shape[1] % 4 == 0}
    _, stayed = permute.permute(model, task, arrays, eligible, {})
    assert np.allclose(fit.predict(model, task, arrays)["logits"], expected, atol=1e-5)
    moved = {n: m for n, m in eligible.items() if n not in stayed}
    assert sum(share(m) for m in moved.values()) > 1.005 * sum(before[n] for n in moved)
    if workload == "text":
        assert {n.rsplit(".", 3)[1] for n in stayed} == {"attention"}
        assert all("depend on the order" in reason for reason in stayed.values())
    else:
        assert stayed == {"head": "no layer makes its inputs one by one"}


def test_masks_move_with_their_weights(tiny: Any) -> None:
    torch.manual_seed(0)
    model = tiny.model().eval()
    masks = {}
    for name, module in layers(model).items():
        masks[f"{name}.weight"] = mask = torch.rand_like(module.weight) > 0.3
        module.weight.data *= mask
    moved, _ = permute.permute(model, tiny, data(tiny), {"block.conv2": model.block.conv2}, masks)
    for name, mask in moved.items():
        assert torch.equal(mask, model.get_parameter(name) != 0)
    assert not torch.equal(moved["block.conv2.weight"], masks["block.conv2.weight"])
    assert torch.equal(moved["head.weight"], masks["head.weight"])


class Holds(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: nn.Module, head: int = 16) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Conv2d(4, 16, 1), between, nn.Conv2d(16, head, 1)
        self.head = nn.Linear(head, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.between(self.a(x))).mean((2, 3)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, 16, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Cumulated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(16).reshape(1, 16, 1, 1)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.Conv2d(16, 16, 3, padding=1, groups=16), None),
        (nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()), None),
        (nn.GroupNorm(4, 16), "a GroupNorm holds its channels"),
        (nn.Conv2d(16, 16, 1, groups=4), "a grouped convolution holds its channels"),
        (Scaled(), "a parameter outside of layers holds its channels"),
        (Cumulated(), "the model's outputs depend on the order of its channels"),
    ],
)
def test_channels_move_only_where_all_that_holds_them_can(
    between: nn.Module, reason: str | None, make_workload: Any
) -> None:
    torch.manual_seed(0)
    model = Holds(between).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean, module.running_var = torch.randn(16), torch.rand(16) + 0.5
    task = make_workload(model, {"x": ("float32", (4, 5, 5))})
    arrays = {"x": np.random.default_rng(0).normal(size=(8, 4, 5, 5)).astype(np.float32), "label": np.zeros(8)}
    before, weight = fit.predict(model, task, arrays)["logits"], model.b.weight.detach().clone()
    _, stayed = permute.permute(model, task, arrays, {"b": model.b}, {})
    assert np.allclose(fit.predict(model, task, arrays)["logits"], before, atol=1e-5)
    assert torch.equal(model.b.weight, weight) == (reason is not None)
    assert stayed.get("b", "").startswith(reason or "")


def test_a_shared_weight_that_one_order_can_not_serve_stays(make_workload: Any) -> None:
    torch.manual_seed(0)
    model = Holds(nn.Conv2d(16, 16, 1)).eval()
    model.b.weight = model.between.weight  # type: ignore[assignment]
    task = make_workload(model, {"x": ("float32", (4, 5, 5))})
    arrays = {"x": np.random.default_rng(0).normal(size=(8, 4, 5, 5)).astype(np.float32), "label": np.zeros(8)}
    before, weight = fit.predict(model, task, arrays)["logits"], model.b.weight.detach().clone()
    _, stayed = permute.permute(model, task, arrays, {"between": model.between, "b": model.b}, {})
    assert np.allclose(fit.predict(model, task, arrays)["logits"], before, atol=1e-5)
    assert torch.equal(model.b.weight, weight) == ({"between", "b"} <= set(stayed))

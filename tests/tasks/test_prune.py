"""Pruning: groups stay consistent, what is kept computes as before, outputs are never touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import checkpoint, fit
from tasks.data import read, write
from tasks.errors import Fault
from tasks.files import read_json
from tasks.fit import predict
from tasks.prune import prune, recalibrate
from tasks.prune_channels import prune_channels
from tasks.prune_ranking import output_layers
from tasks.settings import PruneParams

TEXT = Path(__file__).resolve().parent.parent / "tiny/text.py"


def params(**changes: Any) -> PruneParams:
    return PruneParams(**{"from": "base", "ratio": 0.5, "round_to": 4, "epochs": 0, "batch": 32, **changes})


class Chain(nn.Module):
    """Two convolutions and a head, without norms, so that a smaller one can be made by hand."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, first, 3, padding=1), nn.Conv2d(first, second, 3)
        self.head = nn.Linear(second, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


class Parts(nn.Module):
    """Outputs that other modules follow, join or share."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body = nn.Conv2d(1, 16, 3)
        self.one, self.two = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.body(x)).mean((2, 3))
        one, two = self.one(y), self.two(y)
        return {
            "softmax": lambda: (one, two.softmax(1)),
            "sum": lambda: one + two,
            "view": lambda: (one.view(-1, 2, 4), two),
        }[self.form]()


class Grouped(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3, groups=groups)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.grouped(torch.relu(self.first(x)))).mean((2, 3)))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 16, 3), nn.Conv2d(1, 8, 3)
        self.both, self.head = nn.Conv2d(24, 12, 3), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.both(torch.cat([self.left(x), self.right(x)], 1))).mean((2, 3)))


@pytest.fixture
def images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"image": rng.normal(size=(50, 1, 8, 8)).astype(np.float32), "label": rng.integers(0, 3, 50)}


@pytest.fixture
def prune_model(make_workload: Any, images: Any) -> Any:
    """`prune_model(model, ...)`: its layers by name, after pruning it in place."""

    def run(model: nn.Module, outputs: tuple[str, ...] = ("logits",), **changes: Any) -> dict[str, Any]:
        task = make_workload(model, {"image": ("float32", (1, 8, 8))}, outputs)
        return {layer.name: layer for layer in prune_channels(model, task, images, params(**changes)).layers}

    return run


def test_the_weakest_filters_go_and_the_rest_computes_as_a_hand_made_smaller_model(
    prune_model: Any, images: Any
) -> None:
    torch.manual_seed(0)
    model = Chain(8, 8)
    weak_first, weak_second = [1, 2, 5, 7], [0, 3, 4, 6]
    with torch.no_grad():
        model.first.weight[weak_first] *= 1e-3
        model.second.weight[:, weak_first] *= 1e-3
        model.second.weight[weak_second] *= 1e-3
        model.head.weight[:, weak_second] *= 1e-3
    strong_first, strong_second = [0, 3, 4, 6], [1, 2, 5, 7]
    small = Chain(4, 4)
    small.first.weight.data = model.first.weight.data[strong_first]
    small.first.bias.data = model.first.bias.data[strong_first]
    small.second.weight.data = model.second.weight.data[strong_second][:, strong_first]
    small.second.bias.data = model.second.bias.data[strong_second]
    small.head.weight.data = model.head.weight.data[:, strong_second]
    small.head.bias.data = model.head.bias.data.clone()
    prune_model(model)
    x = torch.from_numpy(images["image"])
    torch.testing.assert_close(model(x), small(x))


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "random"])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("round_to", [1, 4, 6, 8])
def test_channels_are_multiples_and_never_none(
    prune_model: Any, images: Any, importance: str, ratio: float, round_to: int
) -> None:
    model = Chain(20, 13)
    layers = prune_model(model, ratio=ratio, round_to=round_to, importance=importance)
    for layer in (layers["first"], layers["second"]):
        wanted = layer.before * (1 - ratio)
        multiples = range(round_to, layer.before + 1, round_to)
        assert layer.after == min(multiples, key=lambda n: (round(abs(n - wanted), 6), n))
    assert model(torch.from_numpy(images["image"])).shape == (50, 3)


def test_taylor_keeps_what_the_loss_depends_on(prune_model: Any) -> None:
    torch.manual_seed(0)
    model = Chain(8, 8)
    used = [1, 4, 5, 6]
    with torch.no_grad():
        model.head.weight[:, [c for c in range(8) if c not in used]] = 0
        model.second.weight[[c for c in range(8) if c not in used]] *= 3
    kept = model.second.bias.data[used].tolist()
    prune_model(model, importance="taylor")
    assert model.second.bias.tolist() == pytest.approx(kept)


@pytest.mark.parametrize(
    ("form", "outputs", "protected"),
    [("softmax", ("a", "b"), {"one", "two"}), ("sum", ("a",), {"one", "two"}), ("view", ("a", "b"), {"one", "two"})],
)
def test_layers_that_make_outputs_are_protected(
    prune_model: Any, make_workload: Any, form: str, outputs: tuple[str, ...], protected: set[str]
) -> None:
    model = Parts(form)
    task = make_workload(model, {"image": ("float32", (1, 8, 8))}, outputs)
    found = output_layers(model, task, {"image": torch.zeros(2, 1, 8, 8)})
    assert {name for name, m in model.named_modules() if m in found} == protected
    layers = prune_model(model, outputs)
    assert {name for name, layer in layers.items() if layer.after == layer.before} == protected
    assert all(layers[name].kept_because == "it makes an output of the model" for name in protected)


def test_a_convolution_that_ends_the_model_is_protected(prune_model: Any, images: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 8, 3))
    assert prune_model(model)["2"].after == 8
    assert model(torch.from_numpy(images["image"])).shape == (50, 8, 8, 8)
    assert model[0].out_channels == 8


def test_residual_sums_keep_equal_widths(artifact: Any) -> None:
    model = checkpoint.load(artifact("slim")).model
    assert model.stem[0].out_channels == model.block.conv2.out_channels == model.block.bn2.num_features == 8


@pytest.mark.parametrize("groups", [2, 16])
def test_grouped_convolutions_stay_whole(prune_model: Any, images: Any, groups: int) -> None:
    model = Grouped(groups)
    layers = prune_model(model)
    assert layers["grouped"].after == layers["first"].after == 8
    assert model.grouped.in_channels % model.grouped.groups == 0
    assert model(torch.from_numpy(images["image"])).shape == (50, 3)


def test_concatenated_layers_feed_what_is_left(prune_model: Any, images: Any) -> None:
    model = Joined()
    layers = prune_model(model)
    assert model.both.in_channels == layers["left"].after + layers["right"].after == 12
    assert model(torch.from_numpy(images["image"])).shape == (50, 3)


def test_what_was_skipped_is_listed_with_the_reason(prune_model: Any) -> None:
    layers = prune_model(Chain(16, 4))
    assert layers["first"].kept_because is None
    assert layers["second"].kept_because == "it has 4 channels, and round_to is 4"
    assert layers["second"].after == 4


def test_recalibrated_statistics_are_those_of_the_split(make_workload: Any, images: Any) -> None:
    norm = nn.BatchNorm2d(1)
    norm.running_mean.fill_(7)
    task = make_workload(norm, {"image": ("float32", (1, 8, 8))})
    recalibrate(norm, task, images, batch=25)
    assert norm.running_mean.item() == pytest.approx(images["image"].mean(), abs=1e-5)
    assert norm.running_var.item() == pytest.approx(images["image"].var(), rel=1e-2)
    assert (norm.momentum, norm.training) == (0.1, False)


def test_recalibration_sees_batches_cut_to_their_longest_sample(text: Any) -> None:
    samples = {name: value[:40] for name, value in text.samples(0)[0].items()}
    seen: list[tuple[int, int]] = []

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            seen.append((input_ids.shape[1], int(attention_mask.sum(1).max())))
            return self.norm((input_ids * attention_mask).sum(1, keepdim=True).float())

    model = Normed()
    recalibrate(model, text, samples, batch=10)
    assert len(seen) == 4 and all(width == longest for width, longest in seen) and seen[0][0] < 12
    assert model.norm.running_mean.item() == pytest.approx(samples["input_ids"].sum(1).mean(), rel=1e-5)


def test_the_report_is_of_the_models(artifact: Any, line: Path, tiny: Any, data_folder: Path) -> None:
    report = read_json(line / "results/prune/slim.json")
    before, after = checkpoint.load(artifact("base")).model, checkpoint.load(artifact("slim")).model
    cost = report["cost"]
    assert (cost["parameters_before"], cost["parameters_after"]) == (fit.parameters(before), fit.parameters(after))
    validation = read(data_folder / "validation.npz")
    score = (predict(after, tiny, validation)["logits"].argmax(1) == validation["label"]).mean()
    assert report["validation"] == pytest.approx(score)
    assert len(report["curve"]) == 2


def test_nothing_to_prune_is_a_fault_that_says_why(artifact: Any, data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="nothing to prune in base") as caught:
        prune(artifact("base"), data_folder, tmp_path / "out", params(round_to=64))
    assert "block.conv1: it has 16 channels, and round_to is 64" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_epochs_leave_the_recalibrated_model(artifact: Any, data_folder: Path, tmp_path: Path) -> None:
    report = prune(artifact("base"), data_folder, tmp_path / "out", params())
    assert report.curve == []
    assert report.validation == report.validation_recalibrated
    assert checkpoint.load(tmp_path / "out").model.stem[0].out_channels == 8


def test_a_text_model_loses_channels_in_steps_and_loads(text: Any, tmp_path: Path) -> None:
    samples = text.samples(0)[0]
    write(tmp_path / "train.npz", {name: value[:128] for name, value in samples.items()})
    write(tmp_path / "validation.npz", {name: value[128:192] for name, value in samples.items()})
    architecture = {"layers": 2, "width": 16}
    made = checkpoint.Checkpoint(text.model(**architecture), str(TEXT), architecture)
    checkpoint.save(made, tmp_path / "base")
    given = params(only=["*.intermediate.dense"], scope="global", importance="taylor", steps=2, epochs=1, ratio=0.25)
    report = prune(tmp_path / "base", tmp_path, tmp_path / "cut", given)
    model = checkpoint.load(tmp_path / "cut").model
    left = [layer.after for layer in report.layers if layer.name.endswith("intermediate.dense")]
    assert sum(left) == 48 and all(width % 4 == 0 for width in left)
    assert [layer.intermediate.dense.out_features for layer in model.net.bert.encoder.layer] == left
    assert (report.cost.parameters_after, report.removed) == (fit.parameters(model), [])
    assert [epoch.epoch for epoch in report.curve] == list(range(1, len(report.stages) + 1))
    assert (
        report.validation
        == report.stages[-1].validation
        == pytest.approx(fit.score(model, text, read(tmp_path / "validation.npz")))
    )


def test_norm_scale_ranks_channels_only() -> None:
    with pytest.raises(ValueError, match="norm_scale with granularity channel"):
        params(granularity="head", importance="norm_scale")

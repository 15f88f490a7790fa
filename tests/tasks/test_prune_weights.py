"""Weights: the smallest go, exactly as many as asked, and stay gone through training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks import checkpoint, fit
from tasks.data import write
from tasks.errors import Fault
from tasks.prune import prune
from tasks.prune_ranking import Cut
from tasks.prune_weights import prune_weights
from tasks.settings import PruneParams
from tasks.workloads.protocol import load_workload

FORMS = Path(__file__).resolve().parent.parent / "tiny/forms.py"


def params(**changes: Any) -> PruneParams:
    return PruneParams(**{"from": "base", "granularity": "weight", "ratio": 0.6, "epochs": 0, "batch": 30, **changes})


@pytest.fixture(scope="module")
def forms() -> Any:
    return load_workload(FORMS)


@pytest.fixture
def model(forms: Any) -> Any:
    torch.manual_seed(0)
    return forms.model(form="residual").eval()


@pytest.fixture(scope="module")
def splits(forms: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splits")
    for name in ("train", "validation"):
        write(folder / f"{name}.npz", forms.samples(0)[0])
    return folder


def cut(model: Any, forms: Any, ratio: float = 0.6, last: Cut | None = None, **changes: Any) -> Cut:
    given = params(ratio=ratio, **changes)
    return prune_weights(model, forms, forms.samples(0)[0], given, ratio, last or Cut([], {}))


@pytest.mark.parametrize("importance", ["magnitude", "taylor"])
def test_each_layer_keeps_its_largest(model: Any, forms: Any, importance: str) -> None:
    batch = fit.tensors(forms.samples(0)[0])
    sum(forms.loss(fit.forward(model, forms, part), part["label"]) for part in halves(batch)).backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scores = {n: (p * p.grad if importance == "taylor" else p).detach().abs() for n, p in model.named_parameters()}
    done = cut(model, forms, importance=importance)
    assert set(done.masks) == {"stem.weight", "inner.weight", "outer.weight"}
    for name, mask in done.masks.items():
        order = np.argsort(scores[name].numpy().ravel(), kind="stable")
        kept = np.ones(mask.numel(), bool)
        kept[order[: int(0.6 * mask.numel())]] = False
        assert np.array_equal(mask.numpy().ravel(), kept)
    for name, parameter in model.named_parameters():
        expected = before[name] * done.masks.get(name, torch.tensor(True))
        assert torch.equal(parameter, expected)
    assert {layer.name: layer.kept_because for layer in done.layers}["head"] == "it makes an output of the model"


def halves(batch: fit.Tensors) -> list[fit.Tensors]:
    return [{name: value[i : i + 30] for name, value in batch.items()} for i in (0, 30)]


def test_global_scope_drops_the_smallest_of_all_but_never_a_whole_layer(model: Any, forms: Any) -> None:
    with torch.no_grad():
        model.stem.weight *= 1e-6
    whole = {f"{name}.weight": getattr(model, name).weight.detach().abs() for name in ("stem", "inner", "outer")}
    done = cut(model, forms, ratio=0.5, scope="global")
    assert sum(int((~mask).sum()) for mask in done.masks.values()) == sum(size.numel() for size in whole.values()) // 2
    assert int(done.masks["stem.weight"].sum()) == 1
    names = ("inner.weight", "outer.weight")
    dropped, kept = (torch.cat([whole[n][done.masks[n] == there] for n in names]) for there in (False, True))
    assert 0 < dropped.max() <= kept.min()


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "random"])
def test_masks_that_are_there_stay_and_count(model: Any, forms: Any, importance: str) -> None:
    there = torch.rand(model.inner.weight.shape) > 0.3
    fit.apply_masks(model, {"inner.weight": there})
    done = cut(model, forms, last=Cut([], {"inner.weight": there}), importance=importance)
    assert not done.masks["inner.weight"][~there].any()
    assert int((~done.masks["inner.weight"]).sum()) == int(0.6 * there.numel())
    layer = next(layer for layer in done.layers if layer.name == "inner")
    assert (layer.before, layer.after) == (int(there.sum()), int(done.masks["inner.weight"].sum()))


def test_only_and_shared_weights(forms: Any) -> None:
    model = forms.model(form="tied").eval()
    done = cut(model, forms, only=["first", "last"])
    assert set(done.masks) == {"last.weight"}
    assert {layer.name: layer.kept_because for layer in done.layers} == {
        "stem": "only doesn't name it",
        "head": "it makes an output of the model",
        "first": "its weight is shared with a layer that stays whole",
        "second": "only doesn't name it",
        "last": None,
    }


def test_a_frozen_layer_has_the_scores_it_would_have_unfrozen_and_stays_frozen(model: Any, forms: Any) -> None:
    frozen = forms.model(form="residual").eval()
    frozen.load_state_dict(model.state_dict())
    frozen.inner.weight.requires_grad_(False)
    masks = [cut(one, forms, importance="taylor").masks["inner.weight"] for one in (model, frozen)]
    assert torch.equal(*masks)
    assert not frozen.inner.weight.requires_grad and frozen.outer.weight.requires_grad


def test_steps_follow_the_schedule_and_zeros_outlast_training(
    model: Any, forms: Any, splits: Path, tmp_path: Path
) -> None:
    checkpoint.save(checkpoint.Checkpoint(model, str(FORMS), {"form": "residual"}), tmp_path / "base")
    report = prune(tmp_path / "base", splits, tmp_path / "cut", params(steps=3, epochs=1))
    loaded = checkpoint.load(tmp_path / "cut")
    assert [stage.ratio for stage in report.stages] == pytest.approx([0.6 * 19 / 27, 0.6 * 26 / 27, 0.6])
    assert [epoch.epoch for epoch in report.curve] == [1, 2, 3]
    for name, mask in loaded.masks.items():
        weight = loaded.model.get_parameter(name)
        assert int((~mask).sum()) == int(0.6 * mask.numel())
        assert not weight[~mask].any() and weight[mask].all()
    assert report.cost.parameters_after == report.cost.parameters_before
    assert "no engine gets faster" in str(report.note)
    with pytest.raises(Fault, match="nothing to prune in cut") as caught:
        prune(tmp_path / "cut", splits, tmp_path / "again", params(ratio=0.5))
    assert "inner: at least 0.5 of it is zero already" in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_a_bert_keeps_embeddings_norms_and_its_output(text: Any) -> None:
    model = text.model(layers=2, width=16).eval()
    train = {name: value[:8] for name, value in text.samples(0)[0].items()}
    masks = prune_weights(model, text, train, params(), 0.6, Cut([], {})).masks
    assert masks and not [n for n in masks if "embeddings" in n or "LayerNorm" in n or "classifier" in n or "bias" in n]

"""Heads: what is left computes as the full model with the context of those heads at zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks import checkpoint, fit
from tasks.errors import Fault
from tasks.prune_heads import _heads, importance, prune_heads
from tasks.prune_ranking import Cut
from tasks.settings import PruneParams
from tasks.transformer import attentions

WORKLOAD = Path(__file__).resolve().parent.parent / "tiny/text.py"
LAYER = "net.bert.encoder.layer.{}.attention.self"


def params(**changes: Any) -> PruneParams:
    return PruneParams(**{"from": "base", "granularity": "head", "ratio": 0.5, "epochs": 0, "batch": 32, **changes})


@pytest.fixture
def bert(text: Any) -> Any:
    torch.manual_seed(0)
    return text.model(layers=2).eval()


@pytest.fixture(scope="module")
def train(text: Any) -> dict[str, Any]:
    return {name: value[:64] for name, value in text.samples(0)[0].items()}


@pytest.fixture
def pruned(text: Any, bert: Any, train: Any) -> Any:
    """`pruned(...)`: the heads of each attention that are left, by name, after pruning the BERT in place."""

    def run(ratio: float = 0.5, **changes: Any) -> dict[str, int]:
        done = prune_heads(bert, text, train, params(ratio=ratio, **changes), ratio, Cut([], {}))
        return {layer.name: layer.after for layer in done.layers}

    return run


def rows(model: nn.Module, layer: int) -> torch.Tensor:
    """The heads' query weights [heads, …], which tell them apart."""
    weight: torch.Tensor = attentions(model)[layer].query.weight.detach()
    return weight.reshape(attentions(model)[layer].heads, -1)


def outputs(model: nn.Module, text: Any, train: Any, skip: dict[int, list[int]] | None = None) -> torch.Tensor:
    """Logits, with the context of some heads of some layers at zero."""

    def hook(heads: list[int]) -> Any:
        def zero(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            context = inputs[0].unflatten(-1, (4, -1)).clone()
            context[..., heads, :] = 0
            return context.flatten(-2)

        return zero

    layers = model.net.bert.encoder.layer  # type: ignore[union-attr]
    hooks = [
        layers[layer].attention.output.dense.register_forward_pre_hook(hook(heads))  # type: ignore[index,union-attr]
        for layer, heads in (skip or {}).items()
    ]
    with torch.no_grad():
        logits = fit.forward(model, text, fit.tensors(train))["logits"]
    for handle in hooks:
        handle.remove()
    return logits


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "random"])
def test_what_is_left_is_the_full_model_with_those_heads_at_zero(
    bert: Any, text: Any, train: Any, pruned: Any, tmp_path: Path, importance: str
) -> None:
    made = checkpoint.Checkpoint(bert, str(WORKLOAD), {"layers": 2})
    checkpoint.save(made, tmp_path / "full")
    assert pruned(importance=importance) == {LAYER.format(0): 2, LAYER.format(1): 2}
    checkpoint.save(replace(made, model=bert), tmp_path / "pruned")
    full, small = (checkpoint.load(tmp_path / name).model for name in ("full", "pruned"))
    gone = {
        i: [h for h in range(4) if not any(torch.equal(rows(full, i)[h], left) for left in rows(small, i))]
        for i in range(2)
    }
    assert [len(heads) for heads in gone.values()] == [2, 2]
    torch.testing.assert_close(outputs(small, text, train), outputs(full, text, train, gone))
    assert not torch.allclose(outputs(small, text, train), outputs(full, text, train), atol=1e-5)


def test_numbers_of_the_attention_are_right_after_reload(bert: Any, pruned: Any, tmp_path: Path) -> None:
    pruned(0.25)
    checkpoint.save(checkpoint.Checkpoint(bert, str(WORKLOAD), {"layers": 2}), tmp_path)
    for attention in attentions(checkpoint.load(tmp_path).model):
        module: Any = attention.module
        assert (module.num_attention_heads, module.attention_head_size, module.all_head_size) == (3, 8, 24)
        assert module.scaling == 8**-0.5
        assert attention.query.weight.shape == (24, 32)


def test_taylor_is_the_gradient_of_a_gate(bert: Any, text: Any, train: Any, pruned: Any) -> None:
    """Against a gate on every head, by automatic differentiation, one sample at a time."""
    gates = torch.ones(2, 4, requires_grad=True)

    def hook(gate: torch.Tensor) -> Any:
        return lambda _, inputs: (inputs[0].unflatten(-1, (4, -1)) * gate[:, None]).flatten(-2)

    layers = bert.net.bert.encoder.layer
    hooks = [layers[i].attention.output.dense.register_forward_pre_hook(hook(gates[i])) for i in range(2)]
    expected = torch.zeros(2, 4)
    for i in range(64):
        one = fit.tensors({name: value[i : i + 1] for name, value in train.items()})
        expected += torch.autograd.grad(text.loss(fit.forward(bert, text, one), one["label"]), gates)[0].abs()
    for handle in hooks:
        handle.remove()
    best = [rows(bert, i)[expected[i].argmax()] for i in range(2)]
    pruned(0.75, importance="taylor")
    assert all(torch.equal(rows(bert, i)[0], best[i]) for i in range(2))


def test_taylor_of_a_shared_attention_is_the_gradient_of_one_gate_for_all_its_runs(
    bert: Any, text: Any, train: Any
) -> None:
    layers = bert.net.bert.encoder.layer
    layers[1] = layers[0]
    gate, samples = torch.ones(4, requires_grad=True), {name: value[:8] for name, value in train.items()}
    handle = layers[0].attention.output.dense.register_forward_pre_hook(
        lambda _, inputs: (inputs[0].unflatten(-1, (4, -1)) * gate[:, None]).flatten(-2)
    )
    expected = torch.zeros(4)
    for i in range(8):
        one = fit.tensors({name: value[i : i + 1] for name, value in samples.items()})
        expected += torch.autograd.grad(text.loss(fit.forward(bert, text, one), one["label"]), gate)[0].abs()
    handle.remove()
    heads, _ = _heads(bert, attentions(bert)[0])
    assert heads
    given = params(importance="taylor", batch=8)
    torch.testing.assert_close(importance(bert, text, samples, given, [heads])[heads.name], expected)


def test_frozen_weights_have_taylor_scores_and_stay_frozen(bert: Any, text: Any, train: Any, tmp_path: Path) -> None:
    found = [heads for a in attentions(bert) if (heads := _heads(bert, a)[0])]
    given = params(importance="taylor")
    expected = importance(bert, text, train, given, found)
    frozen = [bert.net.bert.embeddings, bert.net.bert.encoder.layer[0]]
    for part in frozen:
        part.requires_grad_(False)
    scores = importance(bert, text, train, given, found)
    assert all(torch.allclose(scores[name], expected[name]) for name in expected)
    prune_heads(bert, text, train, given, 0.5, Cut([], {}))
    assert attentions(bert)[0].heads == 2
    assert not any(p.requires_grad for part in frozen for p in part.parameters())
    assert all(p.requires_grad for p in bert.net.bert.encoder.layer[1].parameters())


def test_what_is_left_is_compared_on_samples_with_padding(bert: Any, text: Any, train: Any) -> None:
    """A model that is wrong without some heads, but only where there is padding."""
    whole, module = bert.forward, attentions(bert)[0].module

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        padding = (1 - attention_mask).sum(1, keepdim=True)
        return whole(input_ids, attention_mask) + padding * module.num_attention_heads

    bert.forward = forward
    done = prune_heads(bert, text, train, params(only=["*.layer.0.*"]), 0.5, Cut([], {}))
    assert done.layers[0].kept_because == "without some heads it doesn't compute what is left of it"


def test_global_scope_takes_from_the_weak_layer_and_leaves_it_one(bert: Any, pruned: Any) -> None:
    with torch.no_grad():
        for head in range(4):  # layer 0 has one strong head, layer 1 four alike
            part = slice(8 * head, 8 * head + 8)
            scale = 5.0 if head == 2 else 0.01
            attention = attentions(bert)[0]
            for projection in (attention.query, attention.key, attention.value):
                projection.weight[part] *= scale
            bert.net.bert.encoder.layer[0].attention.output.dense.weight[:, part] *= scale
    kept = attentions(bert)[0].query.weight[16:24].clone()
    assert pruned(0.375, scope="global") == {LAYER.format(0): 1, LAYER.format(1): 4}
    assert torch.equal(attentions(bert)[0].query.weight, kept)
    assert pruned(0.99, scope="global") == {LAYER.format(0): 1, LAYER.format(1): 1}


def test_only_and_what_stays_is_listed(bert: Any, text: Any, train: Any) -> None:
    done = prune_heads(bert, text, train, params(only=["*.layer.1.*"]), 0.5, Cut([], {}))
    assert [(layer.after, layer.kept_because) for layer in done.layers] == [(4, "only doesn't name it"), (2, None)]
    done = prune_heads(bert, text, train, params(ratio=0.25), 0.25, done)
    assert [(layer.before, layer.after) for layer in done.layers] == [(4, 3), (4, 2)]


@pytest.mark.parametrize("break_", ["shared", "lost", "wrong"])
def test_an_attention_that_would_come_out_wrong_is_left_as_it_was(
    bert: Any, text: Any, train: Any, pruned: Any, break_: str
) -> None:
    layers = bert.net.bert.encoder.layer
    if break_ == "shared":
        layers[0].attention.self.key.weight = layers[0].attention.self.query.weight
    elif break_ == "lost":
        layers[0].attention.output.other = layers[0].attention.output.dense
        layers[0].attention.output.dense = nn.Sequential(layers[0].attention.output.other)
    else:  # a number of heads that the forward doesn't use: what is left would be scaled otherwise
        whole = type(layers[0].attention.self).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            result, weights = whole(self, *args, **kwargs)
            return result * self.num_attention_heads, weights

        layers[0].attention.self.forward = forward.__get__(layers[0].attention.self)
    before = outputs(bert, text, train)
    done = prune_heads(bert, text, train, params(only=["*.layer.0.*"]), 0.5, Cut([], {}))
    reasons = {
        "shared": "its weights are shared with another layer",
        "lost": "its output projection wasn't found",
        "wrong": "without some heads it doesn't compute what is left of it",
    }
    assert (done.layers[0].after, done.layers[0].kept_because) == (4, reasons[break_])
    assert torch.equal(outputs(bert, text, train), before)


def test_a_model_without_attention_is_a_fault_that_says_what_was_looked_for(tiny: Any) -> None:
    with pytest.raises(Fault, match="no attention heads to prune") as caught:
        prune_heads(tiny.model(), tiny, {}, params(), 0.5, Cut([], {}))
    assert "query, key and value" in str(caught.value)

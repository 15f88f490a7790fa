"""Channels: what is left computes as before in every structure, or is skipped and listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import account, checkpoint, fit
from tasks.errors import Fault
from tasks.prune import ratios
from tasks.prune_channels import prune_channels
from tasks.prune_ranking import Candidate, output_layers, weakest
from tasks.settings import PruneParams
from tasks.workloads import protocol
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parent.parent / "tiny"
CUT = ["residual", "depthwise", "grouped", "flattened", "joined"]
SKIPPED = {
    "joined_then_grouped": ("left", "its channels are only part of what a grouped layer takes"),
    "one_channel": ("narrow", "it has 1 channels, and round_to is 4"),
    "tied": ("first", "its channels meet first, whose weights are shared with another layer"),
    "twice": ("stem", "its channels meet again, which runs more than once"),
    "bare": ("stem", "its channels meet a bare parameter of the model"),
    "reshaped": ("last", "without some of its channels the model doesn't run"),
    "chunk": ("gate", "2 of its own channels meet each other: it is several layers in one"),
    "fused": ("qkv", "3 of its own channels meet each other: it is several layers in one"),
    "detached": ("inner", "no gradient passes it, so that its channels can't be followed"),
    "shuffled": ("wide", "without some of its channels the model doesn't compute what is left of it"),
    "channels_last": ("stem", "without some of its channels the model doesn't compute what is left of it"),
    "recurrent": ("stem", "its channels meet lstm, a LSTM, which isn't cut"),
}


def params(**changes: Any) -> PruneParams:
    return PruneParams(**{"from": "base", "ratio": 0.5, "round_to": 4, "epochs": 0, "batch": 32, **changes})


@pytest.fixture(scope="module")
def forms() -> Any:
    return load_workload(TINY / "forms.py")


@pytest.fixture
def pruned(forms: Any, tmp_path: Path) -> Any:
    """`pruned(form, ...)`: the full model, the pruned one read back from its checkpoint, and its layers by name."""

    def run(form: str, **changes: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        made = checkpoint.Checkpoint(forms.model(form=form).eval(), str(TINY / "forms.py"), {"form": form})
        checkpoint.save(made, tmp_path / "full")
        train = forms.samples(0)[0]
        layers = prune_channels(made.model, forms, train, params(**changes)).layers
        checkpoint.save(replace(made, model=made.model), tmp_path / "pruned")
        again = checkpoint.load(tmp_path / "pruned").model
        x = torch.from_numpy(train["image"])
        torch.testing.assert_close(again(x), made.model.eval()(x))
        return checkpoint.load(tmp_path / "full").model, again, {layer.name: layer for layer in layers}

    return run


def without(full: nn.Module, small: nn.Module) -> nn.Module:
    """The full model with the channels at zero that the small one lacks, told by their biases."""
    with torch.no_grad():
        for name, module in full.named_modules():
            bias = getattr(module, "bias", None)
            if isinstance(bias, torch.Tensor):
                gone = ~torch.isin(bias, small.get_submodule(name).bias)
                module.weight[gone] = 0
                bias[gone] = 0
    return full


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("form", CUT)
def test_what_is_left_computes_as_the_full_model_without_those_channels(
    pruned: Any, forms: Any, form: str, scope: str
) -> None:
    full, small, layers = pruned(form, scope=scope)
    x = torch.from_numpy(forms.samples(0)[0]["image"])
    assert fit.parameters(small) < fit.parameters(full)
    torch.testing.assert_close(small(x), without(full, small)(x))
    for name, layer in layers.items():
        weight = small.get_submodule(name).weight
        assert weight.shape[0] == layer.after > 0
        assert layer.after % 4 == 0 or name == "head"
    assert account.count(small, forms).parameters == sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize("form", SKIPPED)
def test_what_would_come_out_wrong_is_skipped_and_listed(pruned: Any, forms: Any, form: str) -> None:
    full, small, layers = pruned(form)
    name, reason = SKIPPED[form]
    assert layers[name].after == layers[name].before
    assert str(layers[name].kept_because).startswith(reason)
    x = torch.from_numpy(forms.samples(0)[0]["image"])
    torch.testing.assert_close(small(x), without(full, small)(x))


def test_depthwise_and_grouped_layers_keep_their_kind(pruned: Any) -> None:
    _, small, _ = pruned("depthwise")
    assert small.each.groups == small.each.in_channels == small.each.out_channels == small.stem.out_channels == 8
    _, small, layers = pruned("grouped")
    assert (small.pairs.groups, small.pairs.in_channels, small.pairs.out_channels) == (2, 8, 16)
    assert (small.point.groups, small.point.in_channels, small.point.out_channels) == (4, 16, 8)
    assert all(layer.kept_because is None for name, layer in layers.items() if name != "head")


def test_a_residual_sum_is_pruned_together(pruned: Any) -> None:
    _, small, _ = pruned("residual")
    assert small.stem.out_channels == small.outer.out_channels == small.norm.num_features == small.head.in_features == 8


def test_only_names_what_may_go_and_holds_back_what_is_tied_to_the_rest(pruned: Any) -> None:
    _, _, layers = pruned("residual", only=["inn*", "stem"])
    assert {name for name, layer in layers.items() if layer.after < layer.before} == {"inner"}
    assert layers["outer"].kept_because == "only doesn't name it"
    assert layers["stem"].kept_because == "its channels are tied to those of outer: only doesn't name it"
    with pytest.raises(Fault, match="only names nothing") as caught:
        pruned("residual", only=["bert.*"])
    assert "stem, head, inner, outer" in str(caught.value)
    with pytest.raises(Fault, match=r"got: +bert\.\*\n"):
        pruned("residual", only=["inner", "bert.*"])


def test_norm_scale_drops_the_channels_of_the_smallest_gamma(pruned: Any, forms: Any, tmp_path: Path) -> None:
    model = forms.model(form="residual").eval()
    gamma = torch.rand(16) + 0.1
    model.norm.weight.data = gamma.clone()
    layers = prune_channels(model, forms, forms.samples(0)[0], params(importance="norm_scale")).layers
    assert sorted(model.norm.weight.tolist()) == pytest.approx(sorted(gamma.tolist())[8:])
    reasons = {layer.name: layer.kept_because for layer in layers}
    assert reasons["inner"] == "no batch norm follows it, and importance is norm_scale"


@pytest.mark.parametrize("importance", ["magnitude", "taylor"])
def test_frozen_layers_are_scored_and_stay_frozen(forms: Any, importance: str) -> None:
    torch.manual_seed(0)
    model = forms.model(form="frozen").eval()
    layers = prune_channels(model, forms, forms.samples(0)[0], params(importance=importance)).layers
    assert {layer.name: layer.after for layer in layers} == {"stem": 8, "head": 3, "inner": 8}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"stem.weight", "stem.bias"}
    assert layers[1].kept_because == "it makes an output of the model"


def test_taylor_leaves_out_what_no_gradient_reaches(pruned: Any) -> None:
    _, _, layers = pruned("silent", importance="taylor")
    assert layers["inner"].kept_because == "no gradient reaches it"
    assert {name: layer.after for name, layer in layers.items()} == {"stem": 8, "head": 3, "inner": 16, "last": 8}


def test_a_cut_that_takes_more_than_was_chosen_is_put_back(pruned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.prune_channels._fused", lambda *_: None)
    for form, name, width in (("chunk", "gate", 32), ("fused", "qkv", 48)):
        _, small, layers = pruned(form)
        assert layers[name].kept_because == "more of its channels would go than those chosen"
        assert small.get_submodule(name).weight.shape[0] == width


def test_norms_over_channels_are_compared_without_those_that_go(pruned: Any) -> None:
    _, small, _ = pruned("normed")
    assert small.stem.out_channels == small.group.num_channels == small.layer.normalized_shape[0] == 8
    assert small.last.in_features == small.head.in_features == 8


def test_frozen_layers_between_do_not_pass_for_outputs(forms: Any) -> None:
    model = forms.model(form="frozen").eval()
    found = output_layers(model, forms, fit.tensors(protocol.example(forms, 2)))
    assert found == {model.head}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert output_layers(model, forms, fit.tensors(protocol.example(forms, 2))) == {model.head}
    assert not any(p.requires_grad for p in model.parameters())


def test_global_scope_takes_more_from_the_weaker_layer(forms: Any) -> None:
    model = forms.model(form="flattened").eval()
    with torch.no_grad():
        model.wide.weight[:12] *= 1e-3
        model.head.weight[:, :12] *= 1e-3
    layers = {
        layer.name: layer.after
        for layer in prune_channels(model, forms, forms.samples(0)[0], params(scope="global", ratio=0.375)).layers
    }
    assert layers == {"stem": 16, "head": 3, "wide": 4}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_a_global_share_is_met_as_nearly_as_multiples_allow(seed: int, multiple: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [16, 20, 40, 8, 64]
    candidates = [Candidate(str(n), torch.from_numpy(rng.random(n)), n, multiple) for n in sizes]
    gone = [len(g) for g in weakest(candidates, 0.4, params(ratio=0.4, scope="global"))]
    assert abs(sum(gone) - 0.4 * sum(sizes)) <= multiple
    assert all(n - g >= multiple and (g == 0 or (n - g) % multiple == 0) for n, g in zip(sizes, gone, strict=True))


@pytest.mark.parametrize(
    ("ratio", "width", "multiple", "left"),
    [(0.05, 16, 8, 16), (0.1, 60, 8, 56), (0.5, 16, 8, 8), (0.5, 32, 8, 16), (0.5, 64, 8, 32), (0.5, 24, 8, 8)],
)
def test_what_is_left_is_the_nearest_multiple(ratio: float, width: int, multiple: int, left: int) -> None:
    (gone,) = weakest([Candidate("a", torch.arange(float(width)), width, multiple)], ratio, params(ratio=ratio))
    assert width - len(gone) == left


def test_a_ratio_below_half_a_multiple_keeps_all_and_says_so(pruned: Any) -> None:
    _, _, layers = pruned("flattened", round_to=8, ratio=0.05)
    assert [layers[name].after for name in ("stem", "wide")] == [16, 16]
    assert layers["stem"].kept_because == "nothing could go from its group at ratio 0.05 and round_to 8"


def test_global_steps_do_not_overshoot_when_a_group_is_used_up(forms: Any) -> None:
    torch.manual_seed(0)
    model = forms.model(form="pair").eval()
    with torch.no_grad():
        model.weak.weight[:56] *= 1e-3
        model.strong.weight[:, :56] *= 1e-3
    settings = params(scope="global", ratio=0.5, steps=2, round_to=8, only=["weak", "strong"])
    cut = None
    for ratio in ratios(settings):
        cut = prune_channels(model, forms, forms.samples(0)[0], settings, ratio, cut)
    assert cut is not None
    left = {layer.name: layer.after for layer in cut.layers if layer.name in ("weak", "strong")}
    assert left == {"weak": 8, "strong": 56}


def test_steps_on_the_way_take_no_more_than_their_share() -> None:
    candidates = [Candidate("a", torch.arange(32.0), 32, 8), Candidate("b", torch.arange(12.0), 12, 8)]
    kept = [
        [
            len(one.scores) - len(gone)
            for one, gone in zip(candidates, weakest(candidates, ratio, params()), strict=True)
        ]
        for ratio in (0.2, 0.4, 0.5)
    ]
    assert kept == [[32, 12], [24, 8], [16, 8]]


def test_a_count_off_the_multiples_of_eight_is_noted(pruned: Any) -> None:
    _, _, layers = pruned("depthwise", ratio=0.3, round_to=1)
    assert layers["stem"].after == 11
    assert layers["stem"].note == "11 is no multiple of 8: kernels pad it, so that it may be no faster than 16"
    assert pruned("depthwise", ratio=0.3, round_to=8)[2]["stem"].note is None


def test_the_default_keeps_multiples_of_eight(pruned: Any, forms: Any) -> None:
    assert PruneParams(**{"from": "base", "ratio": 0.3}).round_to == 8
    _, _, layers = pruned("residual", round_to=8, ratio=0.3)
    assert {name: layer.after for name, layer in layers.items()} == {"stem": 8, "head": 3, "inner": 16, "outer": 8}


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "random"])
def test_a_bert_s_feed_forward_width(text: Any, tmp_path: Path, importance: str) -> None:
    torch.manual_seed(0)
    made = checkpoint.Checkpoint(text.model(layers=2).eval(), str(TINY / "text.py"), {"layers": 2})
    checkpoint.save(made, tmp_path / "full")
    layers = prune_channels(
        made.model, text, text.samples(0)[0], params(only=["*.intermediate.dense"], importance=importance, round_to=8)
    ).layers
    cut = {layer.name: layer.after for layer in layers if layer.after < layer.before}
    assert cut == {f"net.bert.encoder.layer.{i}.intermediate.dense": 32 for i in range(2)}
    checkpoint.save(made, tmp_path / "pruned")
    small, full = (checkpoint.load(tmp_path / name).model for name in ("pruned", "full"))
    for i in range(2):  # a channel that is gone counts nothing: its column of the next layer is zero
        whole, left = full.net.bert.encoder.layer[i], small.net.bert.encoder.layer[i]
        gone = ~torch.isin(whole.intermediate.dense.weight[:, 0], left.intermediate.dense.weight[:, 0])
        whole.output.dense.weight.data[:, gone] = 0
    inputs = fit.tensors({k: v[:20] for k, v in text.samples(0)[0].items()})
    torch.testing.assert_close(fit.forward(small, text, inputs), fit.forward(full, text, inputs))


def test_a_bert_without_only_keeps_its_heads_and_runs(text: Any) -> None:
    model = text.model(layers=2).eval()
    layers = {layer.name: layer for layer in prune_channels(model, text, text.samples(0)[0], params(round_to=8)).layers}
    query = layers["net.bert.encoder.layer.0.attention.self.query"]
    assert query.after == query.before
    assert query.kept_because == "it feeds attention heads: granularity head removes those"
    assert layers["net.classifier"].kept_because == "it makes an output of the model"
    assert layers["net.bert.encoder.layer.0.output.dense"].after == 16
    assert fit.forward(model, text, fit.tensors(protocol.example(text, 3)))["logits"].shape == (3, 2)

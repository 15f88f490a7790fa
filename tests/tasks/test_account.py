"""Accounts: counted loops, the closed forms of papers, and what became of each layer."""

from __future__ import annotations

import io
import types
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from tasks import account, fit, table


def task(*shape: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(INPUTS={"x": ("float32", shape)}, OUTPUTS=("y",))


def slow_convolution(x: torch.Tensor, layer: nn.Conv2d) -> tuple[torch.Tensor, int]:
    """A 2-d convolution as loops, counting every multiply-add, padding included."""
    padded = nn.functional.pad(x, (layer.padding[1],) * 2 + (layer.padding[0],) * 2)
    height, width = layer.kernel_size
    rows = (padded.shape[2] - height) // layer.stride[0] + 1
    columns = (padded.shape[3] - width) // layer.stride[1] + 1
    out, done = torch.zeros(len(x), layer.out_channels, rows, columns), 0
    group_in, group_out = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    for o in range(layer.out_channels):
        first = o // group_out * group_in
        for r in range(rows):
            for c in range(columns):
                for i in range(group_in):
                    for a in range(height):
                        for b in range(width):
                            value = padded[0, first + i, r * layer.stride[0] + a, c * layer.stride[1] + b]
                            out[0, o, r, c] += value * layer.weight[o, i, a, b]
                            done += 1
    return out, done


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.Conv2d(4, 4, (3, 1), stride=2, groups=4, bias=False),
        nn.Conv2d(4, 6, 1, groups=2, bias=False),
    ],
)
def test_convolutions_agree_with_counted_loops(layer: nn.Conv2d) -> None:
    x = torch.randn(1, layer.in_channels, 5, 6)
    with torch.no_grad():
        expected, done = slow_convolution(x, layer)
        assert torch.allclose(layer(x), expected, atol=1e-5)
    found = account.count(nn.Sequential(layer), task(*x.shape[1:]))
    assert found.multiply_adds == done
    assert found.parameters == sum(p.numel() for p in layer.parameters())
    assert found.activation_bytes == expected.numel() * 4
    assert found.peak_activation_bytes == (x.numel() + expected.numel()) * 4


def test_a_transposed_convolution_counts_each_input_value() -> None:
    layer = nn.ConvTranspose2d(3, 5, 2, stride=2, bias=False)
    assert account.count(nn.Sequential(layer), task(3, 4, 4)).multiply_adds == 3 * 4 * 4 * 5 * 2 * 2


def test_a_linear_layer_over_a_sequence() -> None:
    found = account.count(nn.Sequential(nn.Linear(8, 3)), task(7, 8))
    assert found.multiply_adds == 7 * 8 * 3
    assert found.parameters == 8 * 3 + 3 and found.bytes == 4 * found.parameters


class Twice(nn.Module):
    """One block called twice, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.block(self.block(x))))


def test_a_block_called_twice_works_twice_and_weighs_once() -> None:
    found = account.count(Twice(), task(4))
    layers = {layer.name: layer for layer in found.layers}
    assert layers["block"].calls == 2 and layers["block"].multiply_adds == 2 * 16
    assert layers["block"].parameters == 16


def test_a_tied_weight_weighs_once() -> None:
    model = Twice()
    found = account.count(model, task(4))
    assert found.parameters == sum(p.numel() for p in model.parameters()) == 16 + 16 + 4
    assert found.multiply_adds == 4 * 16


def test_buffers_weigh_but_are_no_parameters() -> None:
    found = account.count(nn.Sequential(nn.BatchNorm2d(6)), task(6, 2, 2))
    assert found.parameters == 12
    assert found.bytes == 12 * 4 + 12 * 4 + 8
    assert found.multiply_adds == 0


def test_the_mode_is_restored_and_statistics_stay() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    model.train()
    before = model[0].running_mean.clone()
    account.count(model, task(2, 3, 3))
    assert model.training and torch.equal(model[0].running_mean, before)
    assert not model[0]._forward_hooks


def test_each_modules_mode_is_restored() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout())
    model[0].eval()
    account.count(model, task(2, 3, 3))
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


def test_resnet8_has_the_closed_form_of_its_paper() -> None:
    from tasks.workloads import digits

    found = account.count(digits.model(width=16), digits)
    sizes = {28: 16, 14: 32, 7: 64}
    expected = 28 * 28 * 9 * 1 * 16
    for side, width in sizes.items():
        before = width if side == 28 else width // 2
        expected += side * side * 9 * (before * width + width * width)
        expected += 0 if side == 28 else side * side * before * width
    assert found.multiply_adds == expected + 64 * 10
    assert found.parameters == 77754


def test_half_the_width_needs_about_a_quarter() -> None:
    from tasks.workloads import digits

    full, half = (account.count(digits.model(width=w), digits) for w in (16, 8))
    assert 0.24 < half.multiply_adds / full.multiply_adds < 0.27


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_a_bert_s_counts_agree_with_its_closed_form(text: Any, kind: str) -> None:
    model = text.model()
    model.net.config._attn_implementation = kind
    found = account.count(model, text)
    form = found.closed_form
    assert form is not None
    assert form.dimensions == {"V": 16, "P": 16, "T": 2, "H": 32, "I": 64, "N": 4, "A": 4, "L": 12, "C": 2}
    assert [part.name for part in form.parts] == [
        *("embeddings", "attention", "feed-forward", "layer norms", "pooler", "head")
    ]
    for part in form.parts:
        assert part.parameters_counted == part.parameters_closed_form, part
        assert part.multiply_adds_counted == part.multiply_adds_closed_form, part
    assert found.parameters == fit.parameters(model) == sum(part.parameters_closed_form for part in form.parts)
    assert found.multiply_adds == sum(part.multiply_adds_closed_form for part in form.parts)
    layers = {layer.name: layer.multiply_adds for layer in found.layers}
    assert layers["net.bert.encoder.layer.0.attention.self"] == 2 * 12 * 12 * 32


def test_minilm_has_its_published_22_7_million_parameters(make_workload: Any) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config)
    found = account.count(Ids(model), make_workload(model, {"input_ids": ("int64", (32,))}, ("hidden", "pooled")))
    form = found.closed_form
    assert form is not None and [part.name for part in form.parts][-1] == "pooler"
    assert found.parameters == sum(part.parameters_closed_form for part in form.parts) == 22713216
    assert found.multiply_adds == sum(part.multiply_adds_closed_form for part in form.parts)


class Ids(nn.Module):
    """A BERT without a head, on ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.bert = model

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.bert(input_ids=input_ids)
        return out.last_hidden_state, out.pooler_output


def test_of_a_compressed_bert_the_closed_form_stays_and_the_counts_fall(text: Any) -> None:
    from tasks.structure import Factorized, Tied

    model = text.model()
    whole = account.count(model, text).closed_form
    Factorized("net.bert.encoder.layer.0.output.dense", 4).apply(model)
    Tied("net.bert.encoder.layer.2", "net.bert.encoder.layer.1").apply(model)
    found = account.count(model, text)
    assert whole is not None and found.closed_form is not None
    before, after = ({p.name: p for p in form.parts}["feed-forward"] for form in (whole, found.closed_form))
    assert after.parameters_closed_form == before.parameters_closed_form == before.parameters_counted
    assert before.parameters_counted - after.parameters_counted == (2 * 32 * 64 + 96) + (32 * 64 - 4 * 96)
    assert before.multiply_adds_counted - after.multiply_adds_counted == 12 * (32 * 64 - 4 * 96)


class Attentive(nn.Module):
    """Products in three places that no linear layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.weight = nn.Parameter(torch.ones(12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.attention(x, x, x, need_weights=False)[0])[0] @ self.weight


def test_products_inside_attention_lstm_and_bare_matrices_count() -> None:
    found = account.count(Attentive(), task(5, 8))
    layers = {layer.name: layer for layer in found.layers}
    assert layers["attention"].multiply_adds == 4 * 5 * 8 * 8 + 2 * 5 * 5 * 8
    assert layers["lstm"].multiply_adds == 5 * 2 * 4 * 6 * (8 + 6)
    assert layers[""].multiply_adds == 5 * 12 * 3 and layers[""].parameters == 36
    assert layers["attention.out_proj"].multiply_adds == 0


def test_a_failed_count_leaves_no_hook_and_the_fast_path_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        account.count(model, task(5))
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert torch.backends.mha.get_fastpath_enabled()


def cost(name: str, parameters: int, multiply_adds: int = 0) -> account.LayerCost:
    return account.LayerCost(name, "Layer", 1, parameters, 4 * parameters, multiply_adds, 0)


def report(*layers: account.LayerCost) -> account.AccountReport:
    sums = [sum(getattr(layer, key) for layer in layers) for key in ("parameters", "bytes", "multiply_adds")]
    return account.AccountReport(*sums, 0, 0, list(layers))


def test_difference_matches_factors_the_renamed_the_gone_and_the_new() -> None:
    before = report(
        cost("attention", 0, 50), cost("attention.query", 16, 16), cost("layers.0.a", 8, 8), cost("layers.1.a", 6, 6)
    )
    after = report(
        cost("attention", 0, 40), cost("attention.query.0", 4, 4), cost("attention.query.1", 5, 5),
        cost("layers.0.a", 3, 3), cost("extra", 2),
    )  # fmt: skip
    found = account.difference(before, after, {"layers.0": "", "layers.1": "layers.0"})
    rows = {c.name: (c.parameters_before, c.parameters_after, c.multiply_adds_after) for c in found.layers}
    assert rows == {
        "attention": (0, 0, 40),
        "attention.query": (16, 9, 9),
        "layers.0.a": (8, 0, 0),
        "layers.1.a": (6, 3, 3),
        "extra": (0, 2, 0),
    }
    assert (found.parameters_before, found.parameters_after) == (30, 14)
    assert (found.multiply_adds_before, found.multiply_adds_after) == (80, 52)


def test_a_name_is_no_prefix_of_a_longer_number_and_empty_layers_are_left_out() -> None:
    found = account.difference(report(cost("a.1", 1), cost("a.10", 2), cost("drop", 0)), report(cost("a.10", 2)))
    assert [(c.name, c.parameters_after) for c in found.layers] == [("a.1", 0), ("a.10", 2)]


def test_difference_of_real_models_sums_to_the_totals(text: Any) -> None:
    from tasks.structure import Factorized

    model = text.model()
    before = account.count(model, text)
    Factorized("net.bert.encoder.layer.1.attention.self.query", 4).apply(model)
    found = account.difference(before, account.count(model, text))
    for key in ("parameters", "bytes", "multiply_adds"):
        for side in ("before", "after"):
            assert sum(getattr(c, f"{key}_{side}") for c in found.layers) == getattr(found, f"{key}_{side}")
    changed = [c for c in found.layers if c.parameters_before != c.parameters_after]
    assert [(c.name, c.parameters_after) for c in changed] == [
        ("net.bert.encoder.layer.1.attention.self.query", 4 * 32 * 2 + 32)
    ]


def test_the_table_shows_both_with_their_dimensions(text: Any, tiny: Any) -> None:
    stream = io.StringIO()
    table.show_account("base", account.count(text.model(), text), Console(file=stream, width=200))
    shown = stream.getvalue()
    assert "V 16, P 16, T 2, H 32, I 64, N 4, A 4, L 12, C 2" in shown and "they agree" in shown
    assert "N·(4·L·H² + 2·L²·H)" in shown and "233,472" in shown
    stream = io.StringIO()
    table.show_account("base", account.count(tiny.model(), tiny), Console(file=stream, width=200))
    assert "closed form" not in stream.getvalue()

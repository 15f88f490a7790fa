"""Factorisation: the error is the least there is, ranks fit their budget, and what can't be factorised stays."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import account, checkpoint, factorize, fit, low_rank
from tasks.errors import Fault
from tasks.settings import FactorizeParams
from tasks.workloads.protocol import load_workload

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
    spectrum = low_rank.decompose(low_rank.matrix(layer), None)
    rank = low_rank.choose_rank(spectrum.energy, params(rank=0.5))
    (first, second), energy = spectrum.factors(rank), float(spectrum.energy[rank - 1])
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
    weight = low_rank.matrix(layer)
    aware, blind = (low_rank.decompose(weight, moment).factors(3) for moment in (x.T @ x / len(x), None))

    def error(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(((x @ (pair[1] @ pair[0]).T - layer(x)) ** 2).sum())

    outputs = layer(x).detach()
    singular = torch.linalg.svdvals(outputs)
    best = float((singular[3:] ** 2).sum())
    assert error(aware) == pytest.approx(best, rel=0.02)
    assert error(blind) > 1.5 * error(aware)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (3, 1), dilation=2, bias=False),
        nn.Conv2d(5, 7, 1),
        nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="reflect"),
    ],
)
def test_a_convolution_of_full_rank_is_unchanged(layer: nn.Conv2d) -> None:
    x = torch.randn(2, layer.in_channels, 9, 9)
    patches = low_rank._rows(layer, x)
    spectrum = low_rank.decompose(low_rank.matrix(layer), patches.T @ patches)
    pair = factorize.factors(layer, len(spectrum.values))
    factorize._fill(pair, layer, *spectrum.factors(len(spectrum.values)))
    assert torch.allclose(pair(x), layer(x), atol=1e-4)


def test_second_moments_are_those_of_the_patches_that_the_layer_sees() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    model, arrays = nn.Sequential(layer), data(2, 4, 4)
    found = low_rank.second_moments(model, task(2, 4, 4), arrays, [layer], 40)[layer]
    padded = np.pad(arrays["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches = [padded[n, :, r : r + 3, c : c + 3].ravel() for n in range(40) for r in range(4) for c in range(4)]
    expected = sum(np.outer(p, p) for p in patches) / len(patches)
    assert np.allclose(found, expected, atol=1e-4)


def test_padding_along_the_dynamic_axis_is_left_out(text: Any) -> None:
    """The slow reference: each sample alone, cut to its own length."""
    torch.manual_seed(0)
    model = text.model(layers=1).eval()
    words, query = model.net.bert.embeddings.word_embeddings, model.net.bert.encoder.layer[0].attention.self.query
    train = {key: value[:20] for key, value in text.samples(0)[0].items()}
    found = low_rank.second_moments(
        model, text, {k: np.concatenate([v, v]) for k, v in train.items()}, [words, query], 20
    )
    rows: list[torch.Tensor] = []
    handle = query.register_forward_hook(lambda _m, inputs, _o: rows.append(inputs[0][0].detach()))
    for ids, mask in zip(train["input_ids"], train["attention_mask"], strict=True):
        n = int(mask.sum())
        model(torch.from_numpy(ids[None, :n]), torch.from_numpy(mask[None, :n]))
    handle.remove()
    x = torch.cat(rows).double()
    assert torch.allclose(found[query], x.T @ x / len(x), atol=1e-5)
    seen = np.bincount(train["input_ids"][train["attention_mask"] == 1], minlength=16)
    assert np.allclose(found[words], (seen + 1) / (seen.sum() + 16))


def test_an_embedding_s_error_is_least_for_the_words_that_are_frequent() -> None:
    """The closed form: the discarded singular values of the rows by the root of their frequency."""
    torch.manual_seed(0)
    layer, often = nn.Embedding(30, 8), torch.rand(30).double() ** 6 + 1e-3

    def error(moment: torch.Tensor | None) -> float:
        pair = factorize.factors(layer, 3)
        factorize._fill(pair, layer, *low_rank.decompose(low_rank.matrix(layer), moment).factors(3))
        ids = torch.arange(30)
        return float((often[:, None] * (pair(ids) - layer(ids)) ** 2).sum())

    singular = torch.linalg.svdvals(often.sqrt()[:, None] * layer.weight.detach())
    assert error(often) == pytest.approx(float((singular[3:] ** 2).sum()), rel=1e-3)
    assert error(None) > 1.2 * error(often)


def test_a_padding_word_stays_zero_and_gets_no_gradient() -> None:
    layer = nn.Embedding(10, 8, padding_idx=0)
    pair = factorize.factors(layer, 3)
    factorize._fill(pair, layer, *low_rank.decompose(low_rank.matrix(layer), None).factors(3))
    pair(torch.tensor([0, 4])).sum().backward()
    assert float(pair(torch.tensor([0])).abs().max()) < 1e-6
    gradient = pair[0].weight.grad
    assert gradient is not None and not gradient[0].any() and gradient[4].any()


def spectra() -> list[low_rank.Spectrum]:
    torch.manual_seed(0)
    shapes, falls = ((6, 6), (4, 9), (12, 5)), (1.0, 0.2, 3.0)
    weights = [
        torch.randn(*s) @ torch.diag(torch.arange(1, s[1] + 1.0) ** -f) for s, f in zip(shapes, falls, strict=True)
    ]
    return [low_rank.decompose(w, None) for w in weights]


def held(spectrum: low_rank.Spectrum, rank: int | None) -> int:
    return spectrum.whole if rank is None else spectrum.size(rank)


def lost(spectrum: low_rank.Spectrum, rank: int | None) -> float:
    return 0.0 if rank is None else 1 - float(spectrum.energy[rank - 1])


@pytest.mark.parametrize(("budget", "round_to"), [(0.35, 1), (0.45, 1), (0.6, 1), (0.95, 1), (0.8, 2), (0.95, 2)])
def test_a_budget_goes_to_the_singular_values_that_bring_most_energy_per_parameter(
    budget: float, round_to: int
) -> None:
    """The slow reference: give them out one by one, the best first, and stop before the budget is exceeded."""
    found = spectra()
    most = budget * sum(s.whole for s in found)
    order = sorted(
        (-float(value**2 / (s.values**2).sum()) / s.size(1), i) for i, s in enumerate(found) for value in s.values
    )
    given, expected = [0] * len(found), []
    for _, i in order:
        given[i] += 1
        ranks = [min(-(-max(1, n) // round_to) * round_to, len(s.values)) for n, s in zip(given, found, strict=True)]
        whole = [None if s.size(r) >= s.whole else r for s, r in zip(found, ranks, strict=True)]
        if sum(held(s, r) for s, r in zip(found, whole, strict=True)) > most:
            break
        expected = whole
    assert expected and low_rank.choose_together(found, budget, round_to) == expected


@pytest.mark.parametrize("budget", [0.35, 0.45, 0.6, 0.8, 0.95])
def test_a_budget_s_ranks_lose_hardly_more_than_the_best_of_all_combinations(budget: float) -> None:
    found = spectra()
    most = budget * sum(s.whole for s in found)

    def total(ranks: Any, of: Any) -> float:
        return float(sum(of(s, r) for s, r in zip(found, ranks, strict=True)))

    chosen = low_rank.choose_together(found, budget, 1)
    every = itertools.product(*[[*range(1, len(s.values) + 1), None] for s in found])
    best = min(total(ranks, lost) for ranks in every if total(ranks, held) <= most)
    assert total(chosen, held) <= most
    assert best - 1e-9 <= total(chosen, lost) <= best + 0.15


def test_a_budget_below_the_lowest_ranks_is_a_fault() -> None:
    with pytest.raises(Fault, match=r"(?s)a budget of 0.05 is too small.*at least 42,"):
        low_rank.choose_together(spectra(), 0.05, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.grouped = nn.Linear(16, 2), nn.Conv1d(16, 16, 1, groups=4)
        self.a, self.b, self.wide = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.b.weight = self.a.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(34, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.grouped(self.b(self.a(x))[..., None])[..., 0]
        y = self.attention(y[:, None], y[:, None], y[:, None])[0][:, 0]
        return self.head(torch.cat([self.small(y), self.wide(y)], 1))


def test_layers_that_would_grow_or_are_shared_or_make_outputs_stay_and_say_so() -> None:
    model = Net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    layers, structure = factorize.factorize_layers(model, task(16), data(16), params(rank=0.25, round_to=2))
    reasons = {layer.name: str(layer.kept_because) for layer in layers}
    assert [s.name for s in structure] == ["wide"]
    assert reasons["small"] == "rank 2 would need 36 parameters, not fewer than 32"
    assert "shared" in reasons["a"] and reasons["head"] == "it makes an output of the model"
    assert reasons["grouped"] == "a Conv1d is not factorised" and "not called" in reasons["attention.out_proj"]
    for name in set(before) - {"wide.weight", "wide.bias"}:
        assert torch.equal(model.get_parameter(name), before[name])
    model(torch.from_numpy(data(16)["x"]))


def test_sparse_and_unnamed_layers_stay_and_say_so() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    masks = {"1.weight": torch.ones(16, 16, dtype=torch.bool)}
    only = params(rank=0.25, only=["[12]", "3"])
    layers, structure = factorize.factorize_layers(model, task(16), data(16), only, masks)
    assert [s.name for s in structure] == ["2"]
    assert [layer.kept_because for layer in layers] == [
        "only doesn't name it",
        "its weight is sparse, and factors of it would not be",
        None,
        "it makes an output of the model",
    ]


def test_a_glob_that_names_no_layer_is_a_fault() -> None:
    with pytest.raises(Fault, match=r"(?s)only names no layer.*\*query.*0, 1"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        factorize.factorize_layers(model, task(4), data(4), params(rank=0.25, only=["0", "*query"]))


def test_a_layer_in_two_places_is_factorised_once_for_both() -> None:
    torch.manual_seed(0)
    once = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": once, "b": nn.Sequential(once, nn.ReLU()), "head": nn.Linear(16, 4)})
    model.forward = lambda x: model["head"](model["b"](model["a"](x)))  # type: ignore[method-assign]
    layers, structure = factorize.factorize_layers(model, task(16), data(16), params(rank=0.25))
    assert structure == [factorize.Factorized("a", 4), factorize.Tied("b.0", "a")]
    assert model["b"][0] is model["a"] and [layer.rank for layer in layers] == [4, None]
    assert fit.parameters(model) == 2 * 16 * 4 + 16 + 16 * 4 + 4


class Unembedding(nn.Module):
    """An embedding that is called, and whose weight also makes logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.linear(self.body(self.words(x.long().abs())).mean(1), self.words.weight))


def test_a_layer_whose_weight_is_read_elsewhere_is_put_back_and_says_so() -> None:
    model, arrays = Unembedding(), data(5)
    before = model(torch.from_numpy(arrays["x"]))
    layers, structure = factorize.factorize_layers(model, task(5), arrays, params(rank=0.25, samples=0, only=["words"]))
    words = next(layer for layer in layers if layer.name == "words")
    assert structure == [] and isinstance(model.words, nn.Embedding)
    assert words.rank is None and words.parameters_after == words.parameters_before == 320
    assert str(words.kept_because).startswith("with factors of it the model no longer runs: AttributeError")
    assert torch.equal(model(torch.from_numpy(arrays["x"])), before)
    _, structure = factorize.factorize_layers(model, task(5), arrays, params(rank=0.25, samples=0))
    assert [change.name for change in structure] == ["body"]


FROZEN = """
import sys
sys.path.insert(0, {folder!r})
from text import *
from text import model as whole
def model(layers=1, **_):
    made = whole(layers=layers)
    made.net.bert.embeddings.requires_grad_(False)
    made.net.bert.encoder.layer[0].output.dense.bias.requires_grad_(False)
    return made
"""


def test_factors_of_a_frozen_layer_are_frozen_after_reload_too(write_workload: Any, tmp_path: Path) -> None:
    path = write_workload(FROZEN.format(folder=str(ROOT / "tests" / "tiny")))
    made = checkpoint.Checkpoint(load_workload(path).model(), str(path))
    train = {name: value[:20] for name, value in made.workload.samples(0)[0].items()}
    wanted = params(rank=0.25, samples=0, only=["*.word_embeddings", "*.dense"])
    _, structure = factorize.factorize_layers(made.model, made.workload, train, wanted)
    checkpoint.save(replace(made, structure=tuple(structure)), tmp_path / "low")
    again = checkpoint.load(tmp_path / "low").model
    flags = [{name: p.requires_grad for name, p in model.named_parameters()} for model in (made.model, again)]
    assert flags[0] == flags[1]
    output = "net.bert.encoder.layer.0.output.dense"
    assert {name for name, flag in flags[0].items() if not flag} == {
        *[name for name in flags[0] if name.startswith("net.bert.embeddings.")],
        f"{output}.1.bias",
    }
    assert {f"{output}.0.weight", "net.bert.embeddings.word_embeddings.1.weight"} <= set(flags[0])


def test_reported_costs_are_the_counted_ones() -> None:
    from tasks.workloads import digits

    torch.manual_seed(0)
    model = digits.model(width=16)
    arrays = {"image": np.random.default_rng(0).normal(size=(8, 1, 28, 28)).astype(np.float32), "label": np.zeros(8)}
    before = account.count(model, digits)
    layers, structure = factorize.factorize_layers(model, digits, arrays, params(rank=0.5, samples=8))
    counted = account.count(model, digits)
    assert structure
    rows = {c.name: c for c in account.difference(before, counted).layers}
    for layer in layers:
        bias = 0 if layer.name != "head" else 10
        assert rows[layer.name].parameters_after == layer.parameters_after + bias
        assert rows[layer.name].parameters_before == layer.parameters_before + bias
        if layer.rank:
            assert rows[layer.name].multiply_adds_after < rows[layer.name].multiply_adds_before


@pytest.mark.parametrize(("energy", "expected"), [(0.5, 1), (0.7, 2), (0.95, 3), (0.9999, 4)])
def test_energy_takes_the_least_rank_that_keeps_it(energy: float, expected: int) -> None:
    squares = torch.tensor([0.6, 0.25, 0.1, 0.05])
    assert low_rank.choose_rank(squares.cumsum(0), params(energy=energy)) == expected


def test_ranks_are_rounded_up_to_multiples_and_never_beyond_full() -> None:
    energy = torch.linspace(0.1, 1, 20)
    assert low_rank.choose_rank(energy, params(rank=0.3, round_to=8)) == 8
    assert low_rank.choose_rank(energy, params(rank=0.9, round_to=8)) == 20


@pytest.mark.parametrize(
    "given", [{}, {"rank": 0.5, "energy": 0.5}, {"rank": 1.0}, {"energy": 0.0}, {"budget": 0.5, "rank": 0.5}]
)
def test_exactly_one_of_rank_energy_and_budget_within_0_and_1(given: dict) -> None:
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
    from tasks.prune_channels import prune_channels
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


TEXT = str(ROOT / "tests" / "tiny" / "text.py")


def test_a_bert_within_a_budget_reloads_with_its_embeddings_and_attention_factorised(text: Any, tmp_path: Path) -> None:
    from tasks.data import write

    torch.manual_seed(0)
    checkpoint.save(checkpoint.Checkpoint(text.model(layers=2).eval(), TEXT, {"layers": 2}), tmp_path / "source")
    samples = text.samples(0)[0]
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.npz", {k: v[:150] for k, v in samples.items()})
    wanted = params(budget=0.5, samples=60, only=["*.word_embeddings", "*attention*", "*.dense"], round_to=2, epochs=1)
    found = factorize.factorize(tmp_path / "source", tmp_path, tmp_path / "target", wanted)
    loaded = checkpoint.load(tmp_path / "target")
    eligible = [
        layer for layer in found.layers if layer.kept_because in (None, "the budget is better spent on it whole")
    ]
    after, before = (sum(getattr(layer, f"parameters_{side}") for layer in eligible) for side in ("after", "before"))
    assert 0.47 * before < after <= 0.5 * before
    ranks = {layer.name: layer.rank for layer in found.layers}
    assert ranks["net.bert.embeddings.word_embeddings"] and ranks["net.bert.encoder.layer.0.attention.self.query"]
    assert ranks["net.classifier"] is None and ranks["net.bert.embeddings.position_embeddings"] is None
    assert found.cost.parameters_after == fit.parameters(loaded.model) == found.cost.parameters_before - before + after
    assert len(found.curve) == 1 and loaded.model.net.bert.embeddings.word_embeddings[0].padding_idx == 0
    checkpoint.save(loaded, tmp_path / "again")
    assert (tmp_path / "again" / checkpoint.FILE).read_bytes() == (tmp_path / "target" / checkpoint.FILE).read_bytes()

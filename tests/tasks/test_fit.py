"""The shared training loop."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import fit
from tasks.errors import Fault
from tasks.settings import FitParams, PruneParams


@pytest.fixture(scope="session")
def train_split(tiny: Any) -> Any:
    return {name: value[:400] for name, value in tiny.samples(1)[0].items()}


@pytest.fixture(scope="session")
def validation_split(tiny: Any) -> Any:
    return {name: value[400:500] for name, value in tiny.samples(1)[0].items()}


@pytest.fixture
def model(tiny: Any) -> nn.Module:
    torch.manual_seed(0)
    return tiny.model(width=4)


class Named(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        both = {"second": a + b, "first": a - b}
        return both if self.form == "dict" else (both["first"], both["second"])


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_forward_names_inputs_and_outputs(make_workload: Any, form: str) -> None:
    task = make_workload(None, {"a": ("float32", (2,)), "b": ("float32", (2,))}, ("first", "second"))
    inputs = {"b": torch.tensor([[1.0, 2]]), "a": torch.tensor([[5.0, 7]])}
    got = fit.forward(Named(form), task, inputs)
    assert got["first"].tolist() == [[4, 5]]
    assert got["second"].tolist() == [[6, 9]]


def test_more_results_than_outputs_are_refused(make_workload: Any) -> None:
    task = make_workload(None, {"a": ("float32", (2,)), "b": ("float32", (2,))}, ("first",))
    with pytest.raises(ValueError, match="zip"):
        fit.forward(Named("tuple"), task, {"a": torch.ones(1, 2), "b": torch.ones(1, 2)})


@pytest.mark.parametrize("mode", [True, False])
def test_predict_is_in_eval_mode_in_order_and_restores_the_mode(
    tiny: Any, model: nn.Module, validation_split: Any, mode: bool
) -> None:
    one_by_one = fit.predict(model, tiny, validation_split, batch=1)["logits"]
    model.train(mode)
    got = fit.predict(model, tiny, validation_split, batch=33)["logits"]
    assert model.training is mode
    np.testing.assert_allclose(got, one_by_one, atol=1e-5)


def test_predict_restores_each_modules_mode(tiny: Any, model: nn.Module, validation_split: Any) -> None:
    model.train()
    model.stem.eval()
    before = {name: module.training for name, module in model.named_modules()}
    fit.predict(model, tiny, validation_split)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_modes_are_restored_after_an_error(model: nn.Module) -> None:
    model.train()
    model.stem.eval()
    with pytest.raises(ZeroDivisionError), fit.eval_mode(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert (model.training, model.stem.training, model.head.training) == (True, False, True)


def test_the_best_epoch_is_kept(tiny: Any, model: nn.Module, train_split: Any, validation_split: Any) -> None:
    curve = fit.fit(
        model, tiny, train_split, validation_split, FitParams(epochs=4, batch=64, lr=2e-2), fit.task_loss(tiny)
    )
    assert fit.score(model, tiny, validation_split) == max(e.validation for e in curve)
    assert [e.epoch for e in curve] == [1, 2, 3, 4]
    assert not model.training


def test_a_worse_last_epoch_is_not_kept(tiny: Any, model: nn.Module, train_split: Any, validation_split: Any) -> None:
    steps = 0

    def destructive(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        loss = tiny.loss(outputs, labels)
        return loss if steps <= 7 else -100 * loss

    curve = fit.fit(model, tiny, train_split, validation_split, FitParams(epochs=4, batch=64, lr=5e-2), destructive)
    assert curve[-1].validation < max(e.validation for e in curve)
    assert fit.score(model, tiny, validation_split) == max(e.validation for e in curve)


def test_a_seed_fixes_the_weights(tiny: Any, train_split: Any, validation_split: Any) -> None:
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        model = tiny.model(width=4)
        params = FitParams(epochs=1, batch=64, seed=seed)
        fit.fit(model, tiny, train_split, validation_split, params, fit.task_loss(tiny))
        states.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_every_sample_is_seen_once_an_epoch_with_its_own_row(
    tiny: Any, model: nn.Module, train_split: Any, validation_split: Any
) -> None:
    seen: list[int] = []

    def watch(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert torch.equal(labels, torch.from_numpy(train_split["label"])[index])
        seen.extend(index.tolist())
        return tiny.loss(outputs, labels)

    fit.fit(model, tiny, train_split, validation_split, FitParams(epochs=2, batch=48), watch)
    n = len(train_split["label"])
    assert sorted(seen[:n]) == sorted(seen[n:]) == list(range(n))
    assert seen[:n] != seen[n:]


def test_a_diverging_run_says_which_setting(
    tiny: Any, model: nn.Module, train_split: Any, validation_split: Any
) -> None:
    with pytest.raises(ValueError, match=r"loss is nan in epoch 1: lower lr \(got 0.5\)"):
        fit.fit(
            model,
            tiny,
            train_split,
            validation_split,
            FitParams(epochs=1, lr=0.5),
            lambda outputs, labels, index: outputs["logits"].sum() * float("nan"),
        )


def test_masked_weights_are_zero_in_every_step_and_in_the_best_weights(
    tiny: Any, model: nn.Module, train_split: Any, validation_split: Any
) -> None:
    masks = {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if name.endswith("weight")}

    def watch(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert not any(model.get_parameter(name)[~mask].any() for name, mask in masks.items())
        return tiny.loss(outputs, labels)

    params = FitParams(epochs=2, batch=64, lr=1e-2)
    fit.fit(model, tiny, train_split, validation_split, params, watch, masks=masks)
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()
        assert model.get_parameter(name)[mask].all()


def test_without_epochs_only_the_masks_change_the_model(
    tiny: Any, model: nn.Module, train_split: Any, validation_split: Any
) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mask = torch.rand(model.head.weight.shape) < 0.5
    params = PruneParams.model_validate({"from": "x", "ratio": 0.5, "epochs": 0})
    assert fit.fine_tune(model, tiny, train_split, validation_split, params, masks={"head.weight": mask}) == []
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] * mask if name == "head.weight" else before[name])


@pytest.fixture(scope="session")
def sentences(text: Any) -> Any:
    """Training and validation samples of the text workload, from its first 300."""
    arrays, _ = text.samples(0)
    return {k: v[:200] for k, v in arrays.items()}, {k: v[200:300] for k, v in arrays.items()}


@pytest.fixture
def reader(text: Any) -> nn.Module:
    torch.manual_seed(0)
    return text.model(layers=1, width=16)


def test_outputs_do_not_depend_on_padding_and_keep_the_samples_order(
    text: Any, reader: nn.Module, sentences: Any
) -> None:
    arrays, _ = sentences
    with fit.eval_mode(reader), torch.inference_mode():
        whole = fit.forward(reader, text, fit.tensors(arrays))["logits"].numpy()
    assert len(set(text.lengths(arrays))) > 5
    for batch in (1, 7, 256):
        np.testing.assert_allclose(fit.predict(reader, text, arrays, batch)["logits"], whole, atol=1e-5)


def test_bucketed_batches_are_cut_to_their_longest_and_see_each_sample_once_an_epoch(
    text: Any, reader: nn.Module, sentences: Any
) -> None:
    arrays, held_out = sentences
    used, seen, shapes = text.lengths(arrays), [], []
    real = reader.forward

    def watch_forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if reader.training:
            shapes.append(input_ids.shape)
        return real(input_ids, attention_mask)

    def watch(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert torch.equal(labels, torch.from_numpy(arrays["label"])[index])
        assert shapes[-1] == (len(index), used[index].max())
        seen.append(index.tolist())
        return text.loss(outputs, labels)

    reader.forward = watch_forward  # type: ignore[method-assign]
    fit.fit(reader, text, arrays, held_out, FitParams(epochs=2, batch=10), watch)
    first, second = ([row for batch in epoch for row in batch] for epoch in (seen[:20], seen[20:]))
    assert sorted(first) == sorted(second) == list(range(200))
    assert first != second
    assert sum(n * length for n, length in shapes) < 1.25 * 2 * used.sum()
    longest = [length for _, length in shapes[:20]]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_an_output_with_the_dynamic_axis_is_refused(text: Any, sentences: Any) -> None:
    class Tagger(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return input_ids.float()

    with pytest.raises(Fault, match="output logits changes its shape from batch to batch"):
        fit.predict(Tagger(), text, sentences[0], batch=10)


def test_a_score_that_is_no_number_is_refused(
    make_workload: Any, tiny: Any, model: nn.Module, train_split: Any, validation_split: Any
) -> None:
    task = make_workload(None, tiny.INPUTS)
    task.METRICS = {"broken": lambda out, y: np.full(len(y), np.nan)}
    with pytest.raises(ValueError, match="validation score is nan in epoch 1"):
        fit.fine_tune(model, task, train_split, validation_split, FitParams(epochs=1))


def test_training_stops_when_patience_runs_out(
    tiny: Any, model: nn.Module, train_split: Any, validation_split: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def destructive(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return -tiny.loss(outputs, labels)

    params = FitParams(epochs=9, batch=100, lr=1e-2, patience=2)
    curve = fit.fit(model, tiny, train_split, validation_split, params, destructive)
    best = max(curve, key=lambda e: e.validation)
    assert len(curve) == best.epoch + 2 < 9
    assert fit.score(model, tiny, validation_split) == best.validation
    assert f"stopped after epoch {len(curve)} of 9: none better than epoch {best.epoch}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (3.0, ["1/2 40%", "1/2 80%", "1/2", "2/2 40%", "2/2 80%", "2/2"]),
        (1.9, ["1/2", "2/2"]),
    ],
)
def test_long_epochs_tell_every_ten_seconds_with_the_time_left(
    tiny: Any,
    model: nn.Module,
    train_split: Any,
    validation_split: Any,
    step_s: float,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tasks.training.time.monotonic", lambda: clock[0])

    def slow(outputs: Any, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        clock[0] += step_s
        return tiny.loss(outputs, labels)

    fit.fit(model, tiny, train_split, validation_split, FitParams(epochs=2, batch=40), slow)
    lines = capsys.readouterr().out.splitlines()
    found = [re.match(r"epoch (\d/\d)(?: · (\d+%) of it)?.* · (\d+) s left$", line) for line in lines]
    assert [" ".join(m.groups()[:2]) if m and m[2] else m and m[1] for m in found] == told
    assert [int(m[3]) for m in found if m] == ([48, 36, 30, 18, 6, 0] if len(told) > 2 else [19, 0])


def test_mixed_precision_learns_with_weights_and_losses_in_fp32(
    tiny: Any, train_split: Any, validation_split: Any
) -> None:
    states, seen = {}, set()
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        model = tiny.model(width=4)

        def watch(outputs: Any, labels: torch.Tensor, index: torch.Tensor, precision: str = precision) -> torch.Tensor:
            loss = tiny.loss(outputs, labels)
            seen.add((precision, outputs["logits"].dtype, loss.dtype))
            return loss

        params = FitParams(epochs=4, batch=64, lr=2e-2, precision=precision)
        curve = fit.fit(model, tiny, train_split, validation_split, params, watch)
        assert max(e.validation for e in curve) > 0.8
        states[precision] = torch.cat([p.flatten() for p in model.parameters()])
    assert seen == {("fp32", torch.float32, torch.float32), ("bf16", torch.bfloat16, torch.float32)}
    assert states["bf16"].dtype == torch.float32 and not torch.equal(*states.values())


def test_a_point_of_the_curve_tells_the_device(
    tiny: Any, model: nn.Module, train_split: Any, validation_split: Any
) -> None:
    curve = fit.fit(model, tiny, train_split, validation_split, FitParams(epochs=1), fit.task_loss(tiny))
    assert [e.device for e in curve] == ["cpu"]

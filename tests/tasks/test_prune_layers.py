"""Layers: the ones that change least go, the checkpoint remembers which, masks follow."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import checkpoint, fit
from tasks.data import write
from tasks.errors import Fault
from tasks.prune import prune
from tasks.prune_layers import importance, originals, prune_layers, renamed, running_stacks
from tasks.prune_ranking import Cut
from tasks.settings import PruneParams
from tasks.structure import Kept, Tied
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parent.parent / "tiny"
STACK = "net.bert.encoder.layer"


def params(**changes: Any) -> PruneParams:
    return PruneParams(**{"from": "base", "granularity": "layer", "ratio": 0.5, "epochs": 0, "batch": 32, **changes})


@pytest.fixture
def bert(text: Any) -> Any:
    torch.manual_seed(0)
    return text.model(width=16).eval()


@pytest.fixture(scope="module")
def splits(text: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splits")
    samples = text.samples(0)[0]
    write(folder / "train.npz", {name: value[:64] for name, value in samples.items()})
    write(folder / "validation.npz", {name: value[64:128] for name, value in samples.items()})
    return folder


@pytest.fixture
def train(text: Any) -> dict[str, Any]:
    return {name: value[:64] for name, value in text.samples(0)[0].items()}


def idle(bert: Any, *layers: int) -> None:
    """Make layers of the BERT pass their input on, nearly."""
    with torch.no_grad():
        for i in layers:
            for part in (bert.net.bert.encoder.layer[i].attention.output, bert.net.bert.encoder.layer[i].output):
                part.dense.weight.zero_()
                part.dense.bias.zero_()


@pytest.mark.parametrize("kind", ["magnitude", "taylor"])
def test_layers_that_do_nothing_go_and_the_model_computes_on(bert: Any, text: Any, train: Any, kind: str) -> None:
    idle(bert, 0, 2)
    before = fit.forward(bert, text, fit.tensors(train))["logits"]
    layers = list(bert.net.bert.encoder.layer)
    done = prune_layers(bert, text, train, params(importance=kind), 0.5, Cut([], {}))
    assert list(bert.net.bert.encoder.layer) == [layers[1], layers[3]]
    assert done.structure == (Kept(STACK, (1, 3)),)
    torch.testing.assert_close(fit.forward(bert, text, fit.tensors(train))["logits"], before, atol=1e-4, rtol=1e-4)


def test_scores_are_those_of_a_loop_over_real_tokens(bert: Any, text: Any, train: Any) -> None:
    """Block influence by hand: one sample at a time, without its padding."""
    with torch.no_grad():
        for layer in bert.net.bert.encoder.layer:
            layer.output.dense.weight *= 20
    found = running_stacks(bert, text)
    scores = importance(bert, text, train, params(), found)[STACK]
    slopes = importance(bert, text, train, params(importance="taylor"), found)[STACK]
    turn, slope = torch.zeros(4), torch.zeros(4)
    for i in range(64):
        used = int(train["attention_mask"][i].sum())
        one = fit.tensors({n: v[i : i + 1, :used] if v.ndim == 2 else v[i : i + 1] for n, v in train.items()})
        states: list[torch.Tensor] = []
        layers = bert.net.bert.encoder.layer
        hooks = [layers[0].register_forward_pre_hook(lambda _, x, s=states: s.append(x[0]))]
        hooks += [layer.register_forward_hook(lambda _, __, y, s=states: s.append(y)) for layer in layers]
        loss = text.loss(fit.forward(bert, text, one), one["label"])
        for hook in hooks:
            hook.remove()
        for j in range(4):
            x, y = states[j][0].detach(), states[j + 1][0].detach()
            turn[j] += np.mean([1 - float(a @ b / a.norm() / b.norm()) for a, b in zip(x, y, strict=True)])
            gradient = torch.autograd.grad(loss, states[j + 1], retain_graph=True)[0][0]
            slope[j] += abs(float((gradient * (y - x)).sum()))
    assert torch.allclose(scores, turn, rtol=1e-3)
    assert torch.allclose(slopes * 32, slope, rtol=1e-2)  # the loss of a batch is a mean over 32


def test_steps_from_a_checkpoint_with_masks_to_one_that_loads(
    bert: Any, text: Any, splits: Path, tmp_path: Path
) -> None:
    idle(bert, 0, 2)
    masks = {}
    for i in (2, 3):
        name = f"{STACK}.{i}.intermediate.dense.weight"
        masks[name] = torch.rand(bert.get_parameter(name).shape) > 0.5
        masks[name].view(-1)[i] = False
    masks["net.classifier.weight"] = torch.ones(2, 16, dtype=torch.bool)
    fit.apply_masks(bert, masks)
    made = checkpoint.Checkpoint(bert, str(TINY / "text.py"), {"width": 16}, masks=masks)
    checkpoint.save(made, tmp_path / "base")
    report = prune(tmp_path / "base", splits, tmp_path / "cut", params(steps=2, epochs=1))
    loaded = checkpoint.load(tmp_path / "cut")
    assert report.removed == [f"{STACK}.0", f"{STACK}.2"]
    assert [(layer.name, layer.before, layer.after) for layer in report.layers] == [(STACK, 4, 2)]
    assert originals(STACK, 4, loaded.structure) == [1, 3]
    assert set(loaded.masks) == {f"{STACK}.1.intermediate.dense.weight", "net.classifier.weight"}
    assert torch.equal(
        loaded.masks[f"{STACK}.1.intermediate.dense.weight"], masks[f"{STACK}.3.intermediate.dense.weight"]
    )
    assert not loaded.model.get_parameter(f"{STACK}.1.intermediate.dense.weight")[
        ~masks[f"{STACK}.3.intermediate.dense.weight"]
    ].any()
    changes = {change.name: change for change in report.cost.layers}
    assert changes[f"{STACK}.0.output.dense"].parameters_after == 0
    three = changes[f"{STACK}.3.output.dense"]
    assert three.parameters_after == three.parameters_before > 0
    assert sum(change.parameters_after for change in changes.values()) == report.cost.parameters_after
    assert report.cost.parameters_after == fit.parameters(loaded.model)
    assert fit.score(loaded.model, text, dict(np.load(splits / "validation.npz"))) == pytest.approx(report.validation)
    assert [stage.ratio for stage in report.stages] == [0.4375, 0.5]


def test_only_speaks_of_the_layers_before_the_first_cut(bert: Any, text: Any, train: Any) -> None:
    with pytest.raises(Fault, match="only names nothing"):
        prune_layers(bert, text, train, params(only=["*.9"]), 0.5, Cut([], {}))
    given = params(only=[f"{STACK}.[123]"], importance="random", ratio=0.75)
    first = prune_layers(bert, text, train, given, 0.3, Cut([], {}))
    second = prune_layers(bert, text, train, given, 0.75, first)
    assert originals(STACK, 4, second.structure) == [0]


def test_a_third_of_the_layers_is_the_nearest_number(text: Any, train: Any) -> None:
    model = text.model(layers=6, width=16).eval()
    assert prune_layers(model, text, train, params(ratio=0.34), 0.34, Cut([], {})).layers[0].after == 4


def test_one_layer_always_stays(bert: Any, text: Any, train: Any) -> None:
    done = prune_layers(bert, text, train, params(ratio=0.99), 0.99, Cut([], {}))
    assert done.layers[0].after == len(bert.net.bert.encoder.layer) == 1
    assert prune_layers(bert, text, train, params(ratio=0.99), 0.99, done) is done


def test_residual_blocks_of_a_convolutional_net(tmp_path: Path) -> None:
    forms = load_workload(TINY / "forms.py")
    made = checkpoint.Checkpoint(forms.model(form="blocks").eval(), str(TINY / "forms.py"), {"form": "blocks"})
    train = forms.samples(0)[0]
    with torch.no_grad():
        made.model.stack[1].norm.weight.zero_()  # type: ignore[index,union-attr]
        made.model.stack[1].norm.bias.zero_()  # type: ignore[index,union-attr]
    before = fit.forward(made.model, forms, fit.tensors(train))["logits"]
    done = prune_layers(made.model, forms, train, params(ratio=0.25), 0.25, Cut([], {}))
    assert done.structure == (Kept("stack", (0, 2, 3)),)
    torch.testing.assert_close(fit.forward(made.model, forms, fit.tensors(train))["logits"], before)
    checkpoint.save(checkpoint.Checkpoint(made.model, made.workload_path, made.architecture, done.structure), tmp_path)
    again = checkpoint.load(tmp_path).model
    torch.testing.assert_close(fit.forward(again, forms, fit.tensors(train))["logits"], before)


def test_no_stack_is_a_fault_that_says_what_was_looked_for(tiny: Any) -> None:
    with pytest.raises(Fault, match="no layers to prune") as caught:
        prune_layers(tiny.model().eval(), tiny, {}, params(), 0.5, Cut([], {}))
    assert "one class and shape" in str(caught.value)


def test_new_names_follow_several_cuts() -> None:
    cuts = (Kept("a", (0, 2, 3)), Kept("b", (1,)), Kept("a", (1, 2)))
    assert renamed(cuts, {"a": "0123", "b": "01"}) == {
        "a.0": "", "a.1": "", "a.2": "a.0", "a.3": "a.1", "b.0": "", "b.1": "b.0"
    }  # fmt: skip


def test_a_mask_of_tied_layers_stays_while_one_of_them_does(bert: Any, text: Any, train: Any, tmp_path: Path) -> None:
    ties = (Tied(f"{STACK}.1", f"{STACK}.0"), Tied(f"{STACK}.3", f"{STACK}.2"))
    for tie in ties:
        tie.apply(bert)
    masks = {}
    for i in (0, 2):
        name = f"{STACK}.{i}.output.dense.weight"
        masks[name] = torch.rand(bert.get_parameter(name).shape) > 0.5
    fit.apply_masks(bert, masks)
    given = params(ratio=0.25, only=[f"{STACK}.0"])
    done = prune_layers(bert, text, train, given, 0.25, Cut([], masks))
    assert done.structure == (Kept(STACK, (1, 2, 3)),)
    expected = {f"{STACK}.{i}.output.dense.weight": f"{STACK}.{2 * i}.output.dense.weight" for i in (0, 1)}
    assert set(done.masks) == set(expected)
    assert all(torch.equal(done.masks[new], masks[old]) for new, old in expected.items())
    structure = (*ties, *done.structure)
    made = checkpoint.Checkpoint(bert, str(TINY / "text.py"), {"width": 16}, structure, done.masks)
    checkpoint.save(made, tmp_path)
    again = checkpoint.load(tmp_path).model
    batch = fit.tensors(train)
    assert torch.equal(fit.forward(again, text, batch)["logits"], fit.forward(bert, text, batch)["logits"])


class Chain(nn.Sequential):
    """A stack with an `__init__` of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(OrderedDict((name, nn.Linear(width, width)) for name in "abcd"))


class Stacked(nn.Module):
    """A stack, its layers called in a way that a test chooses, and a head."""

    def __init__(self, stack: nn.Module, counted: bool = False) -> None:
        super().__init__()
        self.stack, self.head, self.counted = stack, nn.Linear(6, 3), counted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.counted:
            return self.head(self.stack(x))
        for i in range(4):
            x = self.stack[i](x)  # type: ignore[operator,index]
        return self.head(x)


@pytest.fixture
def vectors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(20, 6)).astype(np.float32), "label": rng.integers(0, 3, 20)}


def test_layers_with_names_of_their_own_keep_them_and_their_masks(make_workload: Any, vectors: Any) -> None:
    model = Stacked(Chain(6)).eval()
    task = make_workload(model, {"x": ("float32", (6,))})
    layers = dict(model.stack.named_children())
    masks = {f"stack.{name}.weight": torch.rand(6, 6) > 0.5 for name in "bd"}
    fit.apply_masks(model, masks)
    first = prune_layers(model, task, vectors, params(ratio=0.25, only=["stack.b"]), 0.25, Cut([], masks))
    done = prune_layers(model, task, vectors, params(ratio=0.5, only=["stack.c"]), 0.5, first)
    assert dict(model.stack.named_children()) == {name: layers[name] for name in "ad"}
    assert done.structure == (Kept("stack", (0, 2, 3)), Kept("stack", (0, 2)))
    assert set(done.masks) == {"stack.d.weight"} and torch.equal(done.masks["stack.d.weight"], masks["stack.d.weight"])
    names = renamed(done.structure, {"stack": "abcd"})
    assert names == {"stack.a": "stack.a", "stack.b": "", "stack.c": "", "stack.d": "stack.d"}
    again = Stacked(Chain(6))
    for change in done.structure:
        change.apply(again)
    again.load_state_dict(model.state_dict())
    x = torch.from_numpy(vectors["x"])
    assert torch.equal(again(x), model(x))


def test_a_stack_without_whose_layers_the_model_does_not_run_is_put_back(make_workload: Any, vectors: Any) -> None:
    model = Stacked(nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), counted=True).eval()
    task = make_workload(model, {"x": ("float32", (6,))})
    before = model(torch.from_numpy(vectors["x"]))
    done = prune_layers(model, task, vectors, params(), 0.5, Cut([], {}))
    assert (done.layers[0].after, done.structure) == (4, ())
    assert str(done.layers[0].kept_because).startswith("without some layers the model no longer runs: IndexError")
    assert torch.equal(model(torch.from_numpy(vectors["x"])), before)


def test_frozen_layers_have_the_taylor_scores_they_would_have_unfrozen(bert: Any, text: Any, train: Any) -> None:
    given, found = params(importance="taylor"), running_stacks(bert, text)
    expected = importance(bert, text, train, given, found)[STACK]
    bert.net.bert.embeddings.requires_grad_(False)
    found[STACK][0].requires_grad_(False)
    assert torch.allclose(importance(bert, text, train, given, found)[STACK], expected)
    assert not any(p.requires_grad for p in bert.net.bert.embeddings.parameters())
    assert expected.all()

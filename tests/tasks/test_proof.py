"""Parity: an engine that is wrong anywhere is caught, and the worst sample is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks import parity, proof
from tasks.errors import Fault
from tasks.fit import predict
from tasks.workloads.protocol import Arrays, cut

MAX = 9


class Honest:
    """A session that computes what the model does, but for what `spoil` makes of its outputs."""

    def __init__(self, model: torch.nn.Module, task: Any, spoil: Callable[[Arrays, Arrays], Arrays]) -> None:
        self.model, self.task, self.spoil, self.sizes = model, task, spoil, []

    def run(self, batch: Arrays) -> Arrays:
        first = next(iter(batch.values()))
        self.sizes.append(first.shape[:2])
        with torch.inference_mode():
            outputs = predict(self.model, self.task, {**batch, "label": np.zeros(len(first))})
        return self.spoil(batch, outputs)


@pytest.fixture(scope="module")
def case(text: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`case(spoil)`: a session of the tiny text model, and the folder of its proof."""
    folder = tmp_path_factory.mktemp("proof")
    torch.manual_seed(0)
    model, samples = text.model(layers=1), text.samples(0)[0]
    proof.of_model(model, text, samples, folder)
    return lambda spoil=lambda batch, outputs: outputs: (Honest(model, text, spoil), folder)


def test_it_is_run_at_every_batch_and_at_half_length(case: Any) -> None:
    session, folder = case()
    (parity,) = proof.check(session, folder, "fp32", MAX)
    assert (parity.output, parity.difference < 1e-5, parity.tolerance) == ("logits", True, 1e-3)
    assert set(session.sizes) == {(batch, length) for batch in (1, 3, 7, MAX) for length in (12, 6)}
    assert session.sizes.count((1, 12)) == 8, "each sample alone"


@pytest.mark.parametrize(("largest", "batches"), [(1, {1}), (5, {1, 3, 5}), (7, {1, 3, 7})])
def test_batches_are_those_the_engine_takes(case: Any, largest: int, batches: set[int]) -> None:
    session, folder = case()
    proof.check(session, folder, "fp32", largest)
    assert {n for n, _ in session.sizes} == batches


def only_at(batch: int, length: int | None = None) -> Callable[[Arrays, Arrays], Arrays]:
    """Outputs handed to the wrong samples, at one size alone."""

    def spoil(given: Arrays, outputs: Arrays) -> Arrays:
        shape = given["input_ids"].shape
        wrong = shape[0] == batch and length in (None, shape[1])
        return {k: np.roll(v, 1, axis=0) for k, v in outputs.items()} if wrong else outputs

    return spoil


@pytest.mark.parametrize("batch", [3, 7, MAX])
def test_an_engine_that_is_wrong_at_one_batch_alone_is_caught(case: Any, batch: int) -> None:
    session, folder = case(only_at(batch))
    with pytest.raises(Fault, match="output logits differs from PyTorch") as caught:
        proof.check(session, folder, "fp32", MAX)
    assert f"in a batch of {batch}" in str(caught.value.got)


def test_an_engine_that_is_wrong_at_half_length_alone_is_caught(case: Any) -> None:
    session, folder = case(only_at(7, length=6))
    with pytest.raises(Fault, match="differs from PyTorch") as caught:
        proof.check(session, folder, "fp32", MAX)
    assert str(caught.value.got).endswith("in a batch of 7 at half length")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e3])
def test_the_worst_sample_is_named(case: Any, text: Any, value: float) -> None:
    ids = text.samples(0)[0]["input_ids"][:8]

    def spoil(given: Arrays, outputs: Arrays) -> Arrays:
        length = given["input_ids"].shape[1]
        hit = (
            (given["input_ids"] == ids[5, :length]).all(1) if length == 12 else np.zeros(len(given["input_ids"]), bool)
        )
        return {"logits": np.where(hit[:, None], value, outputs["logits"])}

    session, folder = case(spoil)
    with pytest.raises(Fault) as caught:
        proof.check(session, folder, "int8", MAX)
    assert "at validation sample 5 in a batch of" in str(caught.value.got)


@pytest.mark.parametrize(
    ("precision", "noise", "passes"),
    [("fp32", 5e-4, True), ("fp32", 2e-3, False), ("fp16", 1e-2, True), ("fp16", 3e-2, False), ("bf16", 3e-2, True),
     ("int8", 0.3, True), ("int8", 0.7, False), ("as the model", 2e-3, False)],
)  # fmt: skip
def test_each_format_has_its_tolerance(case: Any, precision: str, noise: float, passes: bool) -> None:
    scale = float(np.sqrt(np.mean(proof.load(case()[1])[1]["logits"] ** 2)))
    session, folder = case(lambda given, outputs: {"logits": outputs["logits"] + noise * scale})
    if passes:
        (parity,) = proof.check(session, folder, precision, 1)
        assert parity.difference == pytest.approx(noise, rel=0.2)
    else:
        with pytest.raises(Fault, match="differs from PyTorch"):
            proof.check(session, folder, precision, 1)


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda given, outputs: {"other": outputs["logits"]}, "only other"),
        (lambda given, outputs: {}, "only nothing"),
        (lambda given, outputs: {"logits": outputs["logits"][:, :1]}, "shape (1, 1)"),
        (lambda given, outputs: {"logits": outputs["logits"][:1].ravel()}, "shape (2,)"),
    ],
    ids=["another name", "none", "narrower", "no batch"],
)
def test_an_output_that_is_missing_or_of_another_shape_is_a_fault(case: Any, spoil: Any, got: str) -> None:
    session, folder = case(spoil)
    with pytest.raises(Fault, match="output logits isn't what PyTorch gives") as caught:
        proof.check(session, folder, "fp32", MAX)
    assert caught.value.got == got


def test_the_file_holds_the_parents_outputs_of_whole_and_cut_samples(case: Any, text: Any) -> None:
    session, folder = case()
    samples = {name: value[:8] for name, value in text.samples(0)[0].items()}
    for part, length in ((proof.WHOLE, 12), (proof.HALF, 6)):
        inputs, outputs = proof.load(folder, part)
        want = cut(text, samples, length)
        assert all(np.array_equal(inputs[name], want[name]) for name in text.INPUTS)
        np.testing.assert_allclose(outputs["logits"], predict(session.model, text, want)["logits"], atol=1e-6)


def test_without_a_dynamic_axis_there_is_no_half(artifact: Any) -> None:
    assert proof.load(artifact("base-onnx"))[0].keys() == {"image"}
    assert proof.load(artifact("base-onnx"), proof.HALF) == ({}, {})


def test_the_same_model_gives_the_same_bytes(case: Any, text: Any, tmp_path: Path) -> None:
    session, folder = case()
    proof.of_model(session.model, text, text.samples(0)[0], tmp_path)
    assert (tmp_path / proof.FILE).read_bytes() == (folder / proof.FILE).read_bytes()


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no proof beside the model"):
        proof.load(tmp_path)


def test_a_quantised_run_between_two_classes_is_not_judged_by_its_own_small_outputs() -> None:
    sure, unsure = np.array([[3.0, -3.0]]), np.array([[0.1, -0.1]])
    runs = [("sure", sure, sure + 0.02), ("unsure", unsure, unsure + 0.02)]
    assert parity._of_output("y", runs, quantized=True) == pytest.approx(0.02 / np.sqrt(np.mean(3.0**2 + 0.1**2) / 2))
    with pytest.raises(Fault, match="output y differs from PyTorch at unsure"):
        parity._of_output("y", [runs[0], ("unsure", unsure, unsure + 0.2)], quantized=True)
    with pytest.raises(Fault, match="at unsure"):
        parity._of_output("y", [("sure", sure, sure), ("unsure", unsure, unsure + 0.02)], quantized=False)

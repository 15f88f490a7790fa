"""The reviews workload: real sentences, a pretrained model, two kinds of student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.errors import Fault
from tasks.workloads.protocol import cut, load_workload

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def reviews() -> Any:
    return load_workload(ROOT / "tasks/workloads/reviews.py")


@pytest.fixture(scope="module")
def found(reviews: Any) -> tuple[dict[str, np.ndarray], list[str]]:
    return reviews.samples(0)


def test_sentences_are_those_of_the_archive(found: Any, reviews: Any) -> None:
    samples, keys = found
    assert len(keys) == 10_072 and len(set(keys)) == 10_070
    assert samples["input_ids"].shape == samples["attention_mask"].shape == (10_072, 48)
    assert 0.49 < samples["label"].mean() < 0.51
    used = reviews.lengths(samples)
    assert used.min() >= 3 and used.max() == 48 and 26 < used.mean() < 28


def test_rows_start_and_end_as_bert_wants_and_padding_follows(found: Any, reviews: Any) -> None:
    ids, used = found[0]["input_ids"], reviews.lengths(found[0])
    assert (ids[:, 0] == 101).all()
    assert (ids[np.arange(len(ids)), used - 1] == 102).all()
    assert (ids[np.arange(48) >= used[:, None]] == 0).all()


@pytest.mark.parametrize("architecture", [{"layers": 2}, {"layers": 1, "width": 64}, {"kind": "lstm", "width": 8}])
def test_padding_changes_no_answer(found: Any, reviews: Any, architecture: dict[str, Any]) -> None:
    model = reviews.model(**architecture).eval()
    rows = np.argsort(reviews.lengths(found[0]))[:4]
    inputs = {k: found[0][k][rows] for k in reviews.INPUTS}
    short = cut(reviews, inputs, int(reviews.lengths(inputs).max()))
    with torch.inference_mode():
        padded, tight = (
            model(*(torch.from_numpy(np.ascontiguousarray(part[k])) for k in reviews.INPUTS))
            for part in (inputs, short)
        )
    torch.testing.assert_close(padded, tight, atol=1e-5, rtol=1e-4)


def test_a_shallower_model_holds_pretrained_layers_evenly_spaced(reviews: Any) -> None:
    from safetensors.torch import load_file

    weights = load_file(reviews._pretrained() / "model.safetensors")
    layers = reviews.model(layers=3).net.bert.encoder.layer
    assert len(layers) == 3
    for layer, source in zip(layers, (0, 2, 5), strict=True):
        want = weights[f"encoder.layer.{source}.attention.self.query.weight"]
        assert torch.equal(layer.attention.self.query.weight, want)


def test_a_narrower_model_keeps_what_words_have_in_common(reviews: Any) -> None:
    narrow, wide = (reviews.model(layers=1, **w).net.bert.embeddings.word_embeddings for w in ({"width": 192}, {}))
    assert not narrow.weight.requires_grad
    words = [2204, 6581, 6659, 2919]  # good, excellent, terrible, bad
    gram, reduced = (e.weight[words].detach() @ e.weight[words].detach().T for e in (wide, narrow))
    assert (gram - reduced).norm() < 0.3 * gram.norm()


def test_embeddings_are_frozen(reviews: Any) -> None:
    frozen = {name for name, p in reviews.model(layers=1).named_parameters() if not p.requires_grad}
    assert frozen and all(".embeddings." in name for name in frozen)


@pytest.mark.parametrize(
    "keywords",
    [
        {"layers": 7},
        {"layers": 0},
        {"kind": "gru"},
        {"kind": "lstm", "width": 0},
        {"kind": "lstm", "layers": 2},
        {"depth": 2},
        {"width": 100},
        {"width": "64"},
    ],
)
def test_unknown_models_are_refused(reviews: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(Fault, match="reviews has no such model"):
        reviews.model(**keywords)


def test_another_archive_is_refused(reviews: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.tar.gz"
    monkeypatch.setattr(reviews, "ARCHIVE", other)
    with pytest.raises(Fault, match="make setup"):
        reviews.samples(0)
    other.write_bytes(b"something else")
    with pytest.raises(Fault, match="sha256"):
        reviews.samples(0)

"""The bert workload: sizes, word embeddings in a wider space, and padding up to 128 tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tasks.errors import Fault
from tasks.workloads import bert, reviews
from tasks.workloads.protocol import cut


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, np.ndarray], list[str]]:
    return bert.samples(0)


def test_sentences_are_the_reviews_with_room_for_128_tokens(found: Any) -> None:
    arrays, keys = found
    assert arrays["input_ids"].shape == arrays["attention_mask"].shape == (10_072, 128)
    used = bert.lengths(arrays)
    assert 60 < used.max() < 128, "none is cut"
    short, short_keys = reviews.samples(0)
    fits = used <= 48
    assert np.array_equal(arrays["input_ids"][fits, :48], short["input_ids"][fits])
    assert np.array_equal(arrays["label"], short["label"]) and len(set(keys)) == len(set(short_keys))


def test_the_whole_model_has_the_size_of_bert_base() -> None:
    with torch.device("meta"):
        sizes = reviews.classifier(
            num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072
        )
    # 109,482,240 in BERT-base uncased (Devlin et al. 2019), and a classifier of two classes.
    assert sum(p.numel() for p in sizes.parameters()) == 109_482_240 + 768 * 2 + 2


def test_words_keep_their_products_in_a_wider_space() -> None:
    wide = torch.nn.Embedding(30522, 512)
    reviews.embed(wide, 512)
    table = reviews._weights()["embeddings.word_embeddings.weight"]
    words = [2204, 6581, 6659, 2919]  # good, excellent, terrible, bad
    rows = wide.weight[words].detach()
    torch.testing.assert_close(rows @ rows.T, table[words] @ table[words].T, atol=1e-4, rtol=1e-4)
    assert not wide.weight.requires_grad


@pytest.mark.parametrize("attention", bert.ATTENTION)
def test_padding_changes_no_answer_however_attention_is_computed(found: Any, attention: str) -> None:
    torch.manual_seed(0)
    model = bert.model(layers=2, width=64, inner=96, attention=attention).eval()
    inputs = {k: found[0][k][:4] for k in bert.INPUTS}
    tight = cut(bert, inputs, int(bert.lengths(inputs).max()))  # type: ignore[arg-type]
    with torch.inference_mode():
        padded, short = (
            model(*(torch.from_numpy(np.ascontiguousarray(part[k])) for k in bert.INPUTS)) for part in (inputs, tight)
        )
        half = model.half()(*(torch.from_numpy(inputs[k]) for k in bert.INPUTS))
    torch.testing.assert_close(padded, short, atol=1e-5, rtol=1e-4)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), padded, atol=1e-2, rtol=1e-2)


def test_students_are_smaller_in_each_way() -> None:
    layer = bert.model(layers=1, width=128, inner=192).net.bert.encoder.layer
    assert len(layer) == 1
    assert layer[0].attention.self.num_attention_heads == 2
    assert layer[0].intermediate.dense.weight.shape == (192, 128)


@pytest.mark.parametrize("keywords", [{"layers": 0}, {"width": 100}, {"inner": "64"}, {"attention": "flash"}, {"x": 1}])
def test_unknown_models_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(Fault, match="bert has no such model"):
        bert.model(**keywords)

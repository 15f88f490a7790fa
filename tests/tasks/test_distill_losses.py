"""The losses of distillation, each against the formula written out in loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tasks import distill_losses as losses
from tasks.distill_layers import Recorder, last_attention

LENGTHS = [5, 2, 4]


@pytest.fixture
def valid() -> torch.Tensor:
    return torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v) for v in values]
    return [p / sum(powers) for p in powers]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_soft_labels_are_hintons_written_out(temperature: float) -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    total = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = softmax([v / temperature for v in t]), softmax([v / temperature for v in s])
        total += temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    got = losses.soft_labels(torch.tensor(student), torch.tensor(teacher), temperature)
    assert got.item() == pytest.approx(total / 5)


def test_hidden_states_are_compared_at_valid_positions_only(valid: torch.Tensor) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    samples = [((student[i, :n] - teacher[i, :n]) ** 2).mean().item() for i, n in enumerate(LENGTHS)]
    assert losses.hidden_states(student, teacher, valid).item() == pytest.approx(sum(samples) / 3)
    teacher[~valid] += 100
    assert losses.hidden_states(student, teacher, valid).item() == pytest.approx(sum(samples) / 3)
    assert losses.hidden_states(student, teacher, None).item() > 100


def reference(student: losses.Pair, teacher: losses.Pair, heads: int) -> float:
    """MiniLM's attention transfer: loops over samples, heads, queries and keys."""
    total = 0.0
    for i, n in enumerate(LENGTHS):
        sample = 0.0
        for head in range(heads):
            for row in range(n):
                maps = []
                for query, key in (teacher, student):
                    d = query.shape[2] // heads
                    part = slice(head * d, (head + 1) * d)
                    scores = [float(query[i, row, part] @ key[i, k, part]) / math.sqrt(d) for k in range(n)]
                    maps.append(softmax(scores))
                sample += sum(p * math.log(p / q) for p, q in zip(*maps, strict=True))
        total += sample / heads / n
    return total / len(LENGTHS)


def test_attention_maps_are_minilms_written_out(valid: torch.Tensor) -> None:
    """Widths differ (6 and 10), two heads; what stands in the padding counts for nothing."""
    torch.manual_seed(0)
    student, teacher = (torch.randn(3, 5, 6), torch.randn(3, 5, 6)), (torch.randn(3, 5, 10), torch.randn(3, 5, 10))
    expected = reference(student, teacher, 2)
    assert losses.attention_maps(student, teacher, 2, valid).item() == pytest.approx(expected, rel=1e-5)
    for states in (*student, *teacher):
        states[~valid] = 50 * torch.randn(int((~valid).sum()), states.shape[2])
    assert losses.attention_maps(student, teacher, 2, valid).item() == pytest.approx(expected, rel=1e-5)
    assert losses.attention_maps(teacher, teacher, 2, valid).item() == pytest.approx(0, abs=1e-6)


def test_with_a_models_own_heads_relations_are_its_attention_maps(text: Any) -> None:
    torch.manual_seed(0)
    model = text.model().eval()
    ids, mask = torch.randint(3, 9, (3, 5)), (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long()
    found = last_attention(model)
    assert found and found.heads == 4
    with Recorder(model, [found.query, found.key]) as recorder:
        bias = (1.0 - mask[:, None, None, :].float()) * -1e4
        maps = model.net(ids, bias, torch.zeros_like(ids), output_attentions=True).attentions
    got = losses.relations(recorder[found.query], recorder[found.key], found.heads, mask.bool()).exp()
    torch.testing.assert_close(got, maps[-1])


@pytest.mark.parametrize(
    ("heads", "widths", "expected"),
    [(12, (384, 384), 12), (12, (384, 256), 8), (4, (10, 15), 1), (4, (24, 32), 4), (3, (24, 32), 2)],
)
def test_relation_heads_split_both_widths(heads: int, widths: tuple[int, int], expected: int) -> None:
    assert losses.relation_heads(heads, *widths) == expected

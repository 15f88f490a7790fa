"""Which samples make a batch, with and without a dynamic axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tasks import batches

N = 203
LENGTHS = np.random.default_rng(0).integers(1, 40, N)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["fixed", "dynamic"])
def test_an_epoch_has_each_sample_once_in_batches_equal_within_one(lengths: np.ndarray | None) -> None:
    torch.manual_seed(0)
    first, second = (batches.shuffled(N, 20, lengths) for _ in range(2))
    for epoch in (first, second):
        assert sorted(torch.cat(epoch).tolist()) == list(range(N))
        assert len(epoch) == 20 and {len(rows) for rows in epoch} == {10, 11}
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    torch.manual_seed(0)
    assert all(map(torch.equal, batches.shuffled(N, 20, lengths), first))


def padded(parts: list[torch.Tensor]) -> int:
    return sum(len(rows) * int(LENGTHS[rows.numpy()].max()) for rows in parts)


def test_samples_of_similar_length_come_together_but_no_length_comes_first() -> None:
    torch.manual_seed(0)
    pooled, plain = batches.shuffled(N, 20, LENGTHS), batches.shuffled(N, 20, None)
    assert padded(pooled) < 1.25 * LENGTHS.sum() < padded(plain)
    longest = [int(LENGTHS[rows.numpy()].max()) for rows in pooled]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_rows_come_in_the_samples_order_or_by_length() -> None:
    assert torch.equal(torch.cat(batches.ordered(N, 50, None)), torch.arange(N))
    parts = batches.ordered(N, 50, LENGTHS)
    assert [len(rows) for rows in parts] == [50, 50, 50, 50, 3]
    rows = torch.cat(parts).tolist()
    assert rows == sorted(range(N), key=lambda i: LENGTHS[i])


def test_rows_are_taken_of_every_array_and_cut_to_the_longest_of_them(text: Any) -> None:
    arrays = {name: value[:50] for name, value in text.samples(0)[0].items()}
    lengths, rows = text.lengths(arrays), torch.tensor([7, 3, 40])
    longest = int(lengths[rows.numpy()].max())
    assert longest < arrays["input_ids"].shape[1]
    for used, width in ((lengths, longest), (None, arrays["input_ids"].shape[1])):
        taken = batches.take(text, arrays, rows, used)
        assert set(taken) == set(arrays)
        np.testing.assert_array_equal(taken["label"], arrays["label"][rows.numpy()])
        for name in text.INPUTS:
            np.testing.assert_array_equal(taken[name], arrays[name][rows.numpy(), :width])


def test_samples_of_no_length_keep_one_position(text: Any) -> None:
    arrays = {name: value[:4] for name, value in text.samples(0)[0].items()}
    taken = batches.take(text, arrays, torch.arange(4), np.zeros(4, int))
    assert taken["input_ids"].shape == (4, 1)


def test_tensors_share_their_arrays_memory() -> None:
    array = np.zeros(3, np.float32)
    batches.tensors({"x": array})["x"][1] = 5
    assert array.tolist() == [0, 5, 0]

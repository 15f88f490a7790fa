"""Which samples make a batch; where the workload has a dynamic axis, samples of similar length.

Length bucketing (Khomenko et al. 2016, arXiv:1708.05604): a batch is cut to its longest
sample, so that little of it is padding.
"""

from __future__ import annotations

import numpy as np
import torch

from tasks.workloads import protocol
from tasks.workloads.protocol import Arrays, Workload

POOL = 50


def tensors(arrays: Arrays, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """Arrays as tensors that share their memory, or on another device a copy."""
    shared = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return shared if device is None else {name: value.to(device) for name, value in shared.items()}


def shuffled(n: int, steps: int, lengths: np.ndarray | None) -> list[torch.Tensor]:
    """The rows of an epoch's `steps` batches, drawn from PyTorch's generator: each of the `n` samples once.

    Batches are equal within one sample. With `lengths` [n], the shuffled samples are pooled, up to
    50 batches and a quarter of an epoch together, sorted by length within a pool, and the batches shuffled.
    """
    order = torch.randperm(n)
    if lengths is None:
        return list(order.tensor_split(steps))
    pooled: list[torch.Tensor] = []
    parts, pool = order.tensor_split(steps), min(POOL, max(1, steps // 4))
    for start in range(0, steps, pool):
        taken = parts[start : start + pool]
        rows = torch.cat(taken)
        rows = rows[torch.from_numpy(np.argsort(lengths[rows.numpy()], kind="stable"))]
        pooled += rows.split([len(part) for part in taken])
    return [pooled[i] for i in torch.randperm(steps).tolist()]


def ordered(n: int, size: int, lengths: np.ndarray | None) -> list[torch.Tensor]:
    """Rows in batches of `size`, in the order of the samples, or by length if there are `lengths`."""
    order = torch.arange(n) if lengths is None else torch.from_numpy(np.argsort(lengths, kind="stable"))
    return list(order.split(size))


def take(
    task: Workload, arrays: Arrays, rows: torch.Tensor, lengths: np.ndarray | None, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """These rows of every array, on `device`; inputs are cut to the longest of them if there are `lengths`."""
    if lengths is not None:
        arrays = protocol.cut(task, arrays, max(1, int(lengths[rows.numpy()].max())))
    taken = {name: value[rows] for name, value in tensors(arrays).items()}
    return taken if device is None else {name: value.to(device) for name, value in taken.items()}

"""Counts the multiply-adds of a forward pass, module by module, by the operators that PyTorch runs.

Half of what `torch.utils.flop_counter` counts, with the two operators that it leaves out on a
CPU: attention as one call, and recurrent layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten = torch.ops.aten
Called = Callable[[nn.Module, tuple[object, ...], object, int], None]


@contextlib.contextmanager
def counting(model: nn.Module, called: Called) -> Iterator[None]:
    """`called(module, inputs, output, multiply_adds)` after every call of a module, without what its children did."""
    handles: list[torch.utils.hooks.RemovableHandle] = []
    started: list[int] = []
    inside = [0]
    mode = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(ATTENTION, _attention))

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        started.append(mode.get_total_flops() // 2)
        inside.append(0)

    def after(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        done = mode.get_total_flops() // 2 - started.pop()
        own = done - inside.pop()
        inside[-1] += done
        called(module, inputs, output, recurrent(module, output) if isinstance(module, nn.RNNBase) else own)

    # The counter follows gradients, and fails on a parameter that a module is called with, as fake quantisers are.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for module in model.modules():
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        with mode:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for parameter in trained:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()


def recurrent(module: nn.RNNBase, output: Any) -> int:
    """Multiply-adds of a call of an RNN, GRU or LSTM: each weight once for every step of every sample."""
    states = output[0].data if isinstance(output[0], nn.utils.rnn.PackedSequence) else output[0]
    weights = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
    return weights * (states.numel() // states.shape[-1])


def _attention(query: Any, key: Any, value: Any, *_: object, out_shape: object = None, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


ATTENTION = (aten.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention_for_cpu)

"""LSTM layers in the export: one ONNX `LSTM` node a layer, on a free number of time steps.

PyTorch's exporter unrolls an LSTM over time, which fixes the length it was traced with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

OPERATOR_VERSION = 14


@contextlib.contextmanager
def exportable(model: nn.Module) -> Iterator[None]:
    """Within it, a trace of the model holds every `nn.LSTM` as ONNX operators; outputs mean nothing in eager mode.

    Initial states are zero, as `forward(x)` has them. Raises NotImplementedError within the trace for
    another initial state, a packed sequence, or an LSTM with a projection.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    patched: list[tuple[nn.LSTM, str]] = []
    try:
        for module in layers:
            for i in range(module.num_layers):
                for name, value in _weights(module, i).items():
                    module.register_buffer(f"{name}{i}", value)
                    patched.append((module, f"{name}{i}"))
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            patched.append((module, "forward"))
        yield
    finally:
        for module, name in patched:
            delattr(module, name)


def _weights(module: nn.LSTM, layer: int) -> dict[str, torch.Tensor]:
    """A layer's weights as ONNX has them: W [directions, 4h, d], R [directions, 4h, h] and B [directions, 8h]."""
    ends = ("", "_reverse") if module.bidirectional else ("",)

    def stacked(kind: str) -> torch.Tensor:
        return torch.stack([_reordered(getattr(module, f"{kind}_l{layer}{end}").detach()) for end in ends])

    weights = {"onnx_w": stacked("weight_ih"), "onnx_r": stacked("weight_hh")}
    if module.bias:
        weights["onnx_b"] = torch.cat([stacked("bias_ih"), stacked("bias_hh")], 1)
    return weights


def through(
    module: nn.LSTM, x: Any, hx: Any, layer: Callable[[nn.LSTM, torch.Tensor, int], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """As `nn.LSTM.forward` on x [n, t, d] (or [t, n, d]); without dropout, since models are exported in eval mode.

    `layer` gives the outputs [t, n, directions * h] and last states [directions, n, h] of one layer on steps [t, n, d].
    """
    if hx is not None or not isinstance(x, torch.Tensor) or x.ndim != 3 or module.proj_size:
        raise NotImplementedError("an LSTM exports on a padded batch of 3 axes, from zero states, without proj_size")
    steps = x.transpose(0, 1) if module.batch_first else x
    hidden, cell = [], []
    for index in range(module.num_layers):
        steps, h, c = layer(module, steps, index)
        hidden.append(h)
        cell.append(c)
    output = steps.transpose(0, 1) if module.batch_first else steps
    return output, (torch.cat(hidden), torch.cat(cell))


def _forward(module: nn.LSTM, x: Any, hx: Any = None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    return through(module, x, hx, _layer)


def _layer(module: nn.LSTM, steps: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    directions = 2 if module.bidirectional else 1
    names = ("onnx_w", "onnx_r", "onnx_b") if module.bias else ("onnx_w", "onnx_r")
    last = (directions, steps.shape[1], module.hidden_size)
    y, h, c = torch.onnx.ops.symbolic_multi_out(
        "LSTM",
        [steps, *(getattr(module, f"{name}{layer}") for name in names)],
        {"hidden_size": module.hidden_size, "direction": "bidirectional" if module.bidirectional else "forward"},
        dtypes=(steps.dtype,) * 3,
        shapes=((steps.shape[0], *last), last, last),
        version=OPERATOR_VERSION,
    )
    return y.transpose(1, 2).flatten(2), h, c


def _reordered(gates: torch.Tensor) -> torch.Tensor:
    """PyTorch stacks the gates as input, forget, cell, output; ONNX as input, output, forget, cell."""
    i, f, g, o = gates.chunk(4)
    return torch.cat([i, o, f, g])

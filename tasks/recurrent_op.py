"""LSTM layers in exported programs: one operation a layer and direction, on a free number of time steps.

torch.export unrolls an LSTM over time, which fixes the length that it was traced with. Here a layer is an operation of
the project's own, on any device; on the CPU a compiler is given oneDNN's instead, which it can call without Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from tasks.recurrent import through

ONEDNN_LSTM = 2  # oneDNN's rnn_kind of an LSTM.


@torch.library.custom_op(
    "enginesmith::lstm_layer",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor r, Tensor wb, Tensor rb, Tensor h, Tensor c, bool reverse, bool biases) -> "
    "(Tensor, Tensor, Tensor)",
)
def lstm_layer(
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    wb: torch.Tensor,
    rb: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    reverse: bool,
    biases: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [t, n, d] and last states [1, n, d] of a layer on x [t, n, k], from its last step if `reverse`."""
    steps = x.flip(0) if reverse else x
    weights = [w, r, wb, rb] if biases else [w, r]
    y, hidden, cell = torch.lstm(steps, (h, c), weights, biases, 1, 0.0, False, False, False)
    return (y.flip(0) if reverse else y.contiguous()), hidden, cell


@lstm_layer.register_fake
def _(x: Any, w: Any, r: Any, wb: Any, rb: Any, h: Any, c: Any, reverse: bool, biases: bool) -> Any:
    return x.new_empty((x.shape[0], x.shape[1], h.shape[2])), torch.empty_like(h), torch.empty_like(c)


OPERATION = torch.ops.enginesmith.lstm_layer.default


@contextlib.contextmanager
def exportable(model: nn.Module) -> Iterator[None]:
    """Within it, every `nn.LSTM` of the model computes by this operation.

    Initial states are zero, as `forward(x)` has them. Raises NotImplementedError in the forward for
    another initial state, a packed sequence, or an LSTM with a projection.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    for module in layers:
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in layers:
            del module.forward


def _forward(module: nn.LSTM, x: Any, hx: Any = None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    return through(module, x, hx, _layer)


def _layer(module: nn.LSTM, steps: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    made = []
    for end in ("", "_reverse") if module.bidirectional else ("",):
        w, r = (getattr(module, f"{kind}_l{layer}{end}") for kind in ("weight_ih", "weight_hh"))
        biases = [getattr(module, f"{kind}_l{layer}{end}") for kind in ("bias_ih", "bias_hh")] if module.bias else []
        zeros = steps.new_zeros((1, steps.shape[1], module.hidden_size))
        none = steps.new_zeros(4 * module.hidden_size)
        made.append(OPERATION(steps, w, r, *(biases or (none, none)), zeros, zeros, bool(end), module.bias))
    outputs, hidden, cell = zip(*made, strict=True)
    return torch.cat(outputs, 2), torch.cat(hidden), torch.cat(cell)


def by_onednn(graph: fx.Graph) -> None:
    """Put oneDNN's operation in the place of this one, in place; for FP32 on a CPU that has oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return
    for node in graph.find_nodes(op="call_function", target=OPERATION):
        x, w, r, wb, rb, h, c, reverse, biases = node.args
        size = node.args[5].meta["val"].shape[2]
        with graph.inserting_before(node):
            whole = graph.call_function(torch.ops.aten.contiguous.default, (x,))
            new = graph.call_function(
                torch.ops.aten.mkldnn_rnn_layer.default,
                (whole, w, r, wb, rb, h, c, reverse, [], ONEDNN_LSTM, size, 1, biases, False, False, False),
            )
        whole.meta, new.meta = dict(x.meta), dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

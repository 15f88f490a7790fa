"""LSTM layers as one operation: what `nn.LSTM` computes, whatever its form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tasks import recurrent_op


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("layers", "batch_first"), [(1, True), (2, False), (2, True)])
def test_it_computes_what_the_module_does(layers: int, batch_first: bool, bias: bool, bidirectional: bool) -> None:
    torch.manual_seed(0)
    module = nn.LSTM(3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional).eval()
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        want, states = module(x)
        with recurrent_op.exportable(module):
            got, found = module(x)
        again, _ = module(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found, states)
    assert torch.equal(again, want) and "forward" not in vars(module)


@pytest.mark.parametrize("reverse", [False, True])
def test_onednns_operation_is_the_same(reverse: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(16, 3), torch.randn(16, 4), torch.randn(16), torch.randn(16)]

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            zeros = x.new_zeros((1, x.shape[1], 4))
            return tuple(recurrent_op.OPERATION(x, *weights, zeros, zeros, reverse, True))

    x = torch.randn(5, 2, 3)
    module = torch.export.export(Layer(), (x,)).module()
    want = module(x)
    recurrent_op.by_onednn(module.graph)
    module.recompile()
    assert not module.graph.find_nodes(op="call_function", target=recurrent_op.OPERATION)
    with torch.no_grad():
        for got, wanted in zip(module(x), want, strict=True):
            torch.testing.assert_close(got, wanted)


def test_the_operation_holds_what_pytorch_asks_of_one() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(16, 3), torch.randn(16, 4), torch.randn(16), torch.randn(16)]
    zeros = torch.zeros(1, 2, 4)
    sample = (torch.randn(5, 2, 3), *weights, zeros, zeros, True, True)
    torch.library.opcheck(recurrent_op.lstm_layer, sample, test_utils=("test_schema", "test_faketensor"))


def test_other_forms_are_refused() -> None:
    module = nn.LSTM(3, 4)
    states = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with recurrent_op.exportable(module), pytest.raises(NotImplementedError):
        module(torch.zeros(5, 2, 3), states)

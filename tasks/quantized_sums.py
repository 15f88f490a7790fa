"""Sums around convolutions in a model with fake quantisers, which would bring floating point back.

So their operands are quantised too: one that a convolution reads as well shares that
convolution's quantiser (Wu et al. 2020, arXiv:2004.09602).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tasks.folding import CONVOLUTION

ADDS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
ADDS_IN_PLACE = (torch.Tensor.add_, torch.Tensor.__iadd__)


class Sums(TorchFunctionMode):
    """Quantises the operands of sums around convolutions, while the model runs.

    An operand that a convolution reads as well is replaced by what that convolution's quantiser made of it.
    One that comes straight from a convolution is quantised at that one's output: both of them for
    ONNX Runtime, whose integer sum wants two quantised operands; for TensorRT only where no operand is
    quantised yet, since it fuses the other convolution with the sum. `wanted` names these.
    """

    def __init__(self, model: nn.Module, style: str, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.style, self.wanted, self.seen = style, set[str](), list[str]()
        self._made: dict[int, tuple[torch.Tensor, str]] = {}
        self._read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._input: torch.Tensor | None = None
        for name in layers:
            layer = model.get_submodule(name)
            if isinstance(layer, CONVOLUTION):
                layer.register_forward_pre_hook(self._before_layer)
                layer.register_forward_hook(partial(self._after_layer, name))
                layer.get_submodule("input_quantizer").register_forward_hook(self._after_input)
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)

    def _before_layer(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._input = inputs[0]

    def _after_layer(self, name: str, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self._made[id(output)] = (output, name)

    def _after_input(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        assert self._input is not None
        self._read[id(self._input)] = (self._input, output)

    def _enter(self, *_: Any) -> None:
        self.seen.clear()
        self.__enter__()

    def _leave(self, *_: Any) -> None:
        self._made.clear()
        self._read.clear()
        self._input = None
        self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function in (*ADDS, *ADDS_IN_PLACE) and self._around_convolutions(args):
            args = self._quantised(args, function in ADDS_IN_PLACE)
        return function(*args, **(kwargs or {}))

    def _around_convolutions(self, args: tuple[Any, ...]) -> bool:
        tensors = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        return len(tensors) == 2 and tensors[0].shape == tensors[1].shape and any(id(t) in self._made for t in tensors)

    def _quantised(self, args: tuple[Any, ...], in_place: bool) -> tuple[Any, ...]:
        new, words, made = list(args), [], []
        for i, operand in enumerate(args[:2]):
            if id(operand) in self._read and not (in_place and i == 0):
                new[i] = self._read[id(operand)][1]
                words.append("an operand that a convolution reads is quantised as there")
            elif id(operand) in self._made:
                made.append(self._made[id(operand)][1])
            else:
                words.append("an operand comes from elsewhere and stays in floating point")
        chosen = made if self.style == "onnxruntime" else made[-1:] if len(made) == 2 else []
        self.wanted |= set(chosen)
        words += [f"{name} is quantised at its output" for name in chosen]
        self.seen.append(f"sum of {' and '.join(made) or 'two inputs'}: {'; '.join(words)}")
        return tuple(new)

"""Fake quantisers in a model: NVIDIA ModelOpt's, placed so that an integer engine can follow them.

Batch norms are first folded (tasks/folding.py), since an engine would. Every convolution and linear
layer then quantises its input, with one scale, and its weight, with one scale for each output
channel (Wu et al. 2020, arXiv:2004.09602). So are the operands of sums around convolutions
(tasks/quantized_sums.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tasks import fit
from tasks.calibration import check_ranges
from tasks.folding import CONVOLUTION, fold, foldable
from tasks.quantized_sums import Sums
from tasks.workloads.protocol import Arrays, Workload, axes

BATCH, SIMILAR = 256, 16
BINS = 512
BIAS_STEPS = 2.0**30
WEIGHT_BITS = {"tensorrt": 8, "onnxruntime": 7}


@dataclass(frozen=True)
class Plan:
    """Where quantisers are: all that is needed to put them into a fresh model.

    `folded` maps a batch norm to the convolution it went into. `layers` are quantised at their
    input and weight, those in `outputs` at their output as well; inputs in `unsigned` are never negative.
    """

    style: str
    folded: dict[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """As plain dictionaries, lists and strings."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def restore(model: nn.Module, settings: dict[str, Any]) -> None:
    """Put back the quantisers that `Plan.settings` describes; their ranges are 1 until a state dict is loaded."""
    names = {key: tuple(settings[key]) for key in ("layers", "outputs", "unsigned")}
    plan = Plan(settings["style"], settings["folded"], **names)
    for norm, conv in plan.folded.items():
        fold(model, norm, conv)
    insert(model, plan)
    Sums(model, plan.style, plan.layers)


def prepare(model: nn.Module, task: Workload, samples: Arrays, style: str) -> tuple[Plan, dict[str, str], list[str]]:
    """Fold and put quantisers into the model, in place, where its run on samples shows them to be needed.

    Returns the plan, the layers and batch norms left out with the reason, and a line on each sum around convolutions.
    """
    example = fit.tensors({name: samples[name][:2] for name in task.INPUTS})
    folded, skipped = foldable(model, task, example)
    for norm, conv in folded.items():
        fold(model, norm, conv)
    lowest = _lowest_inputs(model, task, samples)
    layers = tuple(n for n, m in model.named_modules() if isinstance(m, CONVOLUTION | nn.Linear) and n in lowest)
    skipped |= {
        name: "its forward is never called: another module uses its weight"
        for name, module in model.named_modules()
        if isinstance(module, CONVOLUTION | nn.Linear) and name not in lowest
    }
    unsigned = tuple(n for n in layers if lowest[n] >= 0) if style == "onnxruntime" else ()
    plan = Plan(style, folded, layers, (), unsigned)
    insert(model, plan)
    sums = Sums(model, plan.style, plan.layers)
    with _observing(model):
        fit.predict(model, task, {k: v[:2] for k, v in samples.items()})
    plan = replace(plan, outputs=tuple(sorted(sums.wanted)))
    configure(model, plan)
    return plan, skipped, list(sums.seen)


def insert(model: nn.Module, plan: Plan) -> None:
    """Turn the plan's layers into ModelOpt's, in place; a layer that stands at several names is turned once."""
    from modelopt.torch.quantization.nn import QuantModuleRegistry

    for name in plan.layers:
        module = model.get_submodule(name)
        if not hasattr(module, "weight_quantizer"):
            QuantModuleRegistry.convert(module)
            if name in plan.unsigned:
                module.get_submodule("input_quantizer").register_forward_pre_hook(_saturate)
    configure(model, plan)


def configure(model: nn.Module, plan: Plan) -> None:
    """Set every quantiser as planned, with ranges of 1."""
    for name in plan.layers:
        module: Any = model.get_submodule(name)
        axis = 1 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 0
        weight = module._parameters["weight"]
        ranges = torch.ones([size if i == axis else 1 for i, size in enumerate(weight.shape)])
        _set(module.input_quantizer, 8, None, name in plan.unsigned, torch.ones(()))
        _set(module.weight_quantizer, WEIGHT_BITS[plan.style], axis, False, ranges)
        if name in plan.outputs:
            _set(module.output_quantizer, 8, None, False, torch.ones(()))


def _set(quantizer: Any, bits: int, axis: int | None, unsigned: bool, ranges: torch.Tensor) -> None:
    quantizer.set_from_attribute_config(
        {"num_bits": bits, "axis": axis, "unsigned": unsigned, "narrow_range": False, "enable": True}
    )
    quantizer.amax = ranges


def _saturate(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
    """What calibration never saw below 0 is cut off there, as an unsigned integer does; ModelOpt would raise."""
    return None if torch.onnx.is_in_onnx_export() else (inputs[0].clamp_min(0),)


def quantizers(model: nn.Module) -> dict[str, Any]:
    """Every enabled quantiser of a model, by name."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {n: m for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled}


@contextlib.contextmanager
def _observing(model: nn.Module) -> Iterator[None]:
    """Quantisers let everything through."""
    found = quantizers(model).values()
    for quantizer in found:
        quantizer.disable_quant()
    try:
        yield
    finally:
        for quantizer in found:
            quantizer.enable_quant()


def calibrate(model: nn.Module, task: Workload, samples: Arrays, method: str) -> None:
    """Find every quantiser's range: a weight's is its largest magnitude, an activation's goes by `method`.

    `max` takes the largest magnitude, `percentile` the 99.99th of a histogram, `entropy` what loses
    least of the histogram by Kullback-Leibler divergence. With a dynamic axis, batches are small ones of
    similar length, so that padding weighs little. What is always 0 has a range of 1, as before calibration.
    """
    found = quantizers(model)
    for quantizer in found.values():
        kind: Any = "max" if method == "max" or quantizer.axis is not None else "histogram"
        quantizer.set_from_attribute_config({"calibrator": kind})
        if kind == "histogram":
            quantizer._calibrator._num_bins = BINS
        quantizer.enable_calib()
    with _observing(model):
        fit.predict(model, task, samples, _batch(task))
    for quantizer in found.values():
        quantizer.load_calib_amax(*([method] if method != "max" and quantizer.axis is None else []))
        quantizer.disable_calib()
        quantizer._calibrator.reset()
        if quantizer.axis is None and not quantizer.amax.any():
            quantizer.amax = torch.ones_like(quantizer.amax)
    bound_biases(model)
    check_ranges({name: (-float(q.amax.max()), float(q.amax.max())) for name, q in found.items()})


def _batch(task: Workload) -> int:
    return SIMILAR if axes(task) else BATCH


def bound_biases(model: nn.Module) -> None:
    """Widen a channel's weight range where its bias, counted in steps of input times weight, would pass 32 bits.

    Such weights are next to nothing beside the bias: a dead channel's.
    """
    for module in model.modules():
        bias = module._parameters.get("bias")
        if hasattr(module, "weight_quantizer") and bias is not None:
            reader: Any = module.input_quantizer
            writer: Any = module.weight_quantizer
            step = reader.amax.clamp_min(1e-30) / reader.maxbound * BIAS_STEPS
            least = bias.detach().abs() / step * writer.maxbound
            writer.amax = torch.maximum(writer.amax, least.reshape(writer.amax.shape))


def _lowest_inputs(model: nn.Module, task: Workload, samples: Arrays) -> dict[str, float]:
    """The lowest value that each convolution and linear layer was called with."""
    lowest: dict[str, float] = {}
    names: dict[nn.Module, str] = {m: n for n, m in model.named_modules() if isinstance(m, CONVOLUTION | nn.Linear)}

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        name = names[module]
        lowest[name] = min(lowest.get(name, float("inf")), float(inputs[0].min()))

    hooks = [module.register_forward_pre_hook(hook) for module in names]
    try:
        fit.predict(model, task, samples, _batch(task))
    finally:
        for handle in hooks:
            handle.remove()
    return lowest

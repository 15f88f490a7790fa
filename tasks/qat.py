"""Quantisation-aware training: INT8, signed, symmetric, per-channel weights, per-tensor activations.

NVIDIA ModelOpt's fake quantisers (tasks/fake_quant.py) are calibrated, which is post-training
quantisation (PTQ), and the weights then trained on with the rounding in place: Jacob et al. 2018,
arXiv:1712.05877; Wu et al. 2020, arXiv:2004.09602, section 5. Rounding counts as the identity in
the backward pass: the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from tasks import account, checkpoint, fake_quant, fit, layout
from tasks.calibration import check_samples
from tasks.data import read
from tasks.errors import Fault
from tasks.files import sha256
from tasks.settings import QatParams
from tasks.structure import FakeQuantized
from tasks.workloads.protocol import Arrays, Workload, largest


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer's quantisers: weight bits and how many scales, and the largest magnitude that its input may have."""

    name: str
    weight_bits: int
    weight_scales: int
    input_type: str
    input_range: float
    output_quantized: bool


@dataclass(frozen=True)
class QatReport:
    """What was quantised and what was not, with scores in 0 … 1 on validation.

    `validation_before` is of the parent, `validation_ptq` of the calibrated model before training,
    `validation_trained` of the best epoch. The better of these two is kept, as `kept` says.
    In `cost` the bytes after are those of INT8 weights with their scales.
    """

    style: str
    layers: list[QuantizedLayer]
    skipped: dict[str, str]
    sums: list[str]
    folded: dict[str, str]
    calibration: str
    calibration_samples: int
    calibration_sha256: str
    cost: account.Difference
    validation_before: float
    validation_ptq: float
    validation_trained: float
    validation: float
    kept: str
    worse_than_ptq: bool
    curve: list[fit.Epoch]


def qat(source: Path, data: Path, target: Path, params: QatParams) -> QatReport:
    """Quantise the model of `source`, train on, and write `target/model.pt`.

    Raises Fault for unusable calibration data, a range that isn't finite, or a model without a
    convolution or linear layer.
    """
    fit.seed_everything(params.seed, params.threads, params.device)
    parent = checkpoint.load(source)
    model, task = parent.model, parent.workload
    split = data / "calibration.npz"
    samples = {name: values[: params.samples] for name, values in read(split).items()}
    check_samples(samples, largest(task))
    train, validation = read(data / "train.npz"), read(data / "validation.npz")
    before, score = account.count(model, task), fit.score(model, task, validation, params.device)
    plan, skipped, sums = quantize_model(model, task, samples, params, source.name)
    ptq, start = fit.score(model, task, validation, params.device), copy.deepcopy(model.state_dict())
    print(f"validation {score:.1%} in floating point, {ptq:.1%} after calibration", flush=True)
    resume = layout.resume(target.name)
    curve = fit.fine_tune(model, task, train, validation, params, masks=parent.masks, resume=resume)
    trained = max(epoch.validation for epoch in curve)
    if trained < ptq:
        print(f"training ended at {trained:.1%}, below the {ptq:.1%} it started from: the start is kept", flush=True)
        model.load_state_dict(start)
    change = FakeQuantized({**plan.settings(), "calibration_sha256": sha256(split)})
    checkpoint.save(replace(parent, model=model, structure=(*parent.structure, change)), target)
    return QatReport(
        style=plan.style,
        layers=_layers(model, plan),
        skipped=skipped,
        sums=sums,
        folded=plan.folded,
        calibration=params.calibration,
        calibration_samples=len(samples["label"]),
        calibration_sha256=sha256(split),
        cost=account.difference(before, _stored(account.count(model, task), model, plan)),
        validation_before=score,
        validation_ptq=ptq,
        validation_trained=trained,
        validation=max(trained, ptq),
        kept="ptq" if trained < ptq else "trained",
        worse_than_ptq=trained < ptq,
        curve=curve,
    )


def quantize_model(
    model: nn.Module, task: Workload, samples: Arrays, params: QatParams, name: str
) -> tuple[fake_quant.Plan, dict[str, str], list[str]]:
    """Put calibrated fake quantisers into a model, in place: what `fake_quant.prepare` returns.

    Raises Fault if there is no layer to quantise, or a range isn't finite.
    """
    plan, skipped, sums = fake_quant.prepare(model, task, samples, params.style)
    if not plan.layers:
        raise Fault(
            f"nothing to quantise in {name}",
            got="; ".join(f"{layer}: {reason}" for layer, reason in skipped.items()) or "no such layer",
            expected="at least one convolution or linear layer that is called",
            do="leave this technique out for this model",
        )
    fake_quant.calibrate(model, task, samples, params.calibration)
    return plan, skipped, sums


def _layers(model: nn.Module, plan: fake_quant.Plan) -> list[QuantizedLayer]:
    quantizers = fake_quant.quantizers(model)
    layers = []
    for name in plan.layers:
        weight, activation = quantizers[f"{name}.weight_quantizer"], quantizers[f"{name}.input_quantizer"]
        kind = "uint8" if activation.unsigned else "int8"
        scales, output = weight.amax.numel(), name in plan.outputs
        layers.append(QuantizedLayer(name, weight.num_bits, scales, kind, float(activation.amax), output))
    return layers


def _stored(report: account.AccountReport, model: nn.Module, plan: fake_quant.Plan) -> account.AccountReport:
    """The account with the bytes of what is stored for integer kernels: a byte a weight, four a scale or bias."""
    names = set(fake_quant.quantizers(model))
    layers = []
    for layer in report.layers:
        size = layer.bytes
        if layer.name in plan.layers:
            size -= 3 * model.get_submodule(layer.name)._parameters["weight"].numel()  # type: ignore[union-attr]
        if layer.name not in names or layer.bytes:
            layers.append(replace(layer, bytes=size))
    return replace(report, bytes=sum(layer.bytes for layer in layers), layers=layers)

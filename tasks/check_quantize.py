"""Faults of the settings of one quantisation that need several of them, or the data, to be seen."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.check_tree import hint
from tasks.settings import TENSORRT, BuildParams, DataParams, QuantizeParams
from tasks.styles import slow_for

CALIBRATED = {"calibration", "samples", "batch", "percentile"}
KEPT = {"format", "keep", "keep_ops"}
QUANTIZE_USED_BY = {
    "int8": KEPT | CALIBRATED | {"activations", "style", "search"},
    "fp8": KEPT | CALIBRATED | {"search"},
    "int4": KEPT | {"block", "search"},
    **dict.fromkeys(("fp16", "bf16"), KEPT | {"samples", "batch", "data_max", "init_max"}),
}


def calibration_faults(name: str, q: QuantizeParams, data: DataParams | None) -> list[str]:
    """Settings that a format has no use for, and samples that don't suffice."""
    if q.activations == "dynamic" and q.format == "int8":
        return _dynamic_faults(name, q)
    found = [
        f"quantize.{name}.{key}: got {getattr(q, key)!r}, expected nothing: format {q.format} has no such setting; "
        "leave it out"
        for key in sorted(q.model_fields_set - QUANTIZE_USED_BY[q.format])
        if key != "parent"
    ]
    if "percentile" in q.model_fields_set and q.calibration != "percentile" and q.format in ("int8", "fp8"):
        found.append(
            f"quantize.{name}.percentile: got {q.percentile}, expected nothing: calibration is {q.calibration}; "
            "leave it out, or set calibration: percentile"
        )
    if q.format == "int4":
        return found
    if q.samples < q.batch:
        found.append(
            f"quantize.{name}.samples: got {q.samples} calibration samples for a batch of {q.batch}; "
            "expected at least one full batch: raise samples or lower batch"
        )
    if data and q.samples > data.calibration:
        found.append(
            f"quantize.{name}.samples: got {q.samples}, expected at most data.calibration ({data.calibration}): "
            "raise that or lower this"
        )
    return found


def _dynamic_faults(name: str, q: QuantizeParams) -> list[str]:
    useless = sorted({"calibration", "samples", "percentile", "block", "data_max", "init_max"} & q.model_fields_set)
    found = [
        f"quantize.{name}.{key}: got {getattr(q, key)!r}, expected nothing: "
        "dynamic activations need no calibration: leave it out"
        for key in useless
    ]
    if q.style != "onnxruntime":
        found.append(
            f"quantize.{name}.activations: got 'dynamic' with style {q.style}, expected static: "
            "TensorRT takes ranges from the file"
        )
    return found


def metric_faults(name: str, q: QuantizeParams, workload: str, metrics: Iterable[str]) -> list[str]:
    """A search for a metric that the workload doesn't have."""
    if q.search is None or q.search.metric in metrics:
        return []
    return [
        f"quantize.{name}.search.metric: got {q.search.metric!r}, expected one of {', '.join(metrics)} "
        f"(those of {workload}){hint(q.search.metric, metrics)}"
    ]


def build_faults(name: str, build: BuildParams, q: QuantizeParams) -> list[str]:
    """What keeps an engine from being built of a file that is quantised by `q`."""
    found, key = [], f"build.{name}"
    notes = {"precision": q.format, "style": q.style if q.format == "int8" else "", "activations": q.activations}
    if build.backend in TENSORRT and (why := slow_for(build.backend, build.where, notes)):
        found.append(
            f"{key}.from: got {build.parent!r} for {build.backend}, expected a file in its style: {why}: "
            "quantise with style: tensorrt, and static activations"
        )
    if build.precision == "tf32" and build.backend in ("onnxruntime", *TENSORRT):
        found.append(
            f"{key}.precision: got 'tf32' for {build.parent!r}, which is in {q.format}, expected a file in fp32: leave "
            "precision out"
        )
    return found

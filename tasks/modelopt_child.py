"""NVIDIA ModelOpt's ONNX tools, in a process of their own.

ModelOpt patches ONNX Runtime's calibrators and GraphSurgeon's exporter in the process that it runs in, rewrites the
file that it is given, and takes random data where it gets none. Here it gets a copy, its process ends with it,
and a job without calibration samples is refused.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tasks import onnx_file
from tasks.errors import Fault
from tasks.workloads.protocol import Arrays

ROOT = Path(__file__).resolve().parents[1]
TELL_S = 15.0


def place(model: onnx.ModelProto, kind: str, scratch: Path, batch: Arrays) -> onnx.ModelProto:
    """Q/DQ nodes of `kind` (int8 or fp8) where TensorRT fuses them; activation scales are those of one batch's maxima.

    `batch` has every input [n, …]; it also tells ModelOpt the sizes of products.
    """
    if not batch or not all(len(v) for v in batch.values()):
        raise _no_samples("no samples")
    np.savez(scratch / "batch.npz", allow_pickle=False, **batch)
    return _run({"kind": kind, "batch": str(scratch / "batch.npz")}, model, scratch)


def autocast(
    model: onnx.ModelProto, kind: str, scratch: Path, exclude: list[str], large: list[str], init_max: float
) -> onnx.ModelProto:
    """The model in fp16 or bf16 (`kind`), with casts around what stays in FP32; inputs and outputs keep their types.

    Nodes of `exclude` stay, those that read or write a tensor of `large` (found on calibration samples), and those
    with a constant above `init_max` in magnitude.
    """
    return _run({"kind": kind, "exclude": exclude, "large": large, "init_max": init_max}, model, scratch)


def _no_samples(got: str) -> Fault:
    return Fault(
        "ModelOpt has no calibration samples",
        got=got,
        expected="samples of the calibration split: without, it would use random data",
        do="raise quantize.*.samples, or run `dvc repro data`",
    )


def _run(job: dict[str, Any], model: onnx.ModelProto, scratch: Path) -> onnx.ModelProto:
    """Do a job in a child process and read what it made; says every 15 s that it goes on. Fault if the child dies."""
    source, target, log = scratch / "given.onnx", scratch / "made.onnx", scratch / "modelopt.log"
    source.write_bytes(onnx_file.serialized(model, "the model"))
    target.unlink(missing_ok=True)
    (scratch / "job.json").write_text(json.dumps({**job, "source": str(source), "target": str(target)}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tasks.modelopt_child", str(scratch / "job.json")]
    start = time.monotonic()
    with log.open("wb") as stream:
        child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=scratch)
        try:
            while True:
                try:
                    code = child.wait(TELL_S)
                    break
                except subprocess.TimeoutExpired:
                    print(f"ModelOpt, {job['kind']}: {time.monotonic() - start:.0f} s", flush=True)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if code or not target.is_file():
        raise died(job["kind"], code, log.read_text(errors="replace"))
    return onnx.load(target)


def died(kind: str, code: int, log: str) -> Fault:
    """What to say of a child that ended with `code`, or made no file."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Fault(
        f"ModelOpt made no {kind} model",
        got=f"{how}; {lines[-1][:300] if lines else 'it said nothing'}",
        expected="a model in that format",
        do="leave the node or the operator that it names to quantize.*.keep or keep_ops; "
        "if it was killed, give it more memory or lower quantize.*.batch",
    )


class _Once:
    """One batch, in the form that ModelOpt reads calibration data."""

    def __init__(self, batch: Arrays) -> None:
        self._batch = batch
        self.rewind()

    def rewind(self) -> None:
        self._left = [self._batch]

    def get_first(self) -> Arrays:
        return self._batch

    def get_next(self) -> Arrays | None:
        return self._left.pop() if self._left else None


def _place(job: dict[str, Any]) -> None:
    with np.load(job["batch"]) as file:
        batch = {name: file[name] for name in file.files}
    from modelopt.onnx.quantization import quantize

    quantize(
        job["source"],
        quantize_mode=job["kind"],
        calibration_data_reader=_Once(batch),
        calibration_method="max",
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=job["target"],
        log_level="WARNING",
    )


def _autocast(job: dict[str, Any]) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision
    from modelopt.onnx.autocast.nodeclassifier import NodeRuleBase

    large = set(job["large"])

    class Large(NodeRuleBase):
        """A node that reads or writes a tensor whose values were too large on the calibration samples."""

        def _check_inner(self, node: onnx.NodeProto) -> bool:
            return bool(large & {*node.input, *node.output})

    # Without a limit on data ModelOpt runs no model of its own, which would take random data.
    made = convert_to_mixed_precision(
        job["source"],
        low_precision_type=job["kind"],
        nodes_to_exclude=[f"{re.escape(name)}$" for name in job["exclude"]],
        data_max=np.inf,
        init_max=job["init_max"],
        keep_io_types=True,
        custom_rule=Large(),
        providers=["cpu"],
    )
    onnx.save(made, job["target"])


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    (_autocast if given["kind"] in ("fp16", "bf16") else _place)(given)

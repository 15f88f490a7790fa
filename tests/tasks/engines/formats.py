"""Makes the tiny models in every format, for the tests of TensorRT: `python formats.py FOLDER`.

ModelOpt takes seconds to import and patches what it runs in: all is made in this one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import torch

from tasks import modelopt_child, onnx_file
from tasks.export import to_onnx
from tasks.quantize import made
from tasks.settings import QuantizeParams
from tasks.workloads.protocol import axes, load_workload

TINY = Path(__file__).resolve().parents[2] / "tiny"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn": ("workload.py", {"width": 32}),
    "text": ("text.py", {"layers": 1, "width": 32}),
    "lstm": ("lstm.py", {"kind": "lstm"}),
}
# ModelOpt quantises neither an LSTM nor, to FP8, convolutions as narrow as these.
FORMATS = {
    "cnn": ("fp16", "bf16", "int8", "int4"),
    "text": ("fp16", "bf16", "int8", "fp8", "int4"),
    "lstm": ("fp16", "bf16", "int4"),
}


def here(job: dict[str, Any], model: onnx.ModelProto, scratch: Path) -> onnx.ModelProto:
    """Do a job of ModelOpt in this process."""
    source, target = scratch / "given.onnx", scratch / "made.onnx"
    source.write_bytes(model.SerializeToString())
    given = {**job, "source": str(source), "target": str(target)}
    (modelopt_child._autocast if job["kind"] in ("fp16", "bf16") else modelopt_child._place)(given)
    return onnx.load(target)


def main(root: Path) -> None:
    modelopt_child._run = here
    for name, (file, options) in MODELS.items():
        task = load_workload(TINY / file)
        torch.manual_seed(0)
        model = task.model(**options).eval()
        folder = root / f"{name}-fp32"
        folder.mkdir()
        free = axes(task)
        notes = {
            "precision": "fp32",
            "preprocessing": task.PREPROCESSING,
            **({"axes": json.dumps(free)} if free else {}),
        }
        to_onnx(model, task, folder / onnx_file.FILE, 18, notes=notes)
        samples = {key: value[:16] for key, value in task.samples(0)[0].items()}
        for kind in FORMATS[name]:
            target = root / f"{name}-{kind}"
            target.mkdir()
            raw = {"from": name, "format": kind, "style": "tensorrt", "calibration": "minmax", "samples": 16}
            params = QuantizeParams(**raw, batch=8, block=16)
            made(folder, target, samples, task, params)
            found = onnx_file.load(target)
            onnx_file.annotate(found, {**notes, "precision": kind})
            onnx_file.save(found, target / onnx_file.FILE, False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

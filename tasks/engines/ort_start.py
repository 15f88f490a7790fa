"""Starting ONNX Runtime: options, providers that are read back, and errors by node and operator.

Options of the CUDA provider: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from tasks import onnx_file
from tasks.errors import Fault, Unavailable

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# How ONNX Runtime names what it can't run, in its own messages.
REFUSALS = (
    r'In Node, \("(?P<node>[^"]*)", (?P<op>\w+), "(?P<domain>[^"]*)"',
    r"implementation for (?P<op>\w+)\(\d+\) node with name '(?P<node>[^']*)'",
    r"of operator \((?P<op>\w+)\) in node \((?P<node>[^)]*)\)",
    r"Fatal error: (?P<domain>[^:\s]*):(?P<op>\w+)\(",
)
SPLIT = "fallback to CPU EP has been explicitly disabled"


def start(
    model: bytes | str,
    device: str,
    threads: int,
    level: str,
    *,
    settings: Mapping[str, Any] | None = None,
    strict: bool = True,
    save: Path | None = None,
    profile: Path | None = None,
    stream: int | None = None,
) -> ort.InferenceSession:
    """A session of a model's bytes or path on `cpu` or `cuda`, never on another device than asked for.

    `settings` are the CUDA provider's (`tf32`, `cuda_graph`, `channels_last`); `strict` lets no node run elsewhere.
    `save` is where the optimised graph goes, `profile` the prefix of a profile's name, `stream` a CUstream to work on.
    Raises Unavailable if the CUDA provider isn't there or doesn't load; what ONNX Runtime raises is left as it is.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads would slow whatever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.graph_optimization_level = LEVELS[level]
    if save:
        options.optimized_model_filepath = str(save)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if device == "cpu":
        wanted: list[Any] = [CPU]
    else:
        need_cuda()
        wanted = [(CUDA, cuda_options(settings or {}, stream))]
        if strict:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(model, options, providers=wanted, enable_fallback=0)
    except Exception as error:
        if device == "cuda" and SPLIT in str(error):
            start(model, device, threads, level, settings=settings, strict=False)  # Says so if CUDA isn't there at all.
        raise
    ran = session.get_providers()
    if ran[0] != (CPU if device == "cpu" else CUDA):
        raise Unavailable(f"ONNX Runtime took {', '.join(ran)} where {device} was asked for: its libraries didn't load")
    return session


def need_cuda() -> None:
    """Raise Unavailable, in one line, if the installed ONNX Runtime has no CUDA provider; else load its libraries."""
    if CUDA not in ort.get_available_providers():
        raise Unavailable(
            f"onnxruntime {ort.__version__} here has no CUDA provider: install onnxruntime-gpu in its place"
        )
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def cuda_options(settings: Mapping[str, Any], stream: int | None) -> dict[str, str]:
    """The CUDA provider's options. FP32 means FP32 here: TF32, its default, has to be asked for.

    The GPU is the first, by default: ONNX Runtime warns of a missing plugin where it is named (1.26 to 1.31 do).
    """
    options = {
        "use_tf32": "1" if settings.get("tf32") else "0",
        "enable_cuda_graph": "1" if settings.get("cuda_graph") else "0",
        "prefer_nhwc": "1" if settings.get("channels_last") else "0",
    }
    return options if stream is None else {**options, "user_compute_stream": str(stream)}


def own(error: Exception) -> bool:
    """Whether an error comes from ONNX Runtime, which raises plain ones of Python's too."""
    return type(error).__module__.startswith("onnxruntime") or isinstance(error, (RuntimeError, ValueError))


def refused(error: Exception, model: onnx.ModelProto, name: str, device: str) -> Fault:
    """ONNX Runtime's error as a Fault that names the node and the operator, if the message tells."""
    words = " ".join(str(error).split())
    culprit = next((found for pattern in REFUSALS if (found := re.search(pattern, words))), None)
    if culprit is None:
        return Fault(
            f"ONNX Runtime can't build {name}",
            got=words[:400],
            expected=f"operators and types that its {device.upper()} provider knows",
            do="another opset or format may do, or another backend for this variant",
        )
    told = culprit.groupdict()
    return Fault(
        f"ONNX Runtime can't build {name}: {where(model, told['op'], told.get('node') or '', told.get('domain'))}",
        got=words[:400],
        expected=f"an operator that its {device.upper()} provider knows, of these types",
        do="change that part of the model, try another opset or format, or another backend for this variant",
    )


def where(model: onnx.ModelProto, op: str, node: str, domain: str | None) -> str:
    """A node and its operator in words; a nameless one by what it gives, if it is the only one of its kind."""
    kind = f"{domain}:{op}" if domain else op
    if node:
        return f"node {node} ({kind})"
    like = [
        n
        for g in onnx_file.graphs(model.graph)
        for n in g.node
        if n.op_type == op and (n.domain or "") == (domain or "")
    ]
    names = [n.name or f"the nameless one that gives {n.output[0]}" for n in like]
    return f"node {', '.join(names[:3])} ({kind})" if names else f"operator {kind}"

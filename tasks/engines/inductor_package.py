"""Ahead-of-time packages of Inductor (AOTInductor), proven to load in a fresh process before they count.

Manual: https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tasks import exported
from tasks.exported import Notes

FILE = "package.pt2"
TIMEOUT_S = 300
FROZEN = (True, False)


def compile_package(module: torch.fx.GraphModule, notes: Notes, path: Path, threads: int) -> str | None:
    """Write a package for any batch; None, or why a fresh process can't use it, in one line, and there is none then.

    Weights are first frozen into the code in the layout that oneDNN likes best, and left as they are if that fails.
    """
    inputs, reason = examples(notes, 2, "cpu"), None
    with torch.no_grad():
        for frozen in FROZEN:
            # Packaging writes into the process's own `metadata` otherwise, which is part of every later cache's key.
            config = {"cpp.threads": threads, "freezing": frozen, "aot_inductor.metadata": {}}
            try:
                program = torch.export.export(
                    module, tuple(inputs), dynamic_shapes=exported.dynamic_shapes(notes.inputs, notes.axes)
                )
                torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=config)
                reason = unproven(path, notes)
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if reason is None:
                return None
            path.unlink(missing_ok=True)
    return reason


def unproven(path: Path, notes: Notes) -> str | None:
    """Load a package in a fresh process and run it at batches of 1 and 3: None, or what went wrong, in one line."""
    inputs = [
        [(s.dtype, list(v.shape)) for s, v in zip(notes.inputs, examples(notes, n, "cpu"), strict=True)] for n in (1, 3)
    ]
    code = _PROVE.format(path=str(path), inputs=inputs)
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"a fresh process didn't load it in {TIMEOUT_S} s"
    if run.returncode == 0 and run.stdout.strip().endswith("loaded"):
        return None
    last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    return f"a fresh process doesn't load it: {last[:300]}"


def load(path: Path) -> Any:
    """The package as a function of its inputs."""
    return torch._inductor.aoti_load_package(str(path), run_single_threaded=True)


def examples(notes: Notes, batch: int, device: str, sizes: dict[str, int] | None = None) -> list[torch.Tensor]:
    """Inputs of ones at a batch, and at `sizes` of the dynamic axes, or their largest."""
    free = notes.axes | (sizes or {})
    return [
        torch.ones(
            [batch if d is None else free[d] if isinstance(d, str) else d for d in spec.shape],
            dtype=getattr(torch, spec.dtype),
            device=device,
        )
        for spec in notes.inputs
    ]


_PROVE = """
import torch
import tasks.recurrent_op
call = torch._inductor.aoti_load_package({path!r}, run_single_threaded=True)
for tensors in {inputs!r}:
    call(*(torch.ones(shape, dtype=getattr(torch, dtype)) for dtype, shape in tensors))
print("loaded")
"""

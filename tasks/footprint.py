"""What an engine takes to open: time, until the first inference is done, and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.engines.protocol import Session, backend, open_engine
from tasks.errors import Unavailable
from tasks.gpu_state import Card
from tasks.manifest import Manifest
from tasks.workloads.protocol import Arrays

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CALLS = 3


@dataclass(frozen=True)
class Footprint:
    """An engine's start, in the process that measures it, and before any other engine is opened there.

    `import_s` is the import of its backend's packages, near 0 where something else imported them before; `load_s` is
    `open_engine`, the check of digest and signature included, and on a GPU the context, if it is the first there;
    `first_call_s` the first inference, of `batch` samples; `first_inference_s` all three together. `host_bytes` is the
    growth of this process's resident memory by opening, `host_peak_bytes` its largest growth until three inferences
    were done; `device_bytes` and `device_peak_bytes` the same of the GPU's memory, context included, None on a CPU.
    `session_bytes` is the part of it that the backend counts as this engine's own. `activation_bytes` is what
    inferences add to the opened engine: by the backend's own word where it has one (at its largest shapes), else by
    the growth from opening to the peak. `how` says where memory was read.
    """

    batch: int
    import_s: float
    load_s: float
    first_call_s: float
    first_inference_s: float
    host_bytes: int
    host_peak_bytes: int
    device_bytes: int | None
    device_peak_bytes: int | None
    session_bytes: int | None
    activation_bytes: int
    how: str


def opened(folder: Path, described: Manifest, batch: Arrays) -> tuple[Session, Footprint]:
    """Open an engine and make three inferences of `batch`, measured; the session is the caller's to close.

    Raises what `open_engine` and the session raise.
    """
    start = time.perf_counter()
    backend(described.backend)
    imported = time.perf_counter()
    with contextlib.ExitStack() as stack:
        card = _card(described, stack)
        resident, on_device = _resident(), card.used_bytes() if card else 0
        peaks = _reset_peak()
        began = time.perf_counter()
        session = open_engine(folder)
        loaded = time.perf_counter()
        try:
            held, device_held = _resident(), card.used_bytes() if card else 0
            session.run(batch)
            session.synchronize()
            ended = time.perf_counter()
            for _ in range(CALLS - 1):
                session.run(batch)
                session.synchronize()
            peak = max(held, _peak() if peaks else _resident())
            device_peak = max(device_held, card.used_bytes() if card else 0)
        except BaseException:
            session.__exit__(None, None, None)
            raise
    own = getattr(session, "activation_bytes", None)
    grown = device_peak - device_held if card else peak - held
    sources = "resident memory" + (", its peak by the kernel" if peaks else ", its peak as read after the calls")
    return session, Footprint(
        batch=len(next(iter(batch.values()))),
        import_s=imported - start,
        load_s=loaded - began,
        first_call_s=ended - loaded,
        first_inference_s=(imported - start) + (ended - began),
        host_bytes=held - resident,
        host_peak_bytes=peak - resident,
        device_bytes=device_held - on_device if card else None,
        device_peak_bytes=device_peak - on_device if card else None,
        session_bytes=getattr(session, "memory_bytes", None),
        activation_bytes=grown if own is None else int(own),
        how=sources + ("; the GPU's by NVML" if card else ""),
    )


def lines(recorded: Mapping[str, Any]) -> list[str]:
    """What to say of an engine's start in a report; `recorded` is the footprint's JSON form."""
    found = Footprint(**recorded)
    mib = 2**20
    host = f"{found.host_bytes / mib:.1f} MiB of the host's memory, {found.host_peak_bytes / mib:.1f} at its peak"
    device = "" if found.device_bytes is None else f"; {found.device_bytes / mib:.1f} MiB of the GPU's, "
    device += "" if found.device_peak_bytes is None else f"{found.device_peak_bytes / mib:.1f} at its peak"
    return [
        f"start: {found.first_inference_s:.2f} s to the first inference ({found.import_s:.2f} s import, "
        f"{found.load_s:.2f} s load, {found.first_call_s:.3f} s first call)",
        f"memory: {host}{device}; activations {found.activation_bytes / mib:.1f} MiB at batch {found.batch}",
    ]


def _card(described: Manifest, stack: contextlib.ExitStack) -> Card | None:
    if described.device != "cuda":
        return None
    try:
        return stack.enter_context(contextlib.closing(Card()))
    except Unavailable:
        return None  # Opening the engine says why in its own words.


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _reset_peak() -> bool:
    """Start the kernel's count of this process's peak anew (proc_pid_clear_refs(5)); whether that could be done."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return _peak() > 0


def _peak() -> int:
    """The largest resident memory since the count was started, in bytes; 0 where the kernel doesn't tell."""
    text = STATUS.read_text() if STATUS.is_file() else ""
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024

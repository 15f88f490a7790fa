"""What this machine reaches at best: copy bandwidth and matrix rates by format, probed once and kept by fingerprint.

The ceilings of the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785). As in STREAM
(McCalpin 1995), a ceiling is the best of several repeats: others disturb a machine downwards only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks import layout
from tasks.files import read_json, write_json
from tasks.target import Target, fingerprint, last_level_cache_bytes, plain

SCHEMA = 1
CPU_FORMATS = ("fp32", "bf16", "fp16", "int8")
CUDA_FORMATS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
BUDGET_S, CALM = 12.0, 0.8


@dataclass(frozen=True)
class Rate:
    """A rate in units a second over some repeats: the best, the median, the lowest; `by` says what reached it."""

    best: float
    median: float
    low: float
    repeats: int
    by: str


@dataclass(frozen=True)
class Peaks:
    """The ceilings of one device, on the CPU for one number of threads (0 on a GPU).

    `memory` and `cache` are bytes a second, read and written, beyond and inside the last cache of `cache_bytes`;
    `matrix` holds operations a second by format, a multiply-add being two; `left_out` says why a format isn't there.
    """

    device: str
    threads: int
    memory: Rate
    cache: Rate
    cache_bytes: int
    matrix: dict[str, Rate]
    left_out: dict[str, str]

    @property
    def disturbed(self) -> bool:
        """Whether other work kept half of some probe's repeats a fifth below its best."""
        return any(rate.median < CALM * rate.best for rate in (self.memory, self.cache, *self.matrix.values()))

    @property
    def flops_per_s(self) -> dict[str, float]:
        """The best rate by format."""
        return {name: rate.best for name, rate in self.matrix.items()}


def path(target_id: str) -> Path:
    """Where a target's peaks are kept."""
    return layout.STATE / f"peaks-{target_id}.json"


def known(target_id: str) -> tuple[Peaks, ...]:
    """What was probed of a target before; nothing if there is no file, or one of another version."""
    file = path(target_id)
    if not file.is_file():
        return ()
    try:
        raw = read_json(file)
        if raw["schema"] != SCHEMA or raw["target"]["id"] != target_id:
            return ()
        return tuple(_restored(peaks) for peaks in raw["peaks"])
    except (ValueError, KeyError, TypeError):
        return ()


def _restored(raw: dict[str, Any]) -> Peaks:
    rates = {key: Rate(**raw[key]) for key in ("memory", "cache")}
    return Peaks(**{**raw, **rates, "matrix": {name: Rate(**value) for name, value in raw["matrix"].items()}})


def find(peaks: Iterable[Peaks], device: str, threads: int) -> Peaks | None:
    """Those of a device; on the CPU, for as many threads."""
    return next((p for p in peaks if p.device == device and (device == "cuda" or p.threads == threads)), None)


def probe(threads: Iterable[int], force: bool = False, here: Target | None = None) -> tuple[Peaks, ...]:
    """The peaks of this machine's CPU for each number of threads, and of its GPU; probes what isn't kept yet, or all.

    Takes about 12 seconds a device, less where more numbers of threads share them. The file holds the fingerprint,
    libraries included, of when it was last written.
    """
    here = here or fingerprint()
    asked = sorted(set(threads)) or [1]
    found = () if force else known(here.id)
    new = [on_cpu(n, BUDGET_S / len(asked)) for n in asked if find(found, "cpu", n) is None]
    if here.kind == "cuda" and find(found, "cuda", 0) is None and _cuda():
        new.append(on_cuda(BUDGET_S))
    if new:
        found = (*found, *new)
        content = {"schema": SCHEMA, "target": plain(here), "peaks": [asdict(p) for p in found]}
        write_json(path(here.id), content)
    return found


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def on_cpu(threads: int, budget_s: float = BUDGET_S) -> Peaks:
    """Probe the CPU with a number of threads."""
    import torch

    from tasks import peaks_probe

    before, share = torch.get_num_threads(), budget_s / (2 + len(CPU_FORMATS))
    torch.set_num_threads(threads)
    try:
        matrix, left_out = _each(
            CPU_FORMATS,
            lambda name: (
                peaks_probe.cpu_int8(share, threads) if name == "int8" else peaks_probe.cpu_float(name, share, threads)
            ),
        )
        memory, cache = peaks_probe.cpu_memory(share), peaks_probe.cpu_cache(share, threads)
    finally:
        torch.set_num_threads(before)
    return Peaks("cpu", threads, memory, cache, last_level_cache_bytes(), matrix, left_out)


def on_cuda(budget_s: float = BUDGET_S) -> Peaks:
    """Probe the GPU."""
    import torch

    from tasks import peaks_probe

    share = budget_s / (2 + len(CUDA_FORMATS))
    matrix, left_out = _each(CUDA_FORMATS, lambda name: _on_gpu(name, share))
    memory, cache = peaks_probe.cuda_memory(share), peaks_probe.cuda_cache(share)
    torch.cuda.empty_cache()
    return Peaks("cuda", 0, memory, cache, peaks_probe.cuda_cache_bytes(), matrix, left_out)


def _on_gpu(name: str, budget_s: float) -> Rate:
    import torch

    from tasks import peaks_probe
    from tasks.engines.torch_forms import NEEDS

    least, here = NEEDS.get(name, (0, 0)), torch.cuda.get_device_capability()
    if here < least:
        raise ValueError(f"compute capability {here[0]}.{here[1]} has none")
    return peaks_probe.cuda_matrix(name, budget_s)


def _each(formats: Iterable[str], rate: Callable[[str], Rate]) -> tuple[dict[str, Rate], dict[str, str]]:
    """The rate of each format, and the reason of each that this machine's libraries refuse."""
    found: dict[str, Rate] = {}
    left_out: dict[str, str] = {}
    for name in formats:
        try:
            found[name] = rate(name)
        except Exception as error:  # What a library raises for a format that it lacks is its own affair.
            left_out[name] = " ".join(str(error).split())[:200] or type(error).__name__
    return found, left_out

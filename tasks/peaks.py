"""What this machine reaches at best: copy bandwidth and matrix rates by format, probed once, kept with its fingerprint.

The ceilings of the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785). As in STREAM
(McCalpin 1995), a ceiling is the best of several repeats: others disturb a machine downwards only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tasks import layout
from tasks.files import read_json, write_json
from tasks.target import Target, fingerprint, last_level_cache_bytes, plain

SCHEMA = 2
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

    @property
    def disturbed(self) -> bool:
        """Whether other work kept half of the repeats a fifth below the best."""
        return self.median < CALM * self.best


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
        """Whether other work disturbed one of the probes."""
        return any(rate.disturbed for rate in (self.memory, self.cache, *self.matrix.values()))

    @property
    def flops_per_s(self) -> dict[str, float]:
        """The best rate by format."""
        return {name: rate.best for name, rate in self.matrix.items()}


@dataclass(frozen=True)
class Failed:
    """A device that couldn't be probed, and why."""

    device: str
    threads: int
    reason: str


@dataclass(frozen=True)
class Probed:
    """What is known of one machine, as `layout.PEAKS` holds it."""

    peaks: tuple[Peaks, ...] = ()
    failed: tuple[Failed, ...] = ()

    def find(self, device: str, threads: int) -> Peaks | None:
        """The peaks of a device; on the CPU, for as many threads."""
        return next((p for p in self.peaks if _same(p, device, threads)), None)

    def why_not(self, device: str, threads: int) -> str | None:
        """Why that device couldn't be probed; None if it was, or if nobody tried."""
        return next((f.reason for f in self.failed if _same(f, device, threads)), None)


def _same(one: Peaks | Failed, device: str, threads: int) -> bool:
    return one.device == device and (device == "cuda" or one.threads == threads)


def known(here: Target) -> Probed:
    """What was probed of exactly this machine with these libraries; nothing if there is no file of it."""
    try:
        raw = read_json(layout.PEAKS)
        if raw["schema"] != SCHEMA or raw["target"] != plain(here):
            return Probed()
        return Probed(tuple(_restored(p) for p in raw["peaks"]), tuple(Failed(**f) for f in raw["failed"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Probed()


def _restored(raw: dict[str, Any]) -> Peaks:
    rates = {key: Rate(**raw[key]) for key in ("memory", "cache")}
    return Peaks(**{**raw, **rates, "matrix": {name: Rate(**value) for name, value in raw["matrix"].items()}})


def probe(threads: Iterable[int], force: bool = False, here: Target | None = None) -> Probed:
    """The peaks of this machine's CPU for each number of threads, and of its GPU; probes what isn't kept yet, or all.

    Without `threads` the CPU is left out where there is a GPU, else it is probed with one. A device whose probe raises
    is kept with the reason, and tried again the next time. Takes some seconds a device, `BUDGET_S` at most.
    """
    here = here or fingerprint()
    gpu = [("cuda", 0)] if here.kind == "cuda" else []
    asked = [("cpu", n) for n in sorted(set(threads)) or ([] if gpu else [1])]
    kept = Probed() if force else known(here)
    missing = [(device, n) for device, n in (*asked, *gpu) if kept.find(device, n) is None]
    if not missing:
        return kept
    others = tuple(one for one in kept.failed if (one.device, one.threads) not in missing)
    # What a crash of the probe would leave.
    _write(here, Probed(kept.peaks, (*others, *(Failed(device, n, "its probe didn't end") for device, n in missing))))
    share = {"cpu": BUDGET_S / max(1, len(asked)), "cuda": BUDGET_S}
    found = [_probed(device, n, share[device]) for device, n in missing]
    new = tuple(one for one in found if isinstance(one, Peaks))
    probed = Probed((*kept.peaks, *new), (*others, *(one for one in found if isinstance(one, Failed))))
    _write(here, probed)
    return probed


def _write(here: Target, probed: Probed) -> None:
    write_json(layout.PEAKS, {"schema": SCHEMA, "target": plain(here), **asdict(probed)})


def _probed(device: str, threads: int, budget_s: float) -> Peaks | Failed:
    try:
        return on_cpu(threads, budget_s) if device == "cpu" else on_cuda(budget_s)
    except Exception as error:  # What a library raises for a device that it can't use is its own affair.
        return Failed(device, threads, _words(error))


def on_cpu(threads: int, budget_s: float = BUDGET_S) -> Peaks:
    """Probe the CPU with a number of threads; what its libraries raise, if nothing multiplies or copies here."""
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
    """Probe the GPU; what PyTorch raises, if it can't use it."""
    import torch

    from tasks import peaks_probe

    torch.cuda.init()

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
            left_out[name] = _words(error)
    if not found:
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return found, left_out


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

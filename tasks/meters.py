"""Counters of energy that the hardware keeps: NVML's of a GPU, RAPL's of a CPU.

RAPL is read from Linux's powercap files, a few lines: the libraries that do it are old (pyRAPL, of 2019), or start
processes beside the measurement and bring other vendors' drivers (zeus).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tasks.errors import Unavailable
from tasks.gpu_state import Card

POWERCAP = Path("/sys/class/powercap")


class Meter(Protocol):
    """A counter of energy. `joules` rises; where it starts doesn't matter."""

    name: str

    def joules(self) -> float: ...


class GpuMeter:
    """NVML's total energy of a card; Unavailable if it has none, or shares it among slices."""

    def __init__(self, card: Card) -> None:
        self.name, self._card = f"NVML, {card.name}", card
        if card.shared():
            raise Unavailable(f"{card.name} is cut into slices, and its meter is the whole card's")
        self.joules()

    def joules(self) -> float:
        return self._card.joules()


class Rapl:
    """RAPL's packages and memories, by powercap; Unavailable, in one line, where they can't be read.

    Sysfs: https://docs.kernel.org/power/powercap/powercap.html
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _kind(zone) in ("package", "dram")]
        if not zones:
            raise Unavailable("no energy counter here: no RAPL package under /sys/class/powercap")
        try:
            self._zones = [(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())) for zone in zones]
            self._last = [int(file.read_text()) for file, _ in self._zones]
        except PermissionError:
            raise Unavailable("RAPL's counters are here, but only root may read them (energy_uj)") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"RAPL's counters can't be read: {error}") from None
        self._total_uj = 0
        self.name = f"RAPL, {', '.join((zone / 'name').read_text().strip() for zone in zones)}"

    def joules(self) -> float:
        """Energy since this meter was made; a counter that started again from 0 meanwhile is carried on."""
        now = [int(file.read_text()) for file, _ in self._zones]
        for (_, most), before, after in zip(self._zones, self._last, now, strict=True):
            self._total_uj += after - before if after >= before else after - before + most
        self._last = now
        return self._total_uj / 1e6


def of(device: str, card: Card | None) -> Meter:
    """The meter of a device ("cuda" or "cpu"); Unavailable, in one line, if there is none."""
    if device != "cuda":
        return Rapl()
    if card is None:
        raise Unavailable("the GPU can't be read here")
    return GpuMeter(card)


def _kind(zone: Path) -> str:
    name = zone / "name"
    return name.read_text().strip().split("-")[0] if name.is_file() else ""

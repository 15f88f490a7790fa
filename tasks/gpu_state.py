"""What an NVIDIA GPU says of itself, by NVML: clocks, temperature, power, throttling, who else works on it.

Nothing is ever set. What a driver doesn't tell is None, with the reason in `missing`.
Manual: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from tasks.errors import Unavailable
from tasks.target import first_gpu

IDLE, APPLICATION = "idle", "application clocks"
SW_POWER, HW_BRAKE = "software power cap", "hardware power brake"
SW_HEAT, HW_HEAT = "software thermal slowdown", "hardware thermal slowdown"
# nvml.h, nvmlClocksEventReasons; the last two are of older drivers.
REASONS = {
    0x1: IDLE,
    0x2: APPLICATION,
    0x4: SW_POWER,
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: SW_HEAT,
    0x40: HW_HEAT,
    0x80: HW_BRAKE,
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}
HARMLESS = (IDLE, APPLICATION)
# nvml.h, nvmlPerfPolicyType_t: the time that clocks were held below what was asked for.
POLICIES = {"power": 0, "thermal": 1}
T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """One reading, `at_s` on time.perf_counter.

    `reasons` are why clocks are not higher, by name; `held_back_ms` counts, since the driver was loaded, the time
    that clocks were below what was asked for, by limit (power, thermal). `others` is the number of other processes on
    the GPU, `others_busy` the largest share (0 … 1) of its multiprocessors' time that one of them took since the
    reading before. `top_sm_mhz` is what the multiprocessors may run at, as `Card.top_sm_mhz`. `missing` says why a
    value is None.
    """

    at_s: float
    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    reasons: tuple[str, ...] | None
    held_back_ms: dict[str, float]
    others: int | None
    others_busy: float | None
    top_sm_mhz: int | None = None
    missing: dict[str, str] = field(default_factory=dict)


def names(mask: int) -> tuple[str, ...]:
    """The reasons in NVML's bit mask, by name; a bit that isn't known by its number."""
    known = sum(REASONS)
    strange = [f"reason {1 << i:#x}" for i in range(mask.bit_length()) if mask & ~known & (1 << i)]
    return (*(name for bit, name in REASONS.items() if mask & bit), *strange)


class Card:
    """The GPU that this process's engines run on, the first that CUDA sees; to be closed.

    `nvml` is the module pynvml, or what behaves as it. Raises Unavailable, in one line, without a GPU or driver.
    `top_sm_mhz` is the highest clock of the multiprocessors, or the application clock where a lower one is set; read
    once, None where the driver doesn't tell the highest.
    """

    def __init__(self, nvml: ModuleType | Any = None) -> None:
        try:
            if nvml is None:
                import pynvml

                nvml = pynvml
            nvml.nvmlInit()
        except Exception as error:  # NVMLError, or no module at all
            raise Unavailable(f"no NVIDIA GPU can be read here: {_words(error)}") from None
        self._nvml, self._seen_us, self._open = nvml, 0, True
        try:
            self._handle = _handle(nvml)
            self.name = _text(nvml.nvmlDeviceGetName(self._handle))
        except nvml.NVMLError as error:
            self.close()
            raise Unavailable(f"no NVIDIA GPU can be read here: {_words(error)}") from None
        self.top_sm_mhz, self._why_no_top = _top(nvml, self._handle)

    def read(self) -> Gpu:
        """A reading of all that the driver tells; takes some milliseconds, so that it stays out of timed calls."""
        nvml, handle, missing = self._nvml, self._handle, dict[str, str]()
        if self.top_sm_mhz is None:
            missing["top_sm_mhz"] = self._why_no_top

        def ask(what: str, call: Callable[[], T]) -> T | None:
            try:
                return call()
            except nvml.NVMLError as error:
                missing[what] = _words(error)
                return None

        at = time.perf_counter()
        power = ask("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = ask("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        mask = ask("reasons", lambda: _reasons(nvml, handle))
        held = {
            policy: ask(f"held_back_ms.{policy}", partial(nvml.nvmlDeviceGetViolationStatus, handle, number))
            for policy, number in POLICIES.items()
        }
        others, why = ask("others", self._others) or (None, missing["others"])
        if others is None:
            missing["others"] = why
        busy = None if why else ask("others_busy", self._busiest)
        if why:
            missing["others_busy"] = why
        return Gpu(
            at_s=at,
            sm_mhz=ask("sm_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=ask("memory_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=ask(
                "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_w=None if power is None else power / 1e3,
            power_limit_w=None if limit is None else limit / 1e3,
            reasons=None if mask is None else names(mask),
            held_back_ms={policy: found.violationTime / 1e6 for policy, found in held.items() if found},
            others=others,
            others_busy=busy,
            top_sm_mhz=self.top_sm_mhz,
            missing=missing,
        )

    def joules(self) -> float:
        """Energy that the whole card took since its driver was loaded; Unavailable if it has no such counter."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            raise Unavailable(f"{self.name} tells no energy: {_words(error)}") from None

    def used_bytes(self) -> int:
        """Device memory in use, by all processes and contexts."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def shared(self) -> bool:
        """Whether it is cut into slices (MIG), which share meters and limits."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except self._nvml.NVMLError:
            return False

    def close(self) -> None:
        """Let go of NVML; a second call does nothing."""
        if self._open:
            self._open = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _others(self) -> tuple[int | None, str]:
        """How many other processes there are, and why their work can't be told apart from ours, or ""."""
        pids = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if os.getpid() in pids or not using():
            return len(pids - {os.getpid()}), ""
        if not pids:
            return None, "the driver lists no processes here, not even this one"
        # In a container the driver's process numbers are the host's: one of them is ours.
        return len(pids) - 1, "the driver numbers processes otherwise than this system"

    def _busiest(self) -> float:
        try:
            found = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except self._nvml.NVMLError as error:
            # Not found: nothing worked since then.
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_FOUND:
                return 0.0
            raise
        new = [sample for sample in found if sample.timeStamp > self._seen_us]
        self._seen_us = max([self._seen_us, *(int(sample.timeStamp) for sample in new)])
        return max([0.0, *(sample.smUtil / 100 for sample in new if sample.pid not in (0, os.getpid()))])


def using() -> bool:
    """Whether this process has a CUDA context by now, as far as its own libraries tell."""
    memory, torch = sys.modules.get("tasks.engines.cuda_memory"), sys.modules.get("torch")
    return bool(memory and memory.context.cache_info().currsize) or bool(torch and torch.cuda.is_initialized())


def _handle(nvml: Any) -> Any:
    """The first GPU that CUDA sees: by its bus address where PyCUDA knows it, else by CUDA_VISIBLE_DEVICES."""
    memory = sys.modules.get("tasks.engines.cuda_memory")
    if memory and memory.context.cache_info().currsize:
        return nvml.nvmlDeviceGetHandleByPciBusId(memory.driver.Device(0).pci_bus_id())
    return first_gpu(nvml)


def _top(nvml: Any, handle: Any) -> tuple[int | None, str]:
    """What the multiprocessors may run at in MHz, or None and why."""
    try:
        top = int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    except nvml.NVMLError as error:
        return None, _words(error)
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        # Not every card has application clocks, and newer drivers and bindings do without; 0 is none that was set.
        top = min(top, int(nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM)) or top)
    return top, ""


def _reasons(nvml: Any, handle: Any) -> int:
    call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    try:
        return int((call or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))
    except nvml.NVMLError as error:
        # Drivers before 535 know the call by its older name only.
        if call is None or getattr(error, "value", None) != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

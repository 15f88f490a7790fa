"""A card that says what a test wants: as much of pynvml as the monitor asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND = 3, 6, 13


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({NOT_SUPPORTED: "Not Supported", NOT_FOUND: "Not Found"}.get(value, "Function Not Found"))
        self.value = value


class FakeNvml:
    """An H200 at work: change `state`, by name of what is asked; an exception there is raised."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND = NOT_FOUND, FUNCTION_NOT_FOUND
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **state: Any) -> None:
        self.opened = 0
        self.state: dict[str, Any] = {
            **{"sm": 1980, "memory": 3201, "temperature": 41, "power": 350_000, "limit": 700_000, "reasons": 0},
            **{"held": {0: 0, 1: 0}, "pids": [], "work": NVMLError(NOT_FOUND), "energy": 5_000, "mig": NVMLError(3)},
            **{"used": 1 << 30, "top": 1980, "application": 1980, **state},
        }

    def _ask(self, key: str) -> Any:
        value = self.state[key]
        value = value() if callable(value) else value
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return self._ask("power")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> Any:
        return self._ask("limit")

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> Any:
        return self._ask({1: "sm", 2: "memory"}[kind])

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> Any:
        return self._ask({1: "top"}[kind])

    def nvmlDeviceGetApplicationsClock(self, handle: int, kind: int) -> Any:
        return self._ask({1: "application"}[kind])

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        return self._ask("temperature")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> Any:
        return self._ask("reasons")

    def nvmlDeviceGetViolationStatus(self, handle: int, policy: int) -> Any:
        return SimpleNamespace(violationTime=self._ask("held")[policy], referenceTime=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [SimpleNamespace(pid=pid) for pid in self._ask("pids")]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> Any:
        return self._ask("work")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> Any:
        return self._ask("energy")

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        return self._ask("mig")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self._ask("used"))


def work(pid: int, share: int, at: int) -> Any:
    """A sample of a process's share of the multiprocessors, in percent."""
    return SimpleNamespace(pid=pid, smUtil=share, timeStamp=at)

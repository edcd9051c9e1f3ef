"""A stand-in for pynvml: answers from a table, raises what the driver would, can lose its card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


TIMEOUT, NOT_SUPPORTED, LOST = 10, 3, 15


class FakeNvml:
    """`answers`: function -> what it returns (an exception is raised); one that is not there is not supported."""

    NVMLError = NVMLError
    NVML_SUCCESS, NVML_ERROR_GPU_IS_LOST = 0, LOST
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_MEMORY_TEMP, nvmlEventTypeXidCriticalError = 82, 8

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "NVIDIA GeForce RTX 3090",
        } | answers
        self.lost = False
        self.xids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.lost:
            raise NVMLError(LOST)
        if name == "nvmlEventSetWait" and "nvmlEventSetCreate" in self.answers:
            assert arguments[1] == 0, "the sensors never wait"
            if not self.xids:
                raise NVMLError(TIMEOUT)
            return SimpleNamespace(eventData=self.xids.pop(0))
        if name not in self.answers:
            raise NVMLError(NOT_SUPPORTED)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer(*arguments) if callable(answer) else answer


def desktop_card(**changes: Any) -> FakeNvml:
    """A 3090 at work that tells everything but ECC, which it does not have."""

    def clock(_: Any, kind: int) -> int:
        return {1: 1700, 2: 9501}[kind]

    return FakeNvml(
        **{
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=92))],
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=98, memory=60),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 << 30, total=24 << 30, free=4 << 30),
            "nvmlDeviceGetPowerUsage": 347_500,
            "nvmlDeviceGetEnforcedPowerLimit": 350_000,
            "nvmlDeviceGetClockInfo": clock,
            "nvmlDeviceGetMaxClockInfo": 2100,
            "nvmlDeviceGetFanSpeed": 65,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            "nvmlEventSetCreate": "events",
            "nvmlDeviceRegisterEvents": None,
        }
        | changes
    )

"""What a GPU does now, by NVML: utilization, power, clocks, temperature, and why its clocks are held back.

NVML is reached through `pynvml` of the package nvidia-ml-py, which is optional. It numbers all GPUs of the machine,
whatever CUDA_VISIBLE_DEVICES says, so a GPU is found by its UUID. Mean power is the difference of the energy counter
over time, not a sample. Nothing here can stop a run: a value that the GPU does not have is left out, and an error is
said once.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from qtrain.core.errors import first_line

log = logging.getLogger("qtrain")

THROTTLE_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature (driver)",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Bits of nvml.h's nvmlClocksEventReasons in words. Bit 0x1, an idle GPU, holds nothing back."""

INSTALL = "pip install nvidia-ml-py adds the GPU's utilization, power, clocks and temperature to the log"


class GpuSensors:
    """The sensors of one device; of a CPU, or without NVML, there are none and nothing fails.

    Of a MIG instance, clocks and temperature are the card's; power and energy, which instances share, are left out."""

    def __init__(self, device: torch.device):
        self._queries: dict[str, Callable[[], Any]] = {}
        self._told = False
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            log.info("note: %s", INSTALL)
            return
        self._nvml_error, self._not_supported = pynvml.NVMLError, pynvml.NVML_ERROR_NOT_SUPPORTED
        try:
            pynvml.nvmlInit()
            self._queries = _queries(pynvml, *_handles(pynvml, str(torch.cuda.get_device_properties(device).uuid)))
        except (pynvml.NVMLError, AttributeError) as error:  # no driver, or torch without UUIDs
            self._tell(error)

    @property
    def available(self) -> bool:
        return bool(self._queries)

    def read(self) -> dict[str, Any]:
        """util, memory_util: percent of NVML's last sampling period; sm_clock: MHz; temperature: °C; throttled: why
        clocks are held back, in words. Those that the GPU has. Takes microseconds."""
        # Over a copy of the keys: `_ask` deletes a query that fails.
        values = {name: self._ask(name) for name in list(self._queries) if name not in ("joules", "power")}
        util, memory_util = values.pop("utilization", None) or (None, None)
        values = {"util": util, "memory_util": memory_util, **values}
        return {name: value for name, value in values.items() if value is not None}

    def power(self) -> float | None:
        """Watts, as the GPU reports them now."""
        return self._ask("power")

    def joules(self) -> float | None:
        """The energy counter, which counts from when the driver was loaded. Takes 5 ms on an H100."""
        return self._ask("joules")

    def _ask(self, name: str) -> Any:
        query = self._queries.get(name)
        if query is None:
            return None
        try:
            return query()
        except self._nvml_error as error:
            # What failed is not asked again: a lost GPU would fail in every step.
            del self._queries[name]
            if getattr(error, "value", None) != self._not_supported:
                self._tell(error)
            return None

    def _tell(self, error: Exception) -> None:
        if not self._told:
            log.warning("the GPU's sensors cannot be read (NVML: %s); the run goes on without", first_line(error))
        self._told = True


def _handles(nvml: Any, uuid: str) -> tuple[Any, Any]:
    """NVML's handles of the device and of its card, which are the same but for a MIG instance."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return handle, handle
    except nvml.NVMLError as error:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            return handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except nvml.NVMLError:
            raise error from None


def _queries(nvml: Any, device: Any, card: Any) -> dict[str, Callable[[], Any]]:
    """What can be asked, by name, in this project's units."""
    # Renamed in driver 535; older packages have the first name only.
    renamed = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = renamed or nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def utilization() -> tuple[int, int]:
        rates = nvml.nvmlDeviceGetUtilizationRates(device)
        return rates.gpu, rates.memory

    def throttled() -> list[str]:
        bits = reasons(card)
        return [text for bit, text in THROTTLE_REASONS.items() if bits & bit]

    return {
        "utilization": utilization,
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,  # NVML has mW
        "sm_clock": lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
        "throttled": throttled,
        "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,  # NVML has mJ
    }

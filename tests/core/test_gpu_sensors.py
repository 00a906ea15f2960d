"""The GPU's sensors by NVML: the right GPU is asked, units, what a GPU lacks, and that no error leaves."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qtrain.core.gpu_sensors import INSTALL, GpuSensors

UUID = "f74cbc76-c164-4ef6-49d1-53db3fbdfb06"
CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


class FakeNvml(ModuleType):
    """The part of pynvml 12/13 that is used; `fails`: name of a function -> its error. Records its calls."""

    NVMLError, NVML_ERROR_NOT_SUPPORTED = NVMLError, 3
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, known=(f"GPU-{UUID}",), **fails):
        super().__init__("pynvml")
        self.known, self.fails, self.calls, self.energy = known, fails, [], 1_000_000

    def _called(self, name, handle=None):
        self.calls.append((name, handle))
        if name in self.fails:
            raise self.fails[name]

    def nvmlInit(self):
        self._called("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._called("uuid", uuid)
        if uuid not in self.known:
            raise NVMLError(6, "Not Found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return f"card of {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._called("utilization", handle)
        return SimpleNamespace(gpu=97, memory=61)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._called("power", handle)
        return 612_500

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self._called("clock", handle)
        return 1755

    def nvmlDeviceGetTemperature(self, handle, kind):
        self._called("temperature", handle)
        return 64

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._called("reasons", handle)
        return 0x1 | 0x4 | 0x40

    nvmlDeviceGetCurrentClocksThrottleReasons = nvmlDeviceGetCurrentClocksEventReasons

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._called("energy", handle)
        self.energy += 500_000
        return self.energy


@pytest.fixture
def sensors(monkeypatch):
    """Sensors of a GPU that a given stand-in knows."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))

    def opened(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return GpuSensors(CUDA)

    return opened


@pytest.fixture
def said(monkeypatch):
    found: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(logging.getLogger("qtrain"), level, lambda text, *parts: found.append(text % parts))
    return found


def test_values_are_in_the_units_of_the_log(sensors, said):
    nvml = FakeNvml()
    found = sensors(nvml)
    assert found.read() == {
        "util": 97,
        "memory_util": 61,
        "sm_clock": 1755,
        "temperature": 64,
        "throttled": ["power cap", "temperature (hardware)"],
    }
    assert found.power() == 612.5
    before = found.joules()
    assert found.joules() - before == 500 and not said


def test_the_gpu_is_found_by_its_uuid_not_by_an_index(sensors):
    """CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's."""
    nvml = FakeNvml()
    sensors(nvml).read()
    assert {handle for name, handle in nvml.calls if name != "init"} == {f"GPU-{UUID}"}


def test_a_mig_instance_is_asked_for_itself_and_its_card_for_clocks(sensors, said):
    missing = NVMLError(3, "Not Supported")
    nvml = FakeNvml(known=(f"MIG-{UUID}",), power=missing, energy=missing, utilization=missing)
    found = sensors(nvml)
    assert found.power() is None and found.joules() is None
    assert found.read() == {"sm_clock": 1755, "temperature": 64, "throttled": ["power cap", "temperature (hardware)"]}
    assert ("clock", f"card of MIG-{UUID}") in nvml.calls and ("power", f"MIG-{UUID}") in nvml.calls
    assert not said


def test_what_the_gpu_lacks_is_asked_once_and_not_told(sensors, said):
    nvml = FakeNvml(energy=NVMLError(3, "Not Supported"))
    found = sensors(nvml)
    assert [found.joules() for _ in range(3)] == [None] * 3
    assert [name for name, _ in nvml.calls].count("energy") == 1 and not said and found.power() == 612.5


def test_an_error_is_told_once_and_never_raised(sensors, said):
    nvml = FakeNvml()
    found = sensors(nvml)
    nvml.fails = dict.fromkeys(("utilization", "power", "temperature"), NVMLError(15, "GPU is lost"))
    assert found.read() == {"sm_clock": 1755, "throttled": ["power cap", "temperature (hardware)"]}
    assert found.power() is None and "temperature" not in found.read()
    assert said == ["the GPU's sensors cannot be read (NVML: GPU is lost); the run goes on without"]


@pytest.mark.parametrize("nvml", [FakeNvml(init=NVMLError(9, "Driver Not Loaded")), FakeNvml(known=())])
def test_without_a_driver_or_the_gpu_there_are_no_sensors(sensors, said, nvml):
    found = sensors(nvml)
    assert not found.available and found.read() == {} and found.power() is None and found.joules() is None
    assert len(said) == 1 and "cannot be read (NVML: " in said[0]


def test_without_the_package_a_line_names_the_command(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = GpuSensors(CUDA)
    assert not found.available and said == [f"note: {INSTALL}"]


def test_a_cpu_has_none_and_asks_nothing(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = GpuSensors(torch.device("cpu"))
    assert not found.available and found.read() == {} and found.joules() is None and not said


@pytest.mark.gpu
def test_this_gpu_answers():
    pytest.importorskip("pynvml")
    found = GpuSensors(torch.device("cuda", torch.cuda.current_device()))
    values = found.read()
    assert 0 <= values["util"] <= 100 and 100 < values["sm_clock"] < 5000 and 10 < values["temperature"] < 110
    assert 10 < found.power() < 2000 and found.joules() > 0

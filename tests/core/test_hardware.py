"""The peaks of a device, by its exact name or measured; and the C library's memory settings, where it has them."""

import ctypes
import time
from types import SimpleNamespace

import pytest
import torch

from qtrain.core.hardware import device, rates
from qtrain.core.hardware.datasheets import DATASHEET
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.hardware.memory import allocatable_memory, count_outside, keep_freed_memory, peak_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_only_the_very_product_has_the_peaks_of_its_datasheet(name, product, monkeypatch):
    properties = SimpleNamespace(name=name, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device, "measured_peaks", lambda _: {"bf16": 1.0})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(device, "pinnable_memory", lambda: 5)
    found = describe_hardware(GPU)
    assert found.measured == (product is None) and found.name == name
    assert (found.pinnable, found.gpus) == (5, 4) and describe_hardware(CPU).pinnable is None
    assert found.peaks == ({"bf16": 1.0} if product is None else DATASHEET[product].peaks)


@pytest.mark.parametrize(
    "module", ["Kernel Module  570.133.20  Sun Mar", "Open Kernel Module for x86_64  570.133.20  Rel"]
)
def test_the_software_of_a_device_that_is_here(module, tmp_path, monkeypatch):
    """Of a GPU its free memory, driver and CUDA too; nothing fails where the driver does not tell its version."""
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {module}\nGCC version: gcc 13.2.0\n")
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 80 * 2**30))
    found = device.describe_software(GPU)
    assert found.startswith(
        f"7.0 of 80.0 GiB free, driver 570.133.20, CUDA {torch.version.cuda}, torch {torch.__version__}"
    )
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    assert "driver" not in device.describe_software(GPU)
    assert device.describe_software(CPU).startswith(f"torch {torch.__version__}")


def test_what_the_allocator_can_still_give_out(monkeypatch):
    """8 bytes are free, of which its limit leaves 5; 20 + 7 are cached, and 40 belong to graphs or to another GPU."""
    segments = [
        {"device": d, "total_size": n, "allocated_size": used, "segment_pool_id": pool}
        for d, n, used, pool in [(0, 30, 10, (0, 0)), (0, 7, 0, (0, 0)), (0, 40, 0, (0, 1)), (1, 40, 0, (0, 0))]
    ]
    for name, value in {
        "mem_get_info": (8, 100),
        "get_per_process_memory_fraction": 0.82,
        "memory_reserved": 77,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert allocatable_memory(GPU) == 5 + 20 + 7


class BusyMachine:
    """A clock that products move on: at 0.1 TFLOP/s, twenty times slower during the first 0.1 s."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        for name in ("mm", "_int_mm"):
            monkeypatch.setattr(torch, name, self.multiply)

    def multiply(self, a, b):
        self.now += 2 * len(a) ** 3 / 1e11 * (20 if self.now < 0.1 else 1)


@pytest.fixture
def threads():
    """Changes the number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_a_cpus_peaks_are_those_of_its_undisturbed_moments(count, threads, monkeypatch):
    rates._cpu_peaks.cache_clear()
    threads(count)
    BusyMachine(monkeypatch)
    try:
        peaks = describe_hardware(CPU).peaks
    finally:
        rates._cpu_peaks.cache_clear()
    assert peaks == {name: pytest.approx(count * 0.1) for name in ("fp32", "bf16", "int8")}
    assert torch.get_num_threads() == count


def test_a_process_measures_its_cpu_once_and_in_half_a_second(threads):
    threads(1)
    rates._cpu_peaks.cache_clear()
    started = time.perf_counter()
    first = describe_hardware(CPU)
    assert time.perf_counter() - started < 1.5 and all(rate > 0 for rate in first.peaks.values())
    assert describe_hardware(CPU) == first


@pytest.mark.parametrize("missing", [AttributeError, OSError, TypeError])
def test_a_c_library_without_the_option_is_left_alone(monkeypatch, missing):
    def library(name):
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", library)
    keep_freed_memory()


def test_both_thresholds_are_set(monkeypatch):
    asked = {}

    class Library:
        def mallopt(self, option, value):
            asked[option] = value
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    keep_freed_memory()
    assert set(asked) == {-1, -3} and all(2**30 <= value < 2**31 for value in asked.values())


@pytest.mark.gpu
def test_tensors_outside_of_the_allocator_count_and_lower_its_limit():
    device = torch.device("cuda")
    before, limit = peak_memory(device), torch.cuda.get_per_process_memory_fraction()
    size = torch.cuda.get_device_properties(0).total_memory // 4
    count_outside(device, size)
    assert peak_memory(device) == before + size
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(limit - 0.25, abs=1e-6)
    count_outside(device, -size)
    assert peak_memory(device) == before and torch.cuda.get_per_process_memory_fraction() == pytest.approx(limit)

"""The device that a run is planned for: its name, memory, and peak dense rates per arithmetic."""

import contextlib
import re
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from qtrain.core.errors import unknown_name
from qtrain.core.hardware.datasheets import DATASHEET, HOST_LINK_REACHED, planned_gpus, product_of
from qtrain.core.hardware.memory import ALLOCATOR_HOLES, CUDA_OUTSIDE, host_memory, pinnable_memory
from qtrain.core.hardware.rates import host_link_rate, measured_peaks

RUNS_AS = {"int4": "int8"}
"""Arithmetic that this package runs on the tensor cores of another: packed INT4 codes are unpacked to INT8, but
where INT4 tensor cores are faster."""


@dataclass(frozen=True)
class Hardware:
    """A device and its peaks."""

    name: str
    peaks: dict[str, float]
    """TFLOP/s by arithmetic."""
    memory_bytes: int | None
    """Of the GPU; of the host for a CPU."""
    measured: bool
    """Whether the peaks were timed here; else they are of a datasheet."""
    host_bandwidth: float | None = None
    """Bytes per second between a GPU and host memory, each way; None: not known, or no GPU."""
    is_gpu: bool = False
    pinnable: int | None = None
    """Bytes of the host's memory that the processes of this machine's GPUs may pin together; None: not known, as of a
    GPU that is not here."""
    gpus: int = 1
    """Of the machine, where `pinnable` is known."""
    software: str = ""
    """Of a device that is here: its free memory, and the versions that its speed depends on."""

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second; assumed for a device that is in no table."""
        return self.peaks.get("bandwidth", 1.0 if self.is_gpu else 0.05) * 1e12

    def memory_taken(self, tensors: int) -> int:
        """Bytes that a run whose tensors have this peak takes of the device."""
        return CUDA_OUTSIDE + round((1 + ALLOCATOR_HOLES) * tensors) if self.is_gpu else tensors

    def peak(self, arithmetic: str) -> float:
        """TFLOP/s of an arithmetic. One that the device lacks is emulated at the bf16 or fp32 rate."""
        return self.peaks.get(RUNS_AS.get(arithmetic, arithmetic)) or self.peaks.get("bf16") or self.peaks["fp32"]

    def emulates(self, arithmetic: str) -> bool:
        """Whether the device lacks this arithmetic."""
        return RUNS_AS.get(arithmetic, arithmetic) not in self.peaks


def describe_hardware(device: torch.device) -> Hardware:
    """The hardware behind `device`; the rates of one that is not in DATASHEET are measured in under a second."""
    if device.type != "cuda":
        name = f"CPU, {torch.get_num_threads()} threads"
        return Hardware(name, measured_peaks(device), host_memory(), measured=True)
    properties = torch.cuda.get_device_properties(device)
    known = DATASHEET.get(product_of(properties.name))
    peaks = measured_peaks(device) if known is None else known.peaks
    link = None if known is None else HOST_LINK_REACHED * known.host_link * 1e9
    host = {"pinnable": pinnable_memory(), "gpus": torch.cuda.device_count()}
    return Hardware(properties.name, peaks, properties.total_memory, known is None, link, True, **host)


DRIVER = Path("/proc/driver/nvidia/version")


def describe_software(device: torch.device) -> str:
    """Free memory of a GPU, and versions of driver, CUDA, torch and triton, as far as there are such."""
    found = []
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found.append(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        with contextlib.suppress(OSError):
            if driver := re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", DRIVER.read_text()):
                found.append(f"driver {driver[1]}")
        found.append(f"CUDA {torch.version.cuda}")
    found.append(f"torch {torch.__version__}")
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.append(f"triton {metadata.version('triton')}")
    return ", ".join(found)


def with_measured_host_link(hardware: Hardware, device: torch.device) -> Hardware:
    """`hardware` with the bandwidth to host memory that this machine's GPU has."""
    return replace(hardware, host_bandwidth=host_link_rate(device))


def datasheet_hardware(name: str, flag: str = "--gpu") -> Hardware:
    """A GPU by its name in `planned_gpus`, from its datasheet alone. UserError naming `flag` for another name."""
    product = planned_gpus().get(name.lower())
    if product is None:
        raise unknown_name(flag, "GPU", name, planned_gpus())
    found = DATASHEET[product]
    link = HOST_LINK_REACHED * found.host_link * 1e9
    return Hardware(product, found.peaks, int(found.memory_gib * 2**30), False, link, True)

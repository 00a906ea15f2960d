"""Datasheets of GPUs: peak dense rates, memory and links, by the product's name."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A product's datasheet."""

    peaks: dict[str, float]
    """Dense TFLOP/s (TOPS for int8) with fp32 accumulation, and memory bandwidth in TB/s."""
    memory_gib: float
    """As torch reports it; of A100 and H100 the one with 80 GB."""
    link: str
    """What links the GPUs of a machine as they are sold: a name of `train/settings/machine.py`'s WIRES."""
    host_link: float
    """GB/s between the GPU and host memory, each way, of the link's datasheet."""


PCIE_4, PCIE_5, NVLINK_C2C = 31.5, 63.0, 225.0
"""16 lanes of PCIe; NVLink-C2C of a GB200, whose two GPUs share 450 GB/s each way."""

HOST_LINK_REACHED = 0.86
"""Of `Gpu.host_link`: an H100 on PCIe 5 copies pinned memory at 54.1 GB/s to the GPU and 54.7 GB/s back."""


def _gpu(memory_gib: float, link: str, host_link: float, **peaks: float) -> Gpu:
    return Gpu(peaks, memory_gib, link, host_link)


# By product name (`product_of`). Products that are not listed are measured: laptop, NVL and other variants have peaks
# of their own.
DATASHEET = {
    "H100 PCIe": _gpu(79.1, "pcie", PCIE_5, bf16=756.4, fp8=1512.9, int8=1512.9, fp32=51.2, bandwidth=2.0),
    "H100": _gpu(79.1, "nvlink", PCIE_5, bf16=989.4, fp8=1978.9, int8=1978.9, fp32=66.9, bandwidth=3.35),
    "H200": _gpu(139.8, "nvlink", PCIE_5, bf16=989.4, fp8=1978.9, int8=1978.9, fp32=66.9, bandwidth=4.8),
    "H800": _gpu(79.1, "nvlink_h800", PCIE_5, bf16=989.4, fp8=1978.9, int8=1978.9, fp32=66.9, bandwidth=3.35),
    "B200": _gpu(
        178.4, "nvlink5", PCIE_5, bf16=2250.0, fp8=4500.0, mxfp8=4500.0, int8=4500.0, fp32=75.0, bandwidth=8.0
    ),
    "GB200": _gpu(
        184.3, "nvlink5", NVLINK_C2C, bf16=2500.0, fp8=5000.0, mxfp8=5000.0, int8=5000.0, fp32=80.0, bandwidth=8.0
    ),
    "A100": _gpu(79.3, "nvlink3", PCIE_4, bf16=311.9, int8=623.7, fp32=19.5, bandwidth=2.04),
    "A100 PCIe": _gpu(79.3, "pcie4", PCIE_4, bf16=311.9, int8=623.7, fp32=19.5, bandwidth=1.94),
    "L40S": _gpu(44.4, "pcie4", PCIE_4, bf16=362.1, fp8=733.0, int8=733.0, fp32=91.6, bandwidth=0.864),
    "RTX PRO 6000": _gpu(
        94.9, "pcie", PCIE_5, bf16=503.8, fp8=1007.6, mxfp8=1007.6, int8=1007.6, fp32=125.0, bandwidth=1.792
    ),
    "RTX 4090": _gpu(23.5, "pcie4", PCIE_4, bf16=165.2, fp8=330.3, int8=660.6, fp32=82.6, bandwidth=1.008),
    "RTX 5090": _gpu(31.4, "pcie", PCIE_5, bf16=209.5, fp8=419.0, mxfp8=419.0, int8=838.0, fp32=104.8, bandwidth=1.792),
    "RTX 3090": _gpu(23.6, "pcie4", PCIE_4, bf16=71.0, int8=284.0, fp32=35.6, bandwidth=0.936),
}


def planned_gpus() -> dict[str, str]:
    """The GPUs that a run can be planned for without having one: name on the command line -> product."""
    return {planned_name(product): product for product in DATASHEET}


def planned_name(product: str) -> str:
    """The name of a product on the command line: '4090' of 'RTX 4090'."""
    return product.lower().removeprefix("rtx ").replace(" ", "-")


def product_of(name: str) -> str:
    """The product in a device's name as torch gives it: 'H100' of 'NVIDIA H100 80GB HBM3'."""
    words = name.replace("-PCIE-", " PCIe ").removeprefix("NVIDIA ").removeprefix("GeForce ").replace("-", " ").split()
    # The size and kind of the memory come before PCIe in some names and after it in others.
    variants = r"SXM\d|HBM\d\w?|\d+GB|Blackwell|Workstation|Server|Edition"
    return " ".join(word for word in words if not re.fullmatch(variants, word))

"""What this device can do: its name, memory, and peak dense rates per arithmetic."""

import contextlib
import ctypes
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from qtrain.core.errors import unknown_name
from qtrain.core.process import peak_resident_bytes


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


# By product name (`product_of`). Products that are not listed are measured: laptop, NVL and other variants have peaks
# of their own.
DATASHEET = {
    "H100 PCIe": Gpu(
        {"bf16": 756.4, "fp8": 1512.9, "int8": 1512.9, "fp32": 51.2, "bandwidth": 2.0}, 79.1, "pcie", PCIE_5
    ),
    "H100": Gpu(
        {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9, "fp32": 66.9, "bandwidth": 3.35}, 79.1, "nvlink", PCIE_5
    ),
    "H200": Gpu(
        {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9, "fp32": 66.9, "bandwidth": 4.8}, 139.8, "nvlink", PCIE_5
    ),
    "H800": Gpu(
        {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9, "fp32": 66.9, "bandwidth": 3.35}, 79.1, "nvlink_h800", PCIE_5
    ),
    "B200": Gpu(
        {"bf16": 2250.0, "fp8": 4500.0, "mxfp8": 4500.0, "int8": 4500.0, "fp32": 75.0, "bandwidth": 8.0},
        178.4,
        "nvlink5",
        PCIE_5,
    ),
    "GB200": Gpu(
        {"bf16": 2500.0, "fp8": 5000.0, "mxfp8": 5000.0, "int8": 5000.0, "fp32": 80.0, "bandwidth": 8.0},
        184.3,
        "nvlink5",
        NVLINK_C2C,
    ),
    "A100": Gpu({"bf16": 311.9, "int8": 623.7, "fp32": 19.5, "bandwidth": 2.04}, 79.3, "nvlink3", PCIE_4),
    "A100 PCIe": Gpu({"bf16": 311.9, "int8": 623.7, "fp32": 19.5, "bandwidth": 1.94}, 79.3, "pcie4", PCIE_4),
    "L40S": Gpu({"bf16": 362.1, "fp8": 733.0, "int8": 733.0, "fp32": 91.6, "bandwidth": 0.864}, 44.4, "pcie4", PCIE_4),
    "RTX PRO 6000": Gpu(
        {"bf16": 503.8, "fp8": 1007.6, "mxfp8": 1007.6, "int8": 1007.6, "fp32": 125.0, "bandwidth": 1.792},
        94.9,
        "pcie",
        PCIE_5,
    ),
    "RTX 4090": Gpu(
        {"bf16": 165.2, "fp8": 330.3, "int8": 660.6, "fp32": 82.6, "bandwidth": 1.008}, 23.5, "pcie4", PCIE_4
    ),
    "RTX 5090": Gpu(
        {"bf16": 209.5, "fp8": 419.0, "mxfp8": 419.0, "int8": 838.0, "fp32": 104.8, "bandwidth": 1.792},
        31.4,
        "pcie",
        PCIE_5,
    ),
    "RTX 3090": Gpu({"bf16": 71.0, "int8": 284.0, "fp32": 35.6, "bandwidth": 0.936}, 23.6, "pcie4", PCIE_4),
}

RUNS_AS = {"int4": "int8"}
"""Arithmetic that this package runs on the tensor cores of another: packed INT4 codes are unpacked to INT8, but
where INT4 tensor cores are faster."""

PTX_CAPABILITY, FP8_CAPABILITY, DEPENDENT_LAUNCH_CAPABILITY, MX_CAPABILITY = (8, 0), (8, 9), (9, 0), (10, 0)
"""Compute capability of the first GPUs that run the inline PTX of the kernels (Ampere: bf16x2 instructions), that
convert to and multiply FP8 (Ada), whose kernels can start before the last one has ended (Hopper), and that multiply FP8
with a scale per 32 elements (Blackwell)."""

WGMMA_CAPABILITY = (9, 0)
"""Compute capability of the only GPUs with `wgmma` (Hopper)."""

CUDA_OUTSIDE = int(0.9 * 2**30)
"""Bytes of a GPU that are taken outside of PyTorch's allocator, by the CUDA context, loaded kernels and libraries:
measured on H100s, 0.83 to 0.94 of compiled steps, 1.1 of 14B."""

ALLOCATOR_HOLES = 0.016
"""Of the tensors' peak, what PyTorch's allocator reserves beside it and cannot use, in holes between the tensors of
recorded steps: measured on an H100, 0.5% to 1.6% (with `expandable_segments`, `core/process.py`)."""

SHARED_MEMORY, LEAST_SHARED_MEMORY = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}, 101376
"""Of a CTA by compute capability, in bytes, and of those not listed (8.6, 8.9, 12.0)."""

MEASURE_SECONDS, ROUNDS = 0.3, 3
"""A CPU's arithmetics are measured in turns, ROUNDS times each, so that a short disturbance cannot hit all."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""


CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1


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


def compute_capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability (major, minor); (0, 0) of any other device, where kernels are only interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_ptx(device: torch.device) -> bool:
    """Whether kernels may use inline PTX; Triton's interpreter may not."""
    return compute_capability(device) >= PTX_CAPABILITY


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts to FP8 in one instruction and multiplies it on tensor cores."""
    return compute_capability(device) >= FP8_CAPABILITY


def has_int4(device: torch.device) -> bool:
    """Whether the device has INT4 tensor cores: Ampere and Ada. Later ones run their instruction on INT8 cores."""
    return PTX_CAPABILITY <= compute_capability(device) < WGMMA_CAPABILITY


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it still runs, and wait for it."""
    return compute_capability(device) >= DEPENDENT_LAUNCH_CAPABILITY


def shared_memory(device: torch.device) -> int:
    """Bytes that a CTA can have."""
    return SHARED_MEMORY.get(compute_capability(device), LEAST_SHARED_MEMORY)


def has_mx(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply MX operands: FP8 with a scale per 32 elements."""
    return compute_capability(device) >= MX_CAPABILITY


def has_wgmma(device: torch.device) -> bool:
    """Whether a warpgroup multiplies operands in shared memory, asynchronously: Hopper alone."""
    return compute_capability(device) == WGMMA_CAPABILITY


@functools.cache  # asked at each launch of a persistent kernel
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 elsewhere, so that an interpreted persistent kernel loops over tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def lacks_fp8(device: torch.device) -> str | None:
    """Why FP8 codes cannot be produced or multiplied on this device; None where they can."""
    if device.type == "cuda" and not has_fp8(device):
        return f"{torch.cuda.get_device_name(device)} has no FP8 arithmetic, which needs Ada, Hopper or later"
    return None


def describe_hardware(device: torch.device) -> Hardware:
    """The hardware behind `device`; the rates of one that is not in DATASHEET are measured in under a second."""
    if device.type != "cuda":
        name = f"CPU, {torch.get_num_threads()} threads"
        return Hardware(name, _measured_peaks(device), host_memory(), measured=True)
    properties = torch.cuda.get_device_properties(device)
    known = DATASHEET.get(product_of(properties.name))
    peaks = _measured_peaks(device) if known is None else known.peaks
    link = None if known is None else HOST_LINK_REACHED * known.host_link * 1e9
    return Hardware(properties.name, peaks, properties.total_memory, known is None, link, True)


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
    """`hardware` with the bandwidth to host memory that this machine's GPU has: the slower way of pinned copies. In a
    tenth of a second."""
    on_host = torch.empty(128 * 2**20, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(on_host, device=device)

    def seconds(to: torch.Tensor, source: torch.Tensor) -> float:
        _wait(device)
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        _wait(device)
        return time.perf_counter() - start

    ways = ((on_gpu, on_host), (on_host, on_gpu))
    slower = max(min(seconds(*way) for _ in range(3)) for way in ways)
    return replace(hardware, host_bandwidth=len(on_host) / slower)


def planned_gpus() -> dict[str, str]:
    """The GPUs that a run can be planned for without having one: name on the command line -> product."""
    return {planned_name(product): product for product in DATASHEET}


def planned_name(product: str) -> str:
    """The name of a product on the command line: '4090' of 'RTX 4090'."""
    return product.lower().removeprefix("rtx ").replace(" ", "-")


def datasheet_hardware(name: str, flag: str = "--gpu") -> Hardware:
    """A GPU by its name in `planned_gpus`, from its datasheet alone. UserError naming `flag` for another name."""
    product = planned_gpus().get(name.lower())
    if product is None:
        raise unknown_name(flag, "GPU", name, planned_gpus())
    found = DATASHEET[product]
    link = HOST_LINK_REACHED * found.host_link * 1e9
    return Hardware(product, found.peaks, int(found.memory_gib * 2**30), False, link, True)


def limit_allocator(device: torch.device, limit: int) -> None:
    """Have PyTorch's allocator refuse what would take more than `limit` bytes of the GPU, with what is outside."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((limit - CUDA_OUTSIDE) / total, device)


def allocatable_memory(device: torch.device) -> int:
    """Bytes that PyTorch's allocator can still give out on a GPU: free ones, within its limit, and those that it keeps
    cached. The pools of CUDA graphs do not count."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total) - torch.cuda.memory_reserved(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    own = [s for s in torch.cuda.memory_snapshot() if s["device"] == index and tuple(s["segment_pool_id"]) == (0, 0)]
    return max(0, min(free, limit)) + sum(s["total_size"] - s["allocated_size"] for s in own)


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated tensors on a GPU, resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def host_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if that is lower. None where the
    system does not tell."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path(limit).read_text()))
    return min(found, default=None)


def product_of(name: str) -> str:
    """The product in a device's name as torch gives it: 'H100' of 'NVIDIA H100 80GB HBM3'."""
    words = name.replace("-PCIE-", " PCIe ").removeprefix("NVIDIA ").removeprefix("GeForce ").replace("-", " ").split()
    # The size and kind of the memory come before PCIe in some names and after it in others.
    variants = r"SXM\d|HBM\d\w?|\d+GB|Blackwell|Workstation|Server|Edition"
    return " ".join(word for word in words if not re.fullmatch(variants, word))


def _measured_peaks(device: torch.device) -> dict[str, float]:
    """TFLOP/s by arithmetic, of square products of random data."""
    if device.type != "cuda":
        return _cpu_peaks(torch.get_num_threads())
    # The fastest of four: the first call of each also selects and loads its kernel.
    rates = {name: max(product_rate(*product) for _ in range(4)) for name, product in _products(8192, device).items()}
    if has_fp8(device):
        a, one = torch.randn(8192, 8192, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
        multiply = functools.partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        rates["fp8"] = max(product_rate(multiply, a) for _ in range(4))
    if has_mx(device):
        # The datasheets have one rate for both.
        rates["mxfp8"] = rates["fp8"]
    return rates


@functools.cache
def _cpu_peaks(threads: int) -> dict[str, float]:
    """`threads` times the peak of one thread, which other processes hardly disturb. Threads that share a product wait
    for the slowest of them: on a busy machine twenty times as long as the product takes."""
    if threads == 1:
        return _one_thread_peaks()
    with ThreadPoolExecutor(1) as pool:  # OpenMP's number of threads belongs to the calling thread
        rates = pool.submit(_one_thread_peaks).result()
    return {name: threads * rate for name, rate in rates.items()}


def _one_thread_peaks() -> dict[str, float]:
    """The best of many small products, in rounds over MEASURE_SECONDS."""
    with one_thread():
        products, rates = _products(512, torch.device("cpu")), {}
        for _ in range(ROUNDS):
            for name, product in products.items():
                end = time.perf_counter() + MEASURE_SECONDS / ROUNDS / len(products)
                while True:
                    rates[name] = max(rates.get(name, 0.0), product_rate(*product))
                    if time.perf_counter() >= end:
                        break
        rates["int8"] = max(rates["int8"], rates["fp32"])  # `int8_mm` multiplies in fp32 where that is faster
        return rates


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations on the CPU inside run in the calling thread alone. Where others use the cores, or there are fewer than
    OpenMP has threads, small ones that are split take 4 to 40 times as long."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def _products(size: int, device: torch.device) -> dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """By arithmetic, a product and its operand: a random matrix [size, size], multiplied by its transpose."""
    found = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}.items():
        a = torch.randn(size, size, device=device).mul_(30).clamp_(-127, 127).to(dtype)
        found[name] = (torch._int_mm if dtype is torch.int8 else torch.mm, a)
    return found


def product_rate(multiply: Callable[..., torch.Tensor], a: torch.Tensor) -> float:
    """TFLOP/s of one call: a, square, times its transpose."""
    _wait(a.device)
    start = time.perf_counter()
    multiply(a, a.t())
    _wait(a.device)
    return 2 * len(a) ** 3 / (time.perf_counter() - start) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next allocation. By default large tensors go back to the system, and a
    training step on a CPU spends a sixth of its time on page faults. Other C libraries are left as they are."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)

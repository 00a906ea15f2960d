"""Memory of the device and of the host: limits, what is free, what was taken, and what the allocators keep."""

import contextlib
import ctypes
import os
import re
from collections import Counter
from pathlib import Path

import torch

from qtrain.core.process import peak_resident_bytes

CUDA_OUTSIDE = int(0.9 * 2**30)
"""Bytes of a GPU that are taken outside of PyTorch's allocator, by the CUDA context, loaded kernels and libraries:
measured on H100s, 0.83 to 0.94 of compiled steps, 1.1 of 14B."""

ALLOCATOR_HOLES = 0.016
"""Of the tensors' peak, what PyTorch's allocator reserves beside it and cannot use, in holes between the tensors of
recorded steps: measured on an H100, 0.5% to 1.6% (with `expandable_segments`, `core/process.py`)."""

CGROUPS = {
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Where a cgroup of version 2, and of version 1, tells its limit and what is used."""
MEMINFO = Path("/proc/meminfo")
LEFT_FREE = 0.2
"""Of the host's memory, what is not pinned: it is for the data, checkpoints and the system."""


def limit_allocator(device: torch.device, limit: int) -> None:
    """Have PyTorch's allocator refuse what would take more than `limit` bytes of the GPU, with what is outside."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((limit - CUDA_OUTSIDE) / total, device)


def allocatable_memory(device: torch.device) -> int:
    """Bytes that PyTorch's allocator can still give out on a GPU: free ones, within its limit, and those that it keeps
    cached. The pools of CUDA graphs do not count."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total) - torch.cuda.memory_reserved(device)
    index = _index(device)
    own = [s for s in torch.cuda.memory_snapshot() if s["device"] == index and tuple(s["segment_pool_id"]) == (0, 0)]
    return max(0, min(free, limit)) + sum(s["total_size"] - s["allocated_size"] for s in own)


_tensors_outside = Counter()
"""Bytes of tensors by GPU that PyTorch's allocator does not know of."""


def count_outside(device: torch.device, size: int) -> None:
    """Count a tensor of `size` bytes that takes memory of a GPU outside of PyTorch's allocator, whose limit is lower by
    as much from now on; negative: it is free again."""
    index = _index(device)
    _tensors_outside[index] += size
    total = torch.cuda.get_device_properties(index).total_memory
    fraction = torch.cuda.get_per_process_memory_fraction(index) - size / total
    torch.cuda.set_per_process_memory_fraction(min(max(fraction, 0.0), 1.0), index)  # rounded, it may be above 1


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: of tensors on a GPU, resident memory on a CPU."""
    if device.type != "cuda":
        return peak_resident_bytes()
    return torch.cuda.max_memory_allocated(device) + _tensors_outside[_index(device)]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def host_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if that is lower. None where the
    system does not tell."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for folder, (limit, _) in CGROUPS.items():
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int((folder / limit).read_text()))
    return min(found, default=None)


def available_memory() -> int | None:
    """Bytes of the host's memory that can still be allocated: what other processes use is not among them, what the
    system would drop from its caches is. None where the system does not tell."""
    found = []
    with contextlib.suppress(OSError):
        found += [1024 * n for n in _numbers(r"MemAvailable: +(\d+) kB", MEMINFO)]
    for folder, names in CGROUPS.items():
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((folder / name).read_text()) for name in names)
            cached = _numbers(r"(?:total_)?inactive_file (\d+)", folder / "memory.stat")
            found.append(limit - used + max(cached, default=0))  # the total, where there is one, is the larger
    return min(found, default=None)


def _numbers(pattern: str, file: Path) -> list[int]:
    """Those of the file's lines that match."""
    return [int(number) for number in re.findall(f"^{pattern}$", file.read_text(), re.MULTILINE)]


def pinnable_memory() -> int | None:
    """Bytes of the host's memory that runs may pin, so that `LEFT_FREE` of it stays free. None: not known."""
    total, available = host_memory(), available_memory()
    return None if total is None or available is None else max(0, round(available - LEFT_FREE * total))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next allocation. By default large tensors go back to the system, and a
    training step on a CPU spends a sixth of its time on page faults. Other C libraries are left as they are."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)

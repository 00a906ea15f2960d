"""Host memory that a GPU copies to and from: page-locked, and exactly as large as was asked for.

PyTorch's allocator of page-locked memory rounds every block up to a power of two, which takes up to twice as much.
"""

import contextlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtrain.core.errors import TrainingStopped
from qtrain.core.hardware.memory import available_memory

PORTABLE = 1
"""cudaHostRegisterPortable."""
PIECE_BYTES = 64 * 2**20
"""In which new host memory is touched, and a gradient crosses the link to be added to its sum: of the buffer on the
device."""
FAULT_THREADS = 8
"""Threads that touch new host memory. One takes 1 to 3 s a GiB, and PyTorch has only one where a launcher of ranks sets
OMP_NUM_THREADS=1."""


def _runtime() -> Any:
    return torch.cuda.cudart()  # None of a build without CUDA, which locks no pages


class _Locked:
    """Page-locked memory, an anonymous mapping of its own; numpy's array interface gives it to tensors, which keep it.

    Pages of its own: a page cannot be locked twice, and two blocks of malloc may share one."""

    def __init__(self, size: int):
        self._memory = mmap.mmap(-1, size)  # shared: a child that is forked has no copy of locked pages
        array = np.frombuffer(self._memory, np.uint8)
        self.__array_interface__ = array.__array_interface__
        self._address = array.ctypes.data
        self._cudart = _runtime()
        fault_pages(torch.from_numpy(array))  # locking alone would fault page after page
        self.locked = not int(self._cudart.cudaHostRegister(self._address, size, PORTABLE))

    def __del__(self) -> None:
        if getattr(self, "locked", False):
            with contextlib.suppress(Exception):  # at the interpreter's end CUDA may be gone already
                self._cudart.cudaHostUnregister(self._address)


def fault_pages(memory: Tensor) -> None:
    """Touch all of uint8 `memory`, so that the system maps its pages; they are zero."""
    with ThreadPoolExecutor(FAULT_THREADS) as threads:
        list(threads.map(Tensor.zero_, memory.split(PIECE_BYTES)))


def locked_memory(size: int) -> Tensor | None:
    """Page-locked memory of `size` bytes, uint8; None where the system has not as much or refuses to lock it. It is
    unlocked with its last tensor."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    # What is locked cannot be swapped: the kernel would kill a process of its choice.
    available = available_memory()
    if available is not None and size > available:
        return None
    memory = _Locked(size)
    return torch.from_numpy(np.asarray(memory)) if memory.locked else None


def host_memory_for(device: torch.device, size: int) -> Tensor:
    """Host memory of `size` bytes that `device` copies to and from, uint8: page-locked for a GPU. TrainingStopped where
    the system refuses."""
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    if (memory := locked_memory(size)) is None:
        available = available_memory()
        free = "" if available is None else f", of {available / 2**30:.2f} that are free"
        raise TrainingStopped(
            f"--offload: the system refuses to lock {size / 2**30:.2f} GiB more of the host's memory for the GPU{free}"
            "; name less in --offload, end what else uses the memory, or raise the limit (ulimit -l)."
        )
    return memory


def host_tensor_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous host tensor of the shape and dtype of `tensor`, not initialized; `device` copies to and from it."""
    memory = host_memory_for(device, tensor.numel() * tensor.element_size())
    return memory.view(tensor.dtype).view(tensor.shape)

"""A copy of a checkpoint's tensors in host memory, which a thread can write while training changes the originals.

One buffer holds all of them and is used again for the next copy. For tensors on a GPU it is page-locked, so that the
copy runs at the rate of the bus. It has the exact size: torch's allocator of page-locked memory, which DCP's stagers
use, rounds every tensor up to a power of two.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtrain.parallel.split_tensor import SplitTensor

ALIGNMENT = 256
"""Bytes: where each tensor begins in the buffer."""
PORTABLE = 1
"""cudaHostRegisterPortable."""


class HostCopy:
    """Copies tensors into a buffer that lasts; a new copy replaces the former one."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the host; of a DTensor or a SplitTensor this rank's part, as such a tensor. Returns when
        they are copied."""
        parts = {name: _parts(t) for name, t in tensors.items()}
        every = [part for of_tensor in parts.values() for part in of_tensor]
        sizes = [-(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT for t in every]
        self._reserve(sum(sizes), lock=any(t.is_cuda for t in every))
        copies, offset = [], 0
        for tensor, size in zip(every, sizes, strict=True):
            memory = self._buffer[offset : offset + tensor.numel() * tensor.element_size()]
            copies.append(memory.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor, non_blocking=True)
            offset += size
        if self._locked:
            torch.cuda.synchronize()
        remaining = iter(copies)
        return {name: _like(tensors[name], [next(remaining) for _ in of]) for name, of in parts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._buffer.numel()

    def _reserve(self, size: int, lock: bool) -> None:
        if size <= self.nbytes:
            return
        self.close()
        self._buffer = torch.empty(size, dtype=torch.uint8)
        # Where the system refuses to lock as much, copies are slower, no more.
        self._locked = lock and not int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, PORTABLE))

    def close(self) -> None:
        """Free the buffer."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._buffer, self._locked = torch.empty(0, dtype=torch.uint8), False


def _parts(tensor: Tensor) -> list[Tensor]:
    """The memory of a tensor on this rank."""
    if isinstance(tensor, SplitTensor):
        return [piece for _, piece in tensor.pieces]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _like(original: Tensor, copies: list[Tensor]) -> Tensor:
    """The copies of `_parts` as the kind of tensor that `original` is."""
    if isinstance(original, SplitTensor):
        offsets = [offset for offset, _ in original.pieces]
        like = torch.empty(0, dtype=original.dtype)
        return SplitTensor(original.shape, like, list(zip(offsets, copies, strict=True)))
    # DTensor.from_local would move it to the mesh's devices.
    return DTensor(copies[0], original._spec, requires_grad=False) if isinstance(original, DTensor) else copies[0]

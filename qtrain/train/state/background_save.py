"""Checkpoints written while training goes on: a copy of the state in host memory, and a thread that writes it.

The thread does what a save without it does (`Checkpoints.save`): DCP's files, fsync, the rename once all ranks have
written, the removal of older ones. DCP's own `async_save` covers only the first of these. The thread's collectives have
a process group of their own, so that they cannot interleave with those of the steps.

One buffer holds the copy of all tensors and is used again for the next one. For tensors on a GPU it is page-locked, so
that the copy runs at the rate of the bus. It has the exact size (`core/hardware/host_memory.py`), unlike what DCP's
stagers allocate.
"""

import copy
import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtrain.comm.ranks import host_group
from qtrain.core.hardware.host_memory import locked_memory
from qtrain.parallel.sharding.split_tensor import SplitTensor
from qtrain.train.state.checkpoint import Checkpoints, flatten

# ---- the copy -------------------------------------------------------------------------------------------------------

ALIGNMENT = 256
"""Bytes: where each tensor begins in the buffer."""


class HostCopy:
    """Copies tensors into a buffer that lasts; a new copy replaces the previous one."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the host; of a DTensor or a SplitTensor this rank's part, as such a tensor. Returns when
        they are copied."""
        parts = {name: _parts(t) for name, t in tensors.items()}
        every = [part for tensor_parts in parts.values() for part in tensor_parts]
        sizes = [-(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT for t in every]
        self._reserve(sum(sizes), lock=any(t.is_cuda for t in every))
        copies, offset = [], 0
        for tensor, size in zip(every, sizes, strict=True):
            memory = self._buffer[offset : offset + tensor.numel() * tensor.element_size()]
            copies.append(memory.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor, non_blocking=True)
            offset += size
        # Copies from the GPU are asynchronous where the buffer is page-locked.
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
        self._buffer, self._locked = torch.empty(0, dtype=torch.uint8), False  # the old one is freed first
        memory = locked_memory(size) if lock else None
        # Where the system refuses to lock as much, copies are slower, no more.
        self._buffer = torch.empty(size, dtype=torch.uint8) if memory is None else memory
        self._locked = memory is not None


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


# ---- the thread -----------------------------------------------------------------------------------------------------

NOTICEABLE = 0.05
"""Seconds."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written in the background."""

    step: int
    path: Path
    nbytes: int
    """Bytes of host memory that the copy takes."""
    copy_s: float
    """Seconds for which training waited for the copy."""
    write_s: float
    """Seconds that the thread took to write it."""
    waited_s: float = 0.0
    """Seconds for which training waited later, for the writing to end."""

    def describe(self, now: int) -> str:
        """A line for the log of step `now`."""
        how = f"{self.nbytes / 2**30:,.2f} GiB of host memory, copied in {self.copy_s:,.2f} s, written in "
        how += f"{self.write_s:,.1f} s"
        if self.waited_s >= NOTICEABLE:
            how += f", for which step {now} waited {self.waited_s:,.1f} s"
        return f"step {self.step}: checkpoint {self.path} ({how})"


class BackgroundSave:
    """At most one checkpoint that is being written. With a process group, all ranks call every method."""

    def __init__(self) -> None:
        self._host = HostCopy()
        self._thread: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[Written] | None = None

    def begin(self, to: Checkpoints, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Copy the state, which may change on return, and start to write it. The previous save must be finished."""
        assert self._writing is None
        if self._thread is None:
            # Made at the first save: a run without --async_checkpoint has neither thread nor process group.
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            self._group = host_group()
        start = time.perf_counter()
        # Complete on return: the next step overwrites the originals in place.
        copied, meta = self._host.of(flatten(tensors)), copy.deepcopy(meta)
        copy_s = time.perf_counter() - start
        checkpoints = Checkpoints(to.folder, to.keep, self._group, to.best)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def write() -> Written:
            if device is not None:  # a thread begins on GPU 0, where DCP would make a context for every rank
                torch.cuda.set_device(device)
            start = time.perf_counter()
            path = checkpoints.save(step, copied, meta)
            return Written(step, path, self._host.nbytes, copy_s, time.perf_counter() - start)

        self._writing = self._thread.submit(write)

    @property
    def under_way(self) -> bool:
        """Whether there is a save to `finish`."""
        return self._writing is not None

    @property
    def ended(self) -> bool:
        """Whether `finish` would return, or raise, at once. Ranks may see it at different steps."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> Written:
        """Wait for the save. Raises TrainingStopped if it failed."""
        assert self._writing is not None
        writing, self._writing = self._writing, None
        start = time.perf_counter()
        return dataclasses.replace(writing.result(), waited_s=time.perf_counter() - start)

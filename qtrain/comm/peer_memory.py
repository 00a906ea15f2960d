"""Memory of each rank that the other ranks of its machine read by copies between GPUs: no kernel, and no message.

The kernels of a collective hold SMs from when the first rank comes until the last one has what it wants. A persistent
GEMM beside them, which wants all SMs, waits for theirs (pytorch/pytorch#143988). Copies are made by the copy engines,
and a reader waits for nobody: who writes says when (`publish`). PyTorch's symmetric memory maps the GPUs' memory.
"""

import socket
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.core.errors import first_line
from qtrain.core.hardware.memory import count_outside


class PeerMemory:
    """`size` bytes of every rank of a group, all of whose GPUs map each other's memory."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._group = group
        own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(own, group)
        me, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self._ranks = [own if r == me else self._handle.get_buffer(r, (size,), torch.uint8) for r in ranks]
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        count_outside(device, size)
        # pyrefly: ignore[missing-attribute]  # typeshed's finalize has empty slots
        weakref.finalize(own, count_outside, device, -size).atexit = False

    def rank_views(self, start: int, stop: int) -> list[Tensor]:
        """The bytes [start, stop) of every rank."""
        return [memory[start:stop] for memory in self._ranks]

    def publish(self) -> None:
        """Every rank calls it after it has written: what is queued after it, on any rank, reads what was written before
        it. That no rank still reads what another one is about to write is the callers' to know."""
        dist.all_reduce(self._flag, group=self._group)


def peer_memory(size: int, group: dist.ProcessGroup | None, device: torch.device) -> PeerMemory | None:
    """None where the GPUs of the group do not map each other's memory. Every rank of the group calls it."""
    if device.type != "cuda" or group is None or not size or "nccl" not in dist.get_backend(group):
        return None
    places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    own = torch.cuda.current_device()
    dist.all_gather_object(places, (socket.gethostname(), own), group=group)
    others = [index for _, index in places if index != own]
    one_machine = len({host for host, _ in places}) == 1 and len({index for _, index in places}) == len(places)
    if not one_machine or not all(torch.cuda.can_device_access_peer(own, index) for index in others):
        return None
    made, why = None, ""
    try:
        made = PeerMemory(size, group, device)
    except RuntimeError as error:  # such as a container that does not let processes exchange file descriptors
        why = first_line(error)
    failures: list[str] = [""] * len(places)
    dist.all_gather_object(failures, why, group=group)
    if any(failures):
        warnings.warn(f"GPUs do not map each other's memory ({max(failures)}): NCCL gathers codes", stacklevel=2)
        return None
    return made

"""Memory of each rank that the other ranks of its machine read and write by copies between GPUs, without collectives.

The kernels of a collective hold SMs from when the first rank comes until the last one has what it wants. A persistent
GEMM beside them, which wants all SMs, waits for theirs (pytorch/pytorch#143988), comes late to the next collective, and
the other rank's GEMM waits there. Copies are made by the copy engines, and a stream waits for a signal without a kernel
(`stream_values.py`). PyTorch's symmetric memory maps the GPUs' memory.
"""

import socket
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.comm.wire import sent
from qtrain.core.errors import first_line
from qtrain.core.hardware.memory import count_outside
from qtrain.core.hardware.stream_values import wait_for_value, write_value

INBOX_BYTES = 1 << 28
"""Of what a rank receives from all others, this much is exchanged at a time."""
ALIGNMENT = 16
"""Bytes: what the parts of an inbox start at multiples of."""


class PeerMemory:
    """`size` bytes of every rank of a group, all of whose GPUs map each other's memory; zeros at first."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(own, group)
        me, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self._ranks = [own if r == me else self._handle.get_buffer(r, (size,), torch.uint8) for r in ranks]
        own.zero_()
        for memory in self._ranks:
            write_value(memory.data_ptr(), 0)  # raises where the driver cannot
        wait_for_value(own.data_ptr(), 0)
        torch.cuda.synchronize(device)  # before another rank writes
        count_outside(device, size)
        # pyrefly: ignore[missing-attribute]  # typeshed's finalize has empty slots
        weakref.finalize(own, count_outside, device, -size).atexit = False

    def rank_views(self, start: int, stop: int) -> list[Tensor]:
        """The bytes [start, stop) of every rank."""
        return [memory[start:stop] for memory in self._ranks]

    def meet(self) -> None:
        """Every rank calls it. What is queued after it, on any rank, runs after what was queued before it on all. One
        CTA waits: not for a stream beside GEMMs."""
        self._handle.barrier()

    def signal(self, rank: int, place: int) -> None:
        """Set the signal, 4 bytes at `place` of a rank's memory, when what is queued on the current stream has run."""
        write_value(self._ranks[rank].data_ptr() + place, 1)

    def await_signal(self, rank: int, place: int) -> None:
        """Let the current stream wait for the signal at `place` of this rank's own memory, and clear it."""
        address = self._ranks[rank].data_ptr() + place
        wait_for_value(address, 1)
        write_value(address, 0)


class Received(NamedTuple):
    """What all ranks have sent to this one of a message."""

    message: int
    """Its number."""
    start: int
    """The first element."""
    terms: list[Tensor]
    """Of each rank, from that element on."""


class PeerExchange:
    """An all-to-all: every rank copies what is for another one into that one's memory, its inbox, of which each other
    rank has a slot, with two signals each: what is here may be overwritten, and what is here is complete.

    A rank sets a signal again only after the one that waits for it has cleared it: each answers the other."""

    def __init__(self, memory: PeerMemory, slot: int, rank: int, ranks: int):
        """slot: bytes, a multiple of ALIGNMENT; memory: of `PeerExchange.size(slot, ranks)` bytes."""
        self._memory, self._slot, self._me = memory, slot, rank
        self._others = [*range(rank + 1, ranks), *range(rank)]  # no two write to the same one at a time
        self._inboxes = memory.rank_views(0, slot * (ranks - 1))
        self._empty, self._full = slot * (ranks - 1), slot * (ranks - 1) + 4 * ranks
        """Where the signals are: that of rank r is the r-th. A rank's own say of other inboxes that they are empty."""
        memory.rank_views(self._empty, self._full)[rank].view(torch.int32).fill_(1)

    @staticmethod
    def size(slot: int, ranks: int) -> int:
        """Bytes of memory that an exchange needs."""
        return slot * (ranks - 1) + 8 * ranks

    def exchange(self, messages: Sequence[Tensor], sizes: Sequence[Sequence[int]], kind: str) -> Iterator[Received]:
        """messages: flat, with sizes[m][r] elements for rank r one after the other in the m-th, as on every rank; kind:
        under which bytes are counted. What is yielded is in memory that is read before the next one is asked for."""
        me = self._me
        parts = [
            m.view(torch.uint8).split([size * m.itemsize for size in of]) for m, of in zip(messages, sizes, strict=True)
        ]
        for pieces in _rounds([max(map(len, part)) for part in parts], self._slot):
            for rank in self._others:
                self._memory.await_signal(me, self._empty + 4 * rank)
                for piece in pieces:
                    self._inbox(rank, me, piece, parts).copy_(parts[piece.message][rank][piece.start : piece.stop])
                self._memory.signal(rank, self._full + 4 * me)
            for rank in self._others:
                self._memory.await_signal(me, self._full + 4 * rank)
            for piece in pieces:
                own = parts[piece.message][me][piece.start : piece.stop]  # stays where it is
                dtype = messages[piece.message].dtype
                terms = [own if r == me else self._inbox(me, r, piece, parts) for r in range(len(self._inboxes))]
                yield Received(piece.message, piece.start // dtype.itemsize, [term.view(dtype) for term in terms])
            for rank in self._others:
                self._memory.signal(rank, self._empty + 4 * me)
        sent[kind] += sum((sum(of) - of[me]) * m.itemsize for m, of in zip(messages, sizes, strict=True))

    def _inbox(self, rank: int, sender: int, piece: "_Piece", parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Where a rank receives a piece from another one, which may be longer than what there is for it."""
        begin = (sender - (sender > rank)) * self._slot + piece.offset
        length = len(parts[piece.message][rank][piece.start : piece.stop])
        return self._inboxes[rank][begin : begin + length]


class _Piece(NamedTuple):
    """Bytes [start, stop) of what is for a rank in a message, at this offset of a slot."""

    message: int
    start: int
    stop: int
    offset: int


def _rounds(lengths: Sequence[int], slot: int) -> Iterator[list[_Piece]]:
    """The pieces of messages of these bytes, as many at a time as fit in a slot."""
    pieces, used = [], 0
    for message, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + slot - used)
            pieces.append(_Piece(message, start, stop, used))
            used += _aligned(stop - start)
            start = stop
            if used == slot:
                yield pieces
                pieces, used = [], 0
    if pieces:
        yield pieces


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def exchange_size(lengths: Sequence[int]) -> int:
    """Bytes of a slot in which messages of these bytes have room at once."""
    return sum(map(_aligned, lengths))


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
        warnings.warn(
            f"GPUs do not map each other's memory ({max(failures)}): NCCL moves what they share", stacklevel=2
        )
        return None
    return made


def peer_exchange(size: int, group: dist.ProcessGroup, device: torch.device) -> PeerExchange | None:
    """Of up to `size` bytes from one rank to another at a time; None where the GPUs of the group do not map each
    other's memory. Every rank of the group calls it."""
    ranks = dist.get_world_size(group)
    slot = _aligned(min(size, INBOX_BYTES // (ranks - 1)))
    memory = peer_memory(PeerExchange.size(slot, ranks), group, device)
    return None if memory is None else PeerExchange(memory, slot, dist.get_rank(group), ranks)

"""Reduce-scatter of gradients: an all-to-all in the gradients' dtype, then a sum in fp32 in the order of the ranks.

A ring adds in bf16 and in an order that depends on the ring. Here every micro-batch's gradient is rounded once, the sum
once more, and the order of additions is that of the micro-batches: rank r's a-th micro-batch is number
a * ranks + r of the step. Added after every micro-batch (`every_micro_batch`), the sum is the same for any number of
ranks, bit for bit. That costs an all-to-all per micro-batch and an fp32 copy of the shard, in whose memory the sum is
rounded at the end; without it ranks add their own micro-batches in the gradients' dtype, as one GPU does, and meet once
per step.

The sums may be in host memory (`on_host`): each comes to the device in pieces, through one small buffer, to be added to
and returns; at the end of a step the masters get it rounded, on the device. The same sums, bit for bit.

Parameters may come in groups, which are added one by one: of full sharding each block is a group, whose gradients are
sent and freed as soon as its backward pass is over.

With replicas every rank sums a part of its shard, and the replicas gather the sums. A `GradientWire` sends less.

What is sent after every micro-batch is sent beside the backward pass, whose GEMMs want all SMs: where GPUs map each
other's memory, ranks copy gradients there (`peer_memory.py`), those of a group at once.

Over several machines (`Machines`) there are two all-to-alls: the ranks of a machine first add what they have for all
ranks with the same number as one of them, and these then exchange the sums, rounded once more, with their counterparts.
Of g bytes a rank sends g / (ranks of a machine) to other machines instead of nearly all. The order of additions is then
that of the machines, so --deterministic does without.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.comm.peer_memory import PeerExchange, exchange_size, peer_exchange
from qtrain.core.hardware.host_memory import PIECE_BYTES, host_memory_for
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.elementwise import add_in_order, sum_in_order
from qtrain.parallel.sharding.gradient_buckets import GradientBucket, split_into_buckets
from qtrain.parallel.sharding.gradient_wire import GradientWire
from qtrain.parallel.sharding.shards import Sharded, by_mesh


class GradientReduction:
    """Moves the gradients of groups of parameters to their masters. All ranks make the same calls in the same order.

    by_machine: add inside machines first, if there are several; on_host: sums of micro-batches are in host memory, from
    which this device adds to them."""

    def __init__(
        self,
        groups: Sequence[Sequence[Sharded]],
        *,
        every_micro_batch: bool = False,
        by_machine: bool = True,
        wire: GradientWire | None = None,
        seed: int = 0,
        on_host: torch.device | None = None,
    ):
        # Else a step adds once, and the masters' own gradients hold the sum.
        self._keeps_sums = every_micro_batch
        self._groups = [
            [
                GradientBucket(members, mesh, wire, by_machine=by_machine)
                for mesh, on_mesh in by_mesh(group, lambda sharded: sharded)
                for members in split_into_buckets(on_mesh)
            ]
            for group in groups
        ]
        self._buckets = [bucket for group in self._groups for bucket in group]
        self._sent = [list(group) for group in self._groups]
        self._copied: list[list[tuple[PeerExchange, list[GradientBucket]]]] = [[] for _ in groups]
        """Of each group, what is copied instead, and by what."""
        if every_micro_batch and wire is None:
            self._copy_where_possible()
        self._seed, self._messages = seed, max((bucket.messages for bucket in self._buckets), default=1)
        self._device = on_host
        self._piece: Tensor | MaybeNone = None
        if on_host is not None:
            self._piece = torch.empty(PIECE_BYTES // 4, dtype=torch.float32, device=on_host)

    def _copy_where_possible(self) -> None:
        possible = [bucket for bucket in self._buckets if bucket.is_one_message]
        for mesh, buckets in by_mesh(possible, lambda bucket: bucket.members[0]):
            of_groups = [[b for b in group if b in buckets] for group in self._groups]
            size = max(exchange_size([b.longest_message for b in members]) for members in of_groups)
            ranks = mesh.dp_group or dist.group.WORLD
            assert ranks is not None  # there are several
            peers = peer_exchange(size, ranks, buckets[0].members[0].receiver.device)
            if peers is None:
                continue
            for sent, copied, members in zip(self._sent, self._copied, of_groups, strict=True):
                sent[:] = [b for b in sent if b not in members]
                copied += [(peers, members)] if members else []

    @property
    def copies_all(self) -> bool:
        """Whether no collective is called, whose order among others would have to be the same on all ranks."""
        return not any(self._sent)

    def add_group(self, index: int, micro_step: int = 0, *, first: bool = True, recorded: bool = False) -> None:
        """Add the gradients of all ranks to the sums of a group, and free them. micro_step: the number of this rank's
        micro-batch in the run, which keys random bits; first: of a step; recorded: the gradients are in the memory of
        a CUDA graph, which nothing else can use, so that the sums of large parameters go there too."""
        for peers, buckets in self._copied[index]:
            messages = [bucket.message()[0] for bucket in buckets]
            for received in peers.exchange(messages, [bucket.sizes for bucket in buckets], "gradients"):
                self._add(buckets[received.message], received.start, received.terms, first)
        for bucket in self._sent[index]:
            # Every message of a step draws bits of its own: neighboring buckets are `messages` numbers apart.
            number = bucket.first_number + self._buckets.index(bucket) * self._messages
            memory = bucket.gradient_memory() if recorded and not self._keeps_sums else None
            received = bucket.exchange((self._seed, micro_step, number))
            if self._keeps_sums:
                self._add(bucket, 0, received, first)
            else:
                # Rank 0's term first: the order of a process alone.
                bucket.give(sum_in_order(received, None if memory is None else memory[: bucket.own]), memory)

    def _add(self, bucket: GradientBucket, start: int, terms: Tensor | Sequence[Tensor], first: bool) -> None:
        """terms: [n] each, of this rank's elements from number `start` on, for their sums."""
        if bucket.sums is None:
            if self._device is None:
                bucket.sums = torch.empty(bucket.own, dtype=torch.float32, device=terms[0].device)
            else:
                bucket.sums = host_memory_for(self._device, 4 * bucket.own).view(torch.float32)
        sums = bucket.sums[start : start + len(terms[0])]
        # From zeros, not from the first term: of -0 and the zeros of other ranks the sum is 0, as on one rank.
        if self._device is None:
            add_in_order(sums, terms, new=first)
            return
        for place, some in self._pieces(sums):
            # One stream copies in, adds and copies out: the buffer's last piece has left when the next one arrives.
            piece = self._piece[: len(some)]
            if not first:
                piece.copy_(some, non_blocking=True)
            add_in_order(piece, [term[place : place + len(some)] for term in terms], new=first)
            some.copy_(piece, non_blocking=True)

    def _pieces(self, sums: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The first element of each piece of sums, and the piece."""
        length = len(self._piece)
        return ((start, sums[start : start + length]) for start in range(0, len(sums), length))

    def finish(self) -> None:
        """Give the masters the sums of a step as gradients, which are valid until the next one's first addition."""
        for bucket in self._buckets if self._keeps_sums else ():
            bucket.give(self._rounded(bucket))

    def _rounded(self, bucket: GradientBucket) -> Tensor:
        if self._device is None:
            return rounded_in_place(bucket.sums, bucket.dtype)
        out = torch.empty(len(bucket.sums), dtype=bucket.dtype, device=self._device)
        for start, sums in self._pieces(bucket.sums):
            out[start : start + len(sums)] = self._piece[: len(sums)].copy_(sums, non_blocking=True)
        return out


ROUNDED_AT_ONCE = 2**22
"""Elements of a sum whose rounded values are allocated."""


def rounded_in_place(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """sums fp32 [n] rounded to a 16-bit dtype, in the first half of their memory; sums themselves if dtype is fp32."""
    if dtype == sums.dtype:
        return sums
    out, start = sums.view(dtype)[: len(sums)], min(ROUNDED_AT_ONCE, len(sums))
    # Through a temporary: in place they would overwrite sums that are not rounded yet.
    out[:start] = sums[:start].to(dtype)
    while start < len(sums):
        # Twice as many elements as before are written to [2 * start, 4 * start) bytes: values that were read before.
        stop = min(2 * start, len(sums))
        out[start:stop].copy_(sums[start:stop])
        start = stop
    return out

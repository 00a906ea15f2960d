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

Over several machines (`Machines`) there are two all-to-alls: the ranks of a machine first add what they have for all
ranks with the same number as one of them, and these then exchange the sums, rounded once more, with their counterparts.
Of g bytes a rank sends g / (ranks of a machine) to other machines instead of nearly all. The order of additions is then
that of the machines, so --deterministic does without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.comm.rank_group import RANK_RNG_OFFSET
from qtrain.comm.wire import ALONE_BYTES, exchange, gather, in_buckets
from qtrain.core.hardware.host_memory import PIECE_BYTES, host_memory_for
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.elementwise import add_in_order, sum_in_order
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.gradient_wire import FIRST_NUMBER, GradientWire
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
                _Bucket(members, mesh, wire, by_machine=by_machine)
                for mesh, on_mesh in by_mesh(group, lambda sharded: sharded)
                for members in _buckets(on_mesh)
            ]
            for group in groups
        ]
        self._buckets = [bucket for group in self._groups for bucket in group]
        self._seed, self._messages = seed, max((bucket.messages for bucket in self._buckets), default=1)
        self._device = on_host
        self._piece: Tensor | MaybeNone = None
        if on_host is not None:
            self._piece = torch.empty(PIECE_BYTES // 4, dtype=torch.float32, device=on_host)

    def add_group(self, index: int, micro_step: int = 0, *, first: bool = True, recorded: bool = False) -> None:
        """Add the gradients of all ranks to the sums of a group, and free them. micro_step: the number of this rank's
        micro-batch in the run, which keys random bits; first: of a step; recorded: the gradients are in the memory of
        a CUDA graph, which nothing else can use, so that the sums of large parameters go there too."""
        for bucket in self._groups[index]:
            # Every message of a step draws bits of its own: neighboring buckets are `messages` numbers apart.
            number = bucket.first_number + self._buckets.index(bucket) * self._messages
            memory = bucket.gradient_memory() if recorded and not self._keeps_sums else None
            received = bucket.exchange((self._seed, micro_step, number))
            if self._keeps_sums:
                self._add(bucket, received, first)
            else:
                # Rank 0's term first: the order of a process alone.
                bucket.give(sum_in_order(received, None if memory is None else memory[: bucket.own]), memory)

    def _add(self, bucket: "_Bucket", received: Tensor | list[Tensor], first: bool) -> None:
        """received: terms [n] of this rank's part alone, for its sum."""
        if bucket.sums is None:
            own = received[0]
            if self._device is None:
                bucket.sums = torch.empty_like(own, dtype=torch.float32)
            else:
                bucket.sums = host_memory_for(self._device, 4 * len(own)).view(torch.float32)
        if self._device is None:
            add_in_order(bucket.sums.zero_() if first else bucket.sums, received)
            return
        for start, sums in self._pieces(bucket):
            # One stream copies in, adds and copies out: the buffer's last piece has left when the next one arrives.
            piece = self._piece[: len(sums)]
            piece.zero_() if first else piece.copy_(sums, non_blocking=True)
            add_in_order(piece, [term[start : start + len(sums)] for term in received])
            sums.copy_(piece, non_blocking=True)

    def _pieces(self, bucket: "_Bucket") -> Iterator[tuple[int, Tensor]]:
        """The first element of each piece of a sum, and the piece."""
        length = len(self._piece)
        return ((start, bucket.sums[start : start + length]) for start in range(0, len(bucket.sums), length))

    def finish(self) -> None:
        """Give the masters the sums of a step as gradients, which are valid until the next one's first addition."""
        for bucket in self._buckets if self._keeps_sums else ():
            bucket.give(self._rounded(bucket))

    def _rounded(self, bucket: "_Bucket") -> Tensor:
        if self._device is None:
            return rounded_in_place(bucket.sums, bucket.dtype)
        out = torch.empty(len(bucket.sums), dtype=bucket.dtype, device=self._device)
        for start, sums in self._pieces(bucket):
            out[start : start + len(sums)] = self._piece[: len(sums)].copy_(sums, non_blocking=True)
        return out


@dataclass(frozen=True)
class _Stage:
    """One all-to-all. sizes: elements of this rank's message to each rank of the group; own: of each message to it;
    kind: under which its bytes are counted; first_number: of the messages among those of the bucket."""

    group: dist.ProcessGroup | None
    sizes: tuple[int, ...]
    own: int
    kind: str = "gradients"
    first_number: int = 0


class _Bucket:
    """Parameters whose gradients are sent in one message. Shard rank s gets the elements of them that it holds."""

    def __init__(
        self, members: list[Sharded], mesh: Mesh, wire: GradientWire | None = None, *, by_machine: bool = True
    ):
        self._members, self._mesh, self._wire = members, mesh, wire
        self.messages, self.first_number = mesh.dp_size, FIRST_NUMBER + mesh.tp_rank * RANK_RNG_OFFSET
        self.sums: Tensor | MaybeNone = None  # in the same memory in every step: recorded steps add to it
        self.dtype = members[0].parameter.dtype
        lengths = [sum(m.bounds[s + 1] - m.bounds[s] for m in members) for s in range(mesh.shard)]  # of each shard
        parts = [  # of every rank: its part of its shard
            (length * r // mesh.replicate, length * (r + 1) // mesh.replicate)
            for r in range(mesh.replicate)
            for length in lengths
        ]
        # In the order of data ranks: replicate rank * shard + shard rank.
        self._sizes = [high - low for low, high in parts]
        self.own = self._sizes[mesh.dp_rank]
        """Elements that this rank sums."""
        self._stages, order = self._plan_stages(by_machine)
        self._pieces = [piece for d in order for piece in _pieces(members, d % mesh.shard, *parts[d])]
        alone = members[0].receiver if len(members) == 1 else None
        self._in_order = alone is not None and _follow_each_other(self._pieces)
        self._permutation = None if alone is None or self._in_order else _permutation(self._pieces, alone.device)

    def _plan_stages(self, by_machine: bool) -> tuple[list[_Stage], Sequence[int]]:
        """The all-to-alls, and the order in which the first one sends the parts of all ranks."""
        machines, sizes, me = self._mesh.machines, self._sizes, self._mesh.dp_rank
        world = range(self._mesh.dp_size)
        if machines is None or not by_machine:
            return [_Stage(self._mesh.dp_group, tuple(sizes), sizes[me])], world
        # Ranks of a machine are consecutive.
        counterparts = [world[n :: machines.ranks] for n in range(machines.ranks)]  # those that neighbor n adds for
        intra_sizes = tuple(sum(sizes[d] for d in ranks) for ranks in counterparts)
        number = me % machines.ranks
        inside = _Stage(machines.intra_node_group, intra_sizes, intra_sizes[number])
        inter_sizes = tuple(sizes[d] for d in counterparts[number])
        between = _Stage(machines.inter_node_group, inter_sizes, sizes[me], "gradients of machines", machines.ranks)
        return [inside, between], [d for ranks in counterparts for d in ranks]

    def gradient_memory(self) -> Tensor | None:
        """The gradient of the only parameter, flat, where it is the message as it lies in memory; None: there is none,
        or it is not."""
        gradient = self._members[0].receiver.grad
        sent_alone = self._in_order and self._members[0].terms is None and self._mesh.dp_size > 1
        return gradient.view(-1) if sent_alone and gradient is not None and gradient.is_contiguous() else None

    def exchange(self, key: tuple[int, int, int]) -> Tensor | list[Tensor]:
        """Terms to be added, [n] each, whose sum is that of all ranks' gradients of the elements that this rank sums.
        key: Philox's of the first message."""
        message, terms = self._message()
        if self._mesh.dp_size == 1:
            return message.view(terms, self._sizes[0])
        *first, last = self._stages
        for stage in first:
            received = self._send(stage, message, terms, key)
            # Inside a machine first, over NVLink; of its sum one rank alone sends each part to the other machines.
            message = sum_in_order(received)  # fp32 where the wire has codes
        return self._send(last, message, terms, key)

    def _send(self, stage: _Stage, message: Tensor, terms: int, key: tuple[int, int, int]) -> Tensor | list[Tensor]:
        """What each rank of the stage has sent to this one, of each of its terms."""
        if self._wire is None:
            sizes = [terms * size for size in stage.sizes]
            received = exchange(message, sizes, terms * stage.own, stage.group, stage.kind)
            return received.view(len(sizes) * terms, stage.own)
        # A code is rounded: a term that is added exactly cannot be sent as one.
        assert terms == 1, "terms are kept apart to be added exactly"
        keys = _message_keys((*key[:2], key[2] + stage.first_number), len(stage.sizes), message.device)
        pieces = message.split(stage.sizes)
        encoded = [self._wire.encode(piece, key) for piece, key in zip(pieces, keys.unbind(), strict=True)]
        sizes = [self._wire.size(elements) for elements in stage.sizes]
        received = exchange(torch.cat(encoded), sizes, self._wire.size(stage.own), stage.group, stage.kind)
        return [self._wire.decode(row, stage.own) for row in received]

    def _message(self) -> tuple[Tensor, int]:
        """What this rank sends in the first stage, one message after the other, of several terms one after the other
        in each; and their number. Frees the gradients."""
        flat = [_flat_gradients(m) for m in self._members]
        for m in self._members:
            # The list is the last reference: a gradient's memory is free once the copies below have been queued.
            m.receiver.grad = None
        (terms,) = {len(member_sizes) for member_sizes in flat}
        # The gradient is the message as it lies in memory: no copy of a large parameter.
        if terms == 1 and self._in_order:
            return flat[0].view(-1), 1
        if terms == 1 and self._permutation is not None:
            # [pieces, length]: a row per piece.
            return flat[0].view(len(self._permutation), -1).index_select(0, self._permutation).view(-1), 1
        pieces = [[flat[m][term, low:high] for m, low, high in self._pieces] for term in range(terms)]
        if terms == 1:
            return torch.cat(pieces[0]), 1
        # From each term's parts for all ranks to each rank's parts of all terms: its message is contiguous.
        to_ranks = zip(*(torch.cat(term_pieces).split(self._stages[0].sizes) for term_pieces in pieces), strict=True)
        return torch.cat([term for to_rank in to_ranks for term in to_rank]), terms

    def give(self, part: Tensor, memory: Tensor | None = None) -> None:
        """Set the masters' gradients from this rank's part of its shard, summed in fp32 and rounded here if it is not
        yet. memory: for the whole shard, flat; None: allocate it."""
        part = part.to(self.dtype)
        if self._mesh.replicate > 1:
            sizes = self._sizes[self._mesh.shard_rank :: self._mesh.shard]  # of this shard's parts, by replica
            # Replicas have summed a part each: a reduce-scatter over all, then an all-gather among those of a shard.
            parts = gather(part, sizes, self._mesh.replicate_group, "gradients")
            part = torch.cat(parts, out=None if memory is None else memory[: sum(sizes)])
        ends = [0]
        for m in self._members:
            ends.append(ends[-1] + m.bounds[self._mesh.shard_rank + 1] - m.bounds[self._mesh.shard_rank])
        for m, (low, high) in zip(self._members, pairwise(ends), strict=True):
            m.set_gradient(part[low:high])


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


def _pieces(members: Sequence[Sharded], shard: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """(member, first element, last + 1): where the elements [low, high) of a shard of all members are."""
    ends = accumulate((m.bounds[shard + 1] - m.bounds[shard] for m in members), initial=0)
    for index, (start, stop) in enumerate(pairwise(ends)):
        first, last = max(low, start), min(high, stop)
        if first < last:
            begin = members[index].bounds[shard] - start  # from places in the shard to elements of this member
            yield index, begin + first, begin + last


def _follow_each_other(pieces: Sequence[tuple[int, int, int]]) -> bool:
    """Whether pieces of one parameter do."""
    return all(low == before for (_, _, before), (_, low, _) in pairwise(pieces))


def _permutation(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor | None:
    """Of equally long pieces of one parameter their order, int64 on the device: they are put into it by one launch,
    where a list of slices takes the host some microseconds a rank. None: they are not equally long."""
    length = pieces[0][2] - pieces[0][1]
    if any(high - low != length or low % length for _, low, high in pieces):
        return None
    return torch.tensor([low // length for _, low, _ in pieces], device=device)


def _message_keys(first: tuple[int, int, int], messages: int, device: torch.device) -> Tensor:
    """Philox's keys of consecutive messages, int64 [messages, 3]. Made on the device: a copy from the host would wait
    for all that is queued there."""
    seed, micro_step, number = first
    numbers = torch.arange(number, number + messages, device=device)
    return torch.stack([torch.full_like(numbers, seed), torch.full_like(numbers, micro_step), numbers], dim=1)


def _flat_gradients(sharded: Sharded) -> Tensor:
    """[terms, n]. A parameter that took no part in this rank's loss has a gradient of zeros."""
    receiver, terms = sharded.receiver, 1 if sharded.terms is None else len(sharded.terms)
    if receiver.grad is None:
        return torch.zeros(terms, sharded.parameter.numel(), dtype=receiver.dtype, device=receiver.device)
    return receiver.grad.reshape(terms, -1)


def _buckets(parameters: Sequence[Sharded]) -> Iterator[list[Sharded]]:
    """Parameters of one mesh and one dtype whose gradients are sent at once. Large ones are sent alone, without a
    copy."""
    small: dict[torch.dtype, list[Sharded]] = {}
    for p in parameters:
        if _bytes(p) >= ALONE_BYTES:
            yield [p]
        else:
            small.setdefault(p.parameter.dtype, []).append(p)
    for members in small.values():
        yield from in_buckets(members, _bytes)


def _bytes(p: Sharded) -> int:
    return p.parameter.numel() * p.parameter.element_size()

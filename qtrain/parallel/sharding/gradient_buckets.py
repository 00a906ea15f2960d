"""What is sent at once of the gradients of several parameters: each rank's part of them, to the rank that sums it.

A large parameter is sent alone, as its gradient lies in memory; small ones are sent together. Over several machines
there are two stages of messages (`gradients.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.comm.rank_group import RANK_RNG_OFFSET
from qtrain.comm.wire import ALONE_BYTES, exchange, gather, in_buckets
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.elementwise import sum_in_order
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.gradient_wire import FIRST_NUMBER, GradientWire
from qtrain.parallel.sharding.shards import Sharded


@dataclass(frozen=True)
class _Stage:
    """One all-to-all. sizes: elements of this rank's message to each rank of the group; own: of each message to it;
    kind: under which its bytes are counted; first_number: of the messages among those of the bucket."""

    group: dist.ProcessGroup | None
    sizes: tuple[int, ...]
    own: int
    kind: str = "gradients"
    first_number: int = 0


class GradientBucket:
    """Parameters whose gradients are sent in one message. Shard rank s gets the elements of them that it holds."""

    def __init__(
        self, members: list[Sharded], mesh: Mesh, wire: GradientWire | None = None, *, by_machine: bool = True
    ):
        self.members, self._mesh, self._wire = members, mesh, wire
        self.messages, self.first_number = mesh.dp_size, FIRST_NUMBER + mesh.tp_rank * RANK_RNG_OFFSET
        self.sums: Tensor | MaybeNone = None  # in the same memory in every step: recorded steps add to it
        self.dtype = members[0].parameter.dtype
        lengths = [sum(m.bounds[s + 1] - m.bounds[s] for m in members) for s in range(mesh.shard)]  # of each shard
        parts = [  # of every rank: its part of its shard
            (length * r // mesh.replicate, length * (r + 1) // mesh.replicate)
            for r in range(mesh.replicate)
            for length in lengths
        ]
        self.sizes = [high - low for low, high in parts]
        """Elements for each data rank, in their order: replicate rank * shard + shard rank."""
        self.own = self.sizes[mesh.dp_rank]
        """Elements that this rank sums."""
        self._stages, order = self._plan_stages(by_machine)
        self._pieces = [piece for d in order for piece in _pieces(members, d % mesh.shard, *parts[d])]
        alone = members[0].receiver if len(members) == 1 else None
        self._in_order = alone is not None and _follow_each_other(self._pieces)
        self._permutation = None if alone is None or self._in_order else _permutation(self._pieces, alone.device)

    def _plan_stages(self, by_machine: bool) -> tuple[list[_Stage], Sequence[int]]:
        """The all-to-alls, and the order in which the first one sends the parts of all ranks."""
        machines, sizes, me = self._mesh.machines, self.sizes, self._mesh.dp_rank
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

    @property
    def is_one_message(self) -> bool:
        """Whether each rank sends every other one a message, of one term."""
        return len(self._stages) == 1 and self.members[0].terms is None and self._mesh.dp_size > 1

    @property
    def longest_message(self) -> int:
        """Bytes of the longest one to a rank."""
        return max(self.sizes) * self.dtype.itemsize

    def gradient_memory(self) -> Tensor | None:
        """The gradient of the only parameter, flat, where it is the message as it lies in memory; None: there is none,
        or it is not."""
        gradient = self.members[0].receiver.grad
        sent_alone = self._in_order and self.members[0].terms is None and self._mesh.dp_size > 1
        return gradient.view(-1) if sent_alone and gradient is not None and gradient.is_contiguous() else None

    def exchange(self, key: tuple[int, int, int]) -> Tensor | list[Tensor]:
        """Terms to be added, [n] each, whose sum is that of all ranks' gradients of the elements that this rank sums.
        key: Philox's of the first message."""
        message, terms = self.message()
        if self._mesh.dp_size == 1:
            return message.view(terms, self.sizes[0])
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

    def message(self) -> tuple[Tensor, int]:
        """What this rank sends in the first stage, one message after the other, of several terms one after the other
        in each; and their number. Frees the gradients."""
        flat = [_flat_gradients(m) for m in self.members]
        for m in self.members:
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
            sizes = self.sizes[self._mesh.shard_rank :: self._mesh.shard]  # of this shard's parts, by replica
            # Replicas have summed a part each: a reduce-scatter over all, then an all-gather among those of a shard.
            parts = gather(part, sizes, self._mesh.replicate_group, "gradients")
            part = torch.cat(parts, out=None if memory is None else memory[: sum(sizes)])
        ends = [0]
        for m in self.members:
            ends.append(ends[-1] + m.bounds[self._mesh.shard_rank + 1] - m.bounds[self._mesh.shard_rank])
        for m, (low, high) in zip(self.members, pairwise(ends), strict=True):
            m.set_gradient(part[low:high])


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


def split_into_buckets(parameters: Sequence[Sharded]) -> Iterator[list[Sharded]]:
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

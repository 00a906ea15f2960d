"""Reduce-scatter of gradients: an all-to-all in the gradients' dtype, then a sum in fp32 in the order of the ranks.

A ring adds in bf16 and in an order that depends on the ring. Here every micro-batch's gradient is rounded once, the sum
once more, and the order of additions is that of the micro-batches: rank r's a-th micro-batch is number
a * ranks + r of the step. Added after every micro-batch (`every_micro_batch`), the sum is the same for any number of
ranks, bit for bit. That costs an all-to-all per micro-batch and an fp32 copy of the shard; without it ranks add their
own micro-batches in the gradients' dtype, as one GPU does, and meet once per step.

Parameters may come in groups, which are added one by one: of full sharding each block is a group, whose gradients are
sent and freed as soon as its backward pass is over.

With replicas every rank sums a part of its shard, and the replicas gather the sums. A `GradientWire` sends less.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from qtrain.distributed.gradient_wire import FIRST_NUMBER, GradientWire
from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded
from qtrain.distributed.tensor_group import TENSOR_RANK_NUMBERS
from qtrain.distributed.wire import ALONE_BYTES, exchange, gather, in_buckets
from qtrain.kernels.ordered_sum import add_in_order


class GradientReduction:
    """Moves the gradients of groups of parameters to their masters. All ranks make the same calls in the same order."""

    def __init__(
        self,
        groups: Sequence[Sequence[Sharded]],
        mesh: Mesh,
        *,
        every_micro_batch: bool = False,
        wire: GradientWire | None = None,
        seed: int = 0,
    ):
        self._keeps_sums = every_micro_batch
        self._groups = [[_Bucket(members, mesh, wire) for members in _buckets(group)] for group in groups]
        self._buckets = [bucket for group in self._groups for bucket in group]
        self._seed, self._world = seed, mesh.data_world
        self._first_number = FIRST_NUMBER + mesh.tensor_rank * TENSOR_RANK_NUMBERS

    def add(self, micro_step: int = 0) -> None:
        """Add the gradients of all ranks to the sums, and free them. micro_step: the number of this rank's micro-batch
        in the run, which keys random bits."""
        for index in range(len(self._groups)):
            self.add_group(index, micro_step)

    def add_group(self, index: int, micro_step: int = 0) -> None:
        """`add` for one group, as soon as its gradients are complete."""
        for bucket in self._groups[index]:
            number = self._first_number + self._buckets.index(bucket) * self._world
            received = bucket.exchange((self._seed, micro_step, number))
            if self._keeps_sums:
                if bucket.sums is None:
                    bucket.sums = torch.zeros_like(received[0], dtype=torch.float32)
                add_in_order(bucket.sums, received)
            else:
                bucket.give(add_in_order(received[0].float(), received[1:]))

    def finish(self) -> None:
        """Give the masters the sums since the last call as gradients."""
        if self._keeps_sums:
            for bucket in self._buckets:
                bucket.give(bucket.sums)
                bucket.sums.zero_()


class _Bucket:
    """Parameters whose gradients travel together. Shard rank s gets the elements of all of them that it holds."""

    def __init__(self, members: list[Sharded], mesh: Mesh, wire: GradientWire | None = None):
        self._members, self._mesh, self._wire = members, mesh, wire
        self.sums: Tensor | None = None  # in the same memory in every step: recorded steps add to it
        self._dtype = members[0].parameter.dtype
        self._lengths = [sum(m.bounds[s + 1] - m.bounds[s] for m in members) for s in range(mesh.shard)]
        self._parts = [  # of every rank: its part of its shard
            (length * r // mesh.replicate, length * (r + 1) // mesh.replicate)
            for r in range(mesh.replicate)
            for length in self._lengths
        ]
        self._sizes = [high - low for low, high in self._parts]

    def exchange(self, key: tuple[int, int, int]) -> Tensor | list[Tensor]:
        """Of every rank, [n]: its gradients of the elements that this rank sums. key: Philox's of the first message."""
        messages, group = self._messages(), self._mesh.data_group
        own = self._sizes[self._mesh.data_rank]
        if self._mesh.data_world == 1:
            return [messages]
        if self._wire is None:
            return exchange(messages, self._sizes, own, group, "gradients")
        encoded = [
            self._wire.encode(message, torch.tensor([*key[:2], key[2] + d], device=messages.device))
            for d, message in enumerate(messages.split(self._sizes))
        ]
        sizes = [self._wire.size(elements) for elements in self._sizes]
        received = exchange(torch.cat(encoded), sizes, sizes[self._mesh.data_rank], group, "gradients")
        return [self._wire.decode(row, own) for row in received]

    def _messages(self) -> Tensor:
        """What this rank sends to each other, one after the other; frees the gradients."""
        flat = [_flat_gradient(m.parameter) for m in self._members]
        for m in self._members:
            m.parameter.grad = None
        slices = [
            [g[m.bounds[s] : m.bounds[s + 1]] for g, m in zip(flat, self._members, strict=True)]
            for s in range(self._mesh.shard)
        ]
        if len(flat) == 1 and self._mesh.replicate == 1:
            return flat[0]  # its elements are in the order of the shards
        if self._mesh.replicate > 1:
            shards = [torch.cat(of_shard) for of_shard in slices]
            return torch.cat([shards[d % self._mesh.shard][low:high] for d, (low, high) in enumerate(self._parts)])
        return torch.cat([piece for of_shard in slices for piece in of_shard])

    def give(self, part: Tensor) -> None:
        """Set the masters' gradients from this rank's part of its shard, summed in fp32."""
        part = part.to(self._dtype, copy=self.sums is not None)  # those are added to in the next step
        if self._mesh.replicate > 1:
            sizes = self._sizes[self._mesh.shard_rank :: self._mesh.shard]
            part = torch.cat(gather(part, sizes, self._mesh.replicate_group, "gradients"))
        ends = [0]
        for m in self._members:
            ends.append(ends[-1] + m.bounds[self._mesh.shard_rank + 1] - m.bounds[self._mesh.shard_rank])
        for m, (low, high) in zip(self._members, pairwise(ends), strict=True):
            m.set_gradient(part[low:high])


def _flat_gradient(parameter: Tensor) -> Tensor:
    """A parameter that took no part in this rank's loss has a gradient of zeros."""
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return parameter.grad.reshape(-1)


def _buckets(parameters: Sequence[Sharded]) -> Iterator[list[Sharded]]:
    """Parameters of one dtype whose gradients are sent at once. Large ones are sent alone, without a copy."""
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

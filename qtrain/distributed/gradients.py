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
from qtrain.distributed.shards import Sharded, by_mesh
from qtrain.distributed.tensor_group import TENSOR_RANK_NUMBERS
from qtrain.distributed.wire import ALONE_BYTES, exchange, gather, in_buckets
from qtrain.kernels.ordered_sum import add_in_order


class GradientReduction:
    """Moves the gradients of groups of parameters to their masters. All ranks make the same calls in the same order."""

    def __init__(
        self,
        groups: Sequence[Sequence[Sharded]],
        *,
        every_micro_batch: bool = False,
        wire: GradientWire | None = None,
        seed: int = 0,
    ):
        self._keeps_sums = every_micro_batch
        self._groups = [
            [
                _Bucket(members, mesh, wire)
                for mesh, on_mesh in by_mesh(group, lambda sharded: sharded)
                for members in _buckets(on_mesh)
            ]
            for group in groups
        ]
        self._buckets = [bucket for group in self._groups for bucket in group]
        self._seed, self._messages = seed, max((bucket.messages for bucket in self._buckets), default=1)

    def add(self, micro_step: int = 0) -> None:
        """Add the gradients of all ranks to the sums, and free them. micro_step: the number of this rank's micro-batch
        in the run, which keys random bits."""
        for index in range(len(self._groups)):
            self.add_group(index, micro_step)

    def add_group(self, index: int, micro_step: int = 0) -> None:
        """`add` for one group, as soon as its gradients are complete."""
        for bucket in self._groups[index]:
            number = bucket.first_number + self._buckets.index(bucket) * self._messages
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
        self.messages, self.first_number = mesh.data_world, FIRST_NUMBER + mesh.tensor_rank * TENSOR_RANK_NUMBERS
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
        """Of every rank, [n], and of each of its terms: its gradients of the elements that this rank sums. key:
        Philox's of the first message."""
        messages, terms = self._messages()
        group, own = self._mesh.data_group, self._sizes[self._mesh.data_rank]
        if self._mesh.data_world == 1:
            return messages.view(terms, own)
        if self._wire is None:
            sizes = [terms * size for size in self._sizes]
            received = exchange(messages, sizes, terms * own, group, "gradients")
            return received.view(len(sizes) * terms, own)
        assert terms == 1, "terms are kept apart to be added exactly"
        encoded = [
            self._wire.encode(message, torch.tensor([*key[:2], key[2] + d], device=messages.device))
            for d, message in enumerate(messages.split(self._sizes))
        ]
        sizes = [self._wire.size(elements) for elements in self._sizes]
        received = exchange(torch.cat(encoded), sizes, sizes[self._mesh.data_rank], group, "gradients")
        return [self._wire.decode(row, own) for row in received]

    def _messages(self) -> tuple[Tensor, int]:
        """What this rank sends to each other, one after the other; of several terms one after the other in each. And
        their number. Frees the gradients."""
        flat = [_flat_gradients(m) for m in self._members]
        for m in self._members:
            m.receiver.grad = None
        (terms,) = {len(of_member) for of_member in flat}
        messages = [self._message([of_member[term] for of_member in flat]) for term in range(terms)]
        if terms == 1:
            return messages[0], 1
        to_ranks = zip(*(message.split(self._sizes) for message in messages), strict=True)
        return torch.cat([term for to_rank in to_ranks for term in to_rank]), terms

    def _message(self, flat: Sequence[Tensor]) -> Tensor:
        """The gradients of the members, ordered by the ranks that sum them."""
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

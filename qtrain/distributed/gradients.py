"""Reduce-scatter of gradients: an all-to-all in the gradients' dtype, then a sum in fp32 in the order of the ranks.

A ring adds in bf16 and in an order that depends on the ring. Here every micro-batch's gradient is rounded once, the sum
once more, and the order of additions is that of the micro-batches: rank r's a-th micro-batch is number
a * ranks + r of the step. Added after every micro-batch (`every_micro_batch`), the sum is the same for any number of
ranks, bit for bit. That costs an all-to-all per micro-batch and an fp32 copy of the shard; without it ranks add their
own micro-batches in the gradients' dtype, as one GPU does, and meet once per step.

With replicas every rank sums a part of its shard, and the replicas gather the sums.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded
from qtrain.distributed.wire import exchange, gather, in_buckets


class GradientReduction:
    """Moves the gradients of `parameters` to their masters. Every rank calls `add` and `finish` equally often."""

    def __init__(self, parameters: Sequence[Sharded], mesh: Mesh, *, every_micro_batch: bool = False):
        self._mesh = mesh
        self._keeps_sums = every_micro_batch
        self._buckets = [_Bucket(members, mesh) for members in _buckets(parameters)]
        self._sums: list[Tensor | None] = [None] * len(self._buckets)

    def add(self) -> None:
        """Add the gradients of all ranks to the sums, and free them."""
        for index, bucket in enumerate(self._buckets):
            received = bucket.exchange()
            if self._keeps_sums:
                if self._sums[index] is None:
                    self._sums[index] = torch.zeros(received.shape[1], device=received.device)
                add_in_order(self._sums[index], received)
            else:
                self._finish_bucket(bucket, add_in_order(received[0].float(), received[1:]))

    def finish(self) -> None:
        """Give the masters the sums since the last call as gradients."""
        for index, bucket in enumerate(self._buckets):
            if self._keeps_sums:
                self._finish_bucket(bucket, self._sums[index])
                self._sums[index] = None

    def _finish_bucket(self, bucket: "_Bucket", total: Tensor) -> None:
        bucket.give(total.to(bucket.dtype))


def add_in_order(total: Tensor, terms: Tensor) -> Tensor:
    """total [L] fp32 += terms [ranks, L], one rank after the other."""
    for term in terms:
        total += term
    return total


class _Bucket:
    """Parameters whose gradients travel together. Shard rank s gets the elements of all of them that it holds."""

    def __init__(self, members: list[Sharded], mesh: Mesh):
        self._members, self._mesh = members, mesh
        self.dtype = members[0].parameter.dtype
        self._lengths = [sum(m.bounds[s + 1] - m.bounds[s] for m in members) for s in range(mesh.shard)]
        self._parts = [  # of every rank: its part of its shard
            (length * r // mesh.replicate, length * (r + 1) // mesh.replicate)
            for r in range(mesh.replicate)
            for length in self._lengths
        ]
        self._sizes = [high - low for low, high in self._parts]

    def exchange(self) -> Tensor:
        """[ranks, n]: every rank's gradients of the elements that this rank sums."""
        flat = [_flat_gradient(m.parameter) for m in self._members]
        for m in self._members:
            m.parameter.grad = None
        slices = [
            [g[m.bounds[s] : m.bounds[s + 1]] for g, m in zip(flat, self._members, strict=True)]
            for s in range(self._mesh.shard)
        ]
        if self._mesh.world == 1:
            return torch.cat(slices[0])[None]
        if self._mesh.replicate > 1:
            shards = [torch.cat(of_shard) for of_shard in slices]
            messages = torch.cat([shards[d % self._mesh.shard][low:high] for d, (low, high) in enumerate(self._parts)])
        else:
            messages = torch.cat([piece for of_shard in slices for piece in of_shard])
        return exchange(messages, self._sizes, self._sizes[self._mesh.rank], None, "gradients")

    def give(self, part: Tensor) -> None:
        """Set the masters' gradients from this rank's part of its shard."""
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
    """Parameters of one dtype whose gradients are sent at once."""
    by_dtype: dict[torch.dtype, list[Sharded]] = {}
    for p in parameters:
        by_dtype.setdefault(p.parameter.dtype, []).append(p)
    for members in by_dtype.values():
        yield from in_buckets(members, lambda m: m.parameter.numel() * m.parameter.element_size())

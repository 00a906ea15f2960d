"""All-gather of updated weights: from the masters' shards to what the model computes with, a few tensors at a time.

One process has no shards: what it gathers is in host memory, and is copied from there. A weight of which only codes
are kept passes through staging memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from qtrain.comm.wire import ALONE_BYTES, gather, gather_into, in_buckets
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.shards import Sharded, as_bytes, by_mesh, byte_slices, local_tensors
from qtrain.tensors.lazy import plain_tensors
from qtrain.tensors.stored_weight import StoredWeight


class Gathered(Protocol):
    """What ranks gather of one parameter: tensors of which every rank holds the rows of its shard."""

    @property
    def sharded(self) -> Sharded:
        """The parameter."""

    def empty(self) -> list[Tensor]:
        """The full tensors, to be filled."""

    def own(self) -> list[Tensor]:
        """This rank's rows of them."""

    def receive(self, tensors: list[Tensor]) -> None:
        """Take the full tensors."""

    def bytes(self) -> int:
        """Of the full tensors."""


@dataclass(frozen=True)
class GatheredMaster:
    """The values of a master, or the codes and scales of one that is stored in low bits. in_place: whether the memory
    that receives them is the parameter's own."""

    sharded: Sharded
    give: Callable[[Sharded, list[Tensor]], None]
    in_place: bool = False

    @property
    def is_own_memory(self) -> bool:
        return self.in_place and all(t.is_contiguous() for t in plain_tensors(self.sharded.parameter))

    @property
    def is_staged(self) -> bool:
        """Whether it can pass through staging memory, as a single tensor."""
        return not (self.is_own_memory or isinstance(self.sharded.parameter.data, StoredWeight))

    def empty(self) -> list[Tensor]:
        tensors = plain_tensors(self.sharded.parameter)
        if self.is_own_memory:
            return tensors
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]

    def own(self) -> list[Tensor]:
        return [t.contiguous() for t in local_tensors(self.sharded.master)]

    def receive(self, tensors: list[Tensor]) -> None:
        self.give(self.sharded, tensors)

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in plain_tensors(self.sharded.parameter))


@torch.no_grad()
def gather_weights(items: Iterable[Gathered], kind: str = "weights", staging: Tensor | None = None) -> None:
    """Gather `items` over their shard ranks and hand each its full tensors. kind: under which the bytes are counted.
    staging: `staging_size` of memory, through which one after the other comes from the host; None: each has its
    own."""
    for mesh, members in by_mesh(items, lambda item: item.sharded):
        if mesh.shard == 1:
            for item in members:
                _copy_from_host(item, staging)
            continue
        small = []
        for item in members:
            # Gathered in place into its own memory, which takes equally long rows of all ranks.
            if item.bytes() >= ALONE_BYTES and is_even(item.sharded):
                _gather_alone(item, mesh, kind)
            else:
                small.append(item)
        for bucket in in_buckets(small, lambda item: item.bytes()):
            _gather_bucket(bucket, mesh, kind)


def staging_size(items: Iterable[GatheredMaster]) -> int:
    """Of the largest of `items` that comes from the host to memory that is not its own."""
    return max((item.bytes() for item in items if item.sharded.mesh.shard == 1 and item.is_staged), default=0)


def _copy_from_host(item: Gathered, staging: Tensor | None) -> None:
    if staging is not None and isinstance(item, GatheredMaster) and item.is_staged:
        parameter = item.sharded.parameter
        full = [staging[: item.bytes()].view(parameter.dtype).view(parameter.shape)]
    else:
        full = item.empty()
    for tensor, on_host in zip(full, item.own(), strict=True):
        tensor.copy_(on_host, non_blocking=True)  # from pinned memory, in the order of the current stream
    item.receive(full)


def is_even(sharded: Sharded) -> bool:
    """Whether all ranks hold equally much."""
    return len({high - low for low, high in pairwise(sharded.bounds)}) == 1


def _gather_alone(item: Gathered, mesh: Mesh, kind: str) -> None:
    """Without copies to and from messages."""
    full, own = item.empty(), [as_bytes(piece) for piece in item.own()]
    if len(full) == 1:  # of which a rank may have its rows in pieces
        own = [torch.cat(own)] if len(own) > 1 else own
    for tensor, rows in zip(full, own, strict=True):
        gather_into(as_bytes(tensor), rows, mesh.shard_group, kind)
    item.receive(full)


def _gather_bucket(bucket: Sequence[Gathered], mesh: Mesh, kind: str) -> None:
    targets = [item.empty() for item in bucket]
    # Of each full tensor its bytes, and which of them each rank holds.
    slices = [
        (as_bytes(t), byte_slices(t, item.sharded)) for item, full in zip(bucket, targets, strict=True) for t in full
    ]
    own = [as_bytes(t) for item in bucket for t in item.own()]
    message = torch.cat(own) if own else slices[0][0].new_empty(0)  # a rank may own nothing of a bucket
    sizes = [sum(held[s][1] - held[s][0] for _, held in slices) for s in range(mesh.shard)]
    rows = gather(message, sizes, mesh.shard_group, kind)
    # Rank by rank: one launch copies its pieces into all tensors of the bucket.
    for s, row in enumerate(rows):
        pieces = [target[held[s][0] : held[s][1]] for target, held in slices]
        torch._foreach_copy_(pieces, list(row.split([len(piece) for piece in pieces])))
    for item, full in zip(bucket, targets, strict=True):
        item.receive(full)

"""What ranks send each other, as raw bytes, with a count of them.

Bytes, because collectives of some backends do not know every low-bit dtype. Messages may differ in length from rank to
rank: parameters do not divide evenly, and a whole matrix may belong to one rank.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it."""

T = TypeVar("T")

BUCKET_BYTES = 1 << 28
"""What is sent at once."""
ALONE_BYTES = 1 << 23
"""A tensor of this size is worth a message of its own, which needs no copy."""

sent = Counter()
"""Bytes that this rank has sent, by kind of message; its own share is not counted."""


def exchange(messages: Tensor, sizes: Sequence[int], own: int, group: dist.ProcessGroup | None, kind: str) -> Tensor:
    """All-to-all. messages: one after the other, of `sizes` elements, one for each rank; own: elements of the message
    for this rank. Returns [ranks, own], what each rank sent to this one."""
    element, ranks, me = messages.element_size(), len(sizes), dist.get_rank(group)
    received = torch.empty(ranks, own, dtype=messages.dtype, device=messages.device)
    dist.all_to_all_single(
        received.view(-1).view(torch.uint8),
        # As bytes: NCCL and gloo know no FP8.
        messages.view(torch.uint8),
        [own * element] * ranks,
        [size * element for size in sizes],
        group=group,
    )
    sent[kind] += (sum(sizes) - sizes[me]) * element  # its own share does not leave the rank
    return received


def gather(message: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, kind: str) -> list[Tensor]:
    """All-gather of 1-D messages of `sizes` elements, one of each rank."""
    longest = max(sizes)
    padded = message
    if len(message) < longest:
        padded = message.new_empty(longest)  # the end is never read: uninitialized
        padded[: len(message)] = message
    received = message.new_empty(len(sizes), longest)
    gather_into(received.view(-1), padded, group, kind)
    return [row[:size] for row, size in zip(received, sizes, strict=True)]


def gather_into(received: Tensor, message: Tensor, group: dist.ProcessGroup | None, kind: str) -> None:
    """All-gather of 1-D messages of one size into a contiguous tensor, one after the other."""
    all_gather_single(received.view(torch.uint8), message.view(torch.uint8), group=group)
    sent[kind] += (len(received) - len(message)) * message.element_size()


def maximum_over_ranks(values: Tensor) -> None:
    """Replace every value by its maximum over all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)


def all_gather_rows(own: Tensor) -> Tensor:
    """[n] of every rank as [ranks, n]."""
    every = own.new_empty(dist.get_world_size(), len(own))
    all_gather_single(every.view(-1), own)
    return every


def in_buckets(items: Iterable[T], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Consecutive items of up to BUCKET_BYTES together, or a single larger one."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + bytes_of(item) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += bytes_of(item)
    if bucket:
        yield bucket

"""All-gather of updated weights: from the masters' shards to what the model computes with, a few tensors at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded, as_bytes, byte_slices, local_tensors, plain_tensors
from qtrain.distributed.wire import gather

BUCKET_BYTES = 1 << 28

Receive = Callable[[Sharded, list[Tensor]], None]
"""Takes a parameter and its gathered tensors, of full shape."""


@torch.no_grad()
def gather_weights(parameters: Iterable[Sharded], mesh: Mesh, receive: Receive) -> None:
    """Gather the masters of `parameters` over the shard ranks and hand each to `receive`."""
    for bucket in _buckets(parameters):
        _gather_bucket(bucket, mesh, receive)


def _gather_bucket(bucket: Sequence[Sharded], mesh: Mesh, receive: Receive) -> None:
    # By parameter: its tensors (one, or codes and scale), with new memory, and the bytes of each that a rank holds.
    targets = [
        [torch.empty_like(t, memory_format=torch.contiguous_format) for t in plain_tensors(m.parameter)] for m in bucket
    ]
    slices = [(as_bytes(t), byte_slices(t, m)) for m, full in zip(bucket, targets, strict=True) for t in full]
    own = [as_bytes(t.contiguous()) for m in bucket for t in local_tensors(m.master)]
    message = torch.cat(own) if own else slices[0][0].new_empty(0)
    sizes = [sum(held[s][1] - held[s][0] for _, held in slices) for s in range(mesh.shard)]
    rows = gather(message, sizes, mesh.shard_group, "weights")
    for s, row in enumerate(rows):
        pieces = [target[held[s][0] : held[s][1]] for target, held in slices]
        torch._foreach_copy_(pieces, list(row.split([len(piece) for piece in pieces])))
    for m, full in zip(bucket, targets, strict=True):
        receive(m, full)


def _buckets(parameters: Iterable[Sharded]) -> Iterator[list[Sharded]]:
    bucket, size = [], 0
    for p in parameters:
        bytes_ = sum(t.numel() * t.element_size() for t in plain_tensors(p.parameter))
        if bucket and size + bytes_ > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += bytes_
    if bucket:
        yield bucket

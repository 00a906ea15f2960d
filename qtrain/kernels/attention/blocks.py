"""Blocks of queries and keys: what the kernels of attention share."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.compiler import TensorDescriptor, tl, triton

LONGEST_BLOCK = 128
"""Of queries and of keys."""
LONGEST = tl.constexpr(LONGEST_BLOCK)
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class AttentionTiling:
    """A configuration of a kernel: queries and keys of a block, warps of a CTA, stages of loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int
    per_sm: int
    """CTAs that an SM has registers for."""

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        registers = 65536 // (self.per_sm * self.warps * 32) // 8 * 8  # of a thread: given in eights, 255 at most
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": min(registers, 255)}


class VisibleKeys(NamedTuple):
    """Of causal attention that sees less: a query sees keys from its first one to its own place. Documents and sliding
    windows are of this kind: neither `first` nor `last` falls along a sequence."""

    first: Tensor
    """int32 [B, S]: the first key that each query sees."""
    last: Tensor
    """int32 [B, S]: the last query that sees each key."""

    @classmethod
    def make(
        cls, batch: int, seq: int, doc_ids: Tensor | None, window: int | None, device: torch.device
    ) -> "VisibleKeys":
        """doc_ids [B, S]: a query sees keys of its own document, whose tokens follow each other; window: and of the
        last `window` places, its own among them."""
        place = torch.arange(seq, device=device).expand(batch, seq)
        first, last = torch.zeros_like(place), torch.full_like(place, seq - 1)
        if doc_ids is not None:
            begins = torch.ones_like(doc_ids, dtype=torch.bool)
            begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
            first = torch.where(begins, place, 0).cummax(1).values
            ends = torch.ones_like(begins)
            ends[:, :-1] = begins[:, 1:]
            last = torch.where(ends, place, seq - 1).flip(1).cummin(1).values.flip(1)
        if window is not None:
            first, last = torch.maximum(first, place - window + 1), torch.minimum(last, place + window - 1)
        return cls(first.int().contiguous(), last.int().contiguous())


@triton.jit
def block_of_queries(seq, heads, QUERIES: tl.constexpr):
    """Of this CTA: the number of its head among those of all sequences, its sequence, its head, and its first query. A
    head's last blocks, which see the most keys, begin first."""
    blocks = tl.cdiv(seq, QUERIES)
    all_heads = tl.num_programs(0) // blocks
    start = (blocks - 1 - tl.program_id(0) // all_heads) * QUERIES
    item = tl.program_id(0) % all_heads
    return item, item // heads, item % heads, start


@triton.jit
def first_keys(first_ptr, at, QUERIES: tl.constexpr):
    """Of a block of queries that begins at `at`: the first key that each sees [QUERIES], the lowest and the highest of
    them; 0 without VisibleKeys."""
    if first_ptr is not None:
        first = tl.load(first_ptr + at + tl.arange(0, QUERIES))
        return first, tl.load(first_ptr + at), tl.load(first_ptr + at + QUERIES - 1)
    else:
        return tl.zeros((QUERIES,), tl.int32), 0, 0


@triton.jit
def hides_some(key_start, query_start, high, seq, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether a query of a block does not see a key of a block. high: of `first_keys`."""
    if CAUSAL:
        return (key_start + KEYS > query_start) | (key_start < high)
    else:
        return key_start + KEYS > seq


@triton.jit
def is_seen(key, query, first, first_ptr, seq, CAUSAL: tl.constexpr):
    """Whether queries see keys; first: of `first_keys`."""
    if first_ptr is not None:
        return (key <= query) & (key >= first)
    elif CAUSAL:
        return key <= query
    else:
        return key < seq


@triton.jit
def load_rows(desc, sequence, start, column):
    """A block [rows, D] of one head, zeros below the end of the sequence."""
    return desc.load([sequence, start, column]).reshape(desc.block_shape[1], desc.block_shape[2])


@triton.jit
def store_rows(desc, sequence, start, column, rows):
    """Those of the block `rows` [rows, D] that are above the end of the sequence."""
    desc.store([sequence, start, column], rows.reshape(1, desc.block_shape[1], desc.block_shape[2]))


def head_blocks(t: Tensor, block: int) -> object:
    """Descriptor of t [B, S, heads, D], the heads of a row side by side, as [B, S, heads * D], in blocks of rows of one
    head."""
    batch, seq, heads, head_dim = t.shape
    shape, strides = [batch, seq, heads * head_dim], [t.stride(0), t.stride(1), 1]
    return TensorDescriptor(t, shape, strides, [1, block, head_dim])


def row_blocks(t: Tensor, block: int) -> object:
    """Descriptor of t [B, heads, padded] as [B * heads, padded], in blocks of one row."""
    batch, heads, length = t.shape
    return TensorDescriptor(t, [batch * heads, length], [length, 1], [1, block])


def padded(seq: int) -> int:
    """The length of a row of statistics of a sequence: whole blocks, which the kernels write in full."""
    return -(-seq // LONGEST_BLOCK) * LONGEST_BLOCK


@triton.jit
def statistics_row(item, seq):
    """Where the statistics of a head begin, `item` among those of all sequences."""
    return item.to(tl.int64) * (tl.cdiv(seq, LONGEST) * LONGEST)

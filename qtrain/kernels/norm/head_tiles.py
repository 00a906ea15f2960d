"""Heads of q, k and v as tiles of a kernel: in the fused qkv projection, and in tensors of their own.

A tile [ROWS, D/2], once for each half, holds the same few heads of one or more tokens. The lanes of a row are in one
warp, so that sums over a head need no barrier, and all tensors have the shape of a tile, so that none changes its
layout. A CTA loads cos and sin of a tile's tokens once, and goes through their heads. Its tokens lie far apart: CTAs
stay, as many as fit on the GPU at once, and all have the same work.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.compiler import tl, triton

ELEMENTS, WARPS = 1024, 2
"""Of a tile, and of a CTA: a thread holds eight elements of each half."""


class Occupancy(NamedTuple):
    """CTAs that share an SM, and registers per thread that let them."""

    ctas: int
    registers: int


@dataclass(frozen=True)
class HeadTile:
    """A tile of a kernel, as one constexpr."""

    heads: int
    kv_heads: int
    q_heads: int
    """Heads of q that a tile has, a power of two that divides them; of k."""
    k_heads: int
    head_dim: int
    rows: int
    """Rows of a tile: (token, head) pairs."""
    block: int
    """Half a head, rounded up to a power of two."""


def heads_of(qkv: Tensor, head_dim: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q [B, S, H, D], k and v [B, S, KV, D]."""
    all_heads = qkv.unflatten(-1, (-1, head_dim))
    kv_heads = (all_heads.shape[2] - heads) // 2
    q, k, v = all_heads.split([heads, kv_heads, kv_heads], dim=2)
    return q, k, v


def head_tiling(
    device: torch.device, tokens: int, heads: tuple[int, int], head_dim: int, per_sm: int
) -> tuple[int, HeadTile]:
    """How many CTAs to launch, and the kernel's tile."""
    block = triton.next_power_of_2(head_dim // 2)
    rows = max(1, ELEMENTS // (2 * block))
    q_heads, k_heads = (min(rows, count & -count) for count in heads)  # the largest power of two that divides the heads
    # At most a CTA for each tile of q or of k, whichever has more.
    ctas = min(triton.cdiv(tokens * max(q_heads, k_heads), rows), per_sm * sm_count(device))
    return ctas, HeadTile(*heads, q_heads, k_heads, head_dim, rows, block)


@triton.jit
def rows_of_tile(HEADS_PER_TILE: tl.constexpr, ROWS: tl.constexpr):
    """Token and head of each row [ROWS, 1] of a tile."""
    row = tl.arange(0, ROWS)[:, None]
    return row // HEADS_PER_TILE, row % HEADS_PER_TILE


@triton.jit
def load_halves(ptrs, inside, HALF: tl.constexpr):
    return tl.load(ptrs, inside, 0.0).to(tl.float32), tl.load(ptrs + HALF, inside, 0.0).to(tl.float32)


@triton.jit
def store_halves(ptrs, first, second, inside, HALF: tl.constexpr):
    tl.store(ptrs, first.to(ptrs.dtype.element_ty), inside)
    tl.store(ptrs + HALF, second.to(ptrs.dtype.element_ty), inside)


@triton.jit
def head_offset(batch, position, head, strides):
    """The offset of a head [B, S, heads, D], int64."""
    return batch * strides[0] + position * strides[1] + head.to(tl.int64) * strides[2]


def contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.contiguous() for t in tensors)

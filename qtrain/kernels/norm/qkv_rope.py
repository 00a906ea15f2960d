"""Rotary positions of queries and keys, from the fused qkv projection into q, k and v, and their gradients back.

    y = (x1 cos - x2 sin, x2 cos + x1 sin)     x1, x2: halves of a head of q or k [D]; cos, sin [D/2] of its position

v is copied: a view of qkv would keep all of it for backward, which needs v alone. Backward rotates by the opposite
angle, and writes the gradients of q, k and v where qkv has them, with no concatenation. Memory-bound; per token, of
b-byte elements, with H query and KV key heads, each way 2 (H + 2 KV) D b bytes: 151 MB, 35 us at H200's 4.28 TB/s, of
32768 tokens, H 14, KV 2, D 64, bf16. Inductor takes 53 us forward and 81 us backward there.

One kernel for both: it moves heads from one layout to another and rotates them (`head_tiles.py`).
"""

from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.norm.head_tiles import (
    WARPS,
    Occupancy,
    contiguous,
    head_offset,
    head_tiling,
    heads_of,
    load_halves,
    rows_of_tile,
    store_halves,
)

OCCUPANCY = Occupancy(16, 64)


def qkv_rope_ref(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, S, (H + 2 KV) D], cos, sin fp32 [S, 1, D/2] or [B, S, 1, D/2] -> q [B, S, H, D], k and v [B, S, KV, D]
    in qkv's dtype; computed in fp32, rounded once."""
    q, k, v = heads_of(qkv, head_dim, heads)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def qkv_rope_backward_ref(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dq [B, S, H, D], dk, dv [B, S, KV, D] -> dqkv [B, S, (H + 2 KV) D]."""
    # The rotation by the opposite angle: its transpose.
    grads = rotate(dq, cos, -sin), rotate(dk, cos, -sin), dv
    return torch.cat([t.flatten(2) for t in grads], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, D] rotated by tables that broadcast to [B, S, 1, D/2]; computed in fp32, rounded once."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@triton.jit
def _move_heads(
    source, target, table_ptrs, sizes, HEADS: tl.constexpr, HEADS_PER_TILE: tl.constexpr, SIGN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """This CTA's tokens of q, k or v. source, target: pointer and strides (batch, sequence, head). SIGN: of the angle;
    0: as they are. sizes: tokens, tokens of a sequence, rows of the tables."""
    x_ptr, x_strides = source
    y_ptr, y_strides = target
    cos_ptr, sin_ptr = table_ptrs
    tokens, seq, table_rows = sizes
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    HALF: tl.constexpr = TILE.head_dim // 2
    TOKENS: tl.constexpr = ROWS // HEADS_PER_TILE
    token_of_row, head = rows_of_tile(HEADS_PER_TILE, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    for start in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        token = start + token_of_row
        inside = (token < tokens) & (column < HALF)
        if SIGN != 0:
            table = (token % table_rows) * HALF + column
            cos, sin = tl.load(cos_ptr + table, inside, 0.0), tl.load(sin_ptr + table, inside, 0.0) * SIGN
        batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
        x_ptrs = x_ptr + head_offset(batch, position, head, x_strides) + column
        y_ptrs = y_ptr + head_offset(batch, position, head, y_strides) + column
        for _ in range(HEADS // HEADS_PER_TILE):
            x1, x2 = load_halves(x_ptrs, inside, HALF)
            if SIGN != 0:
                x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            store_halves(y_ptrs, x1, x2, inside, HALF)
            x_ptrs += HEADS_PER_TILE * x_strides[2]
            y_ptrs += HEADS_PER_TILE * y_strides[2]


@triton.jit
def _qkv_rope_kernel(
    # Of q, k and v: pointer, bf16 or fp32, and strides of batch, sequence and heads; contiguous along D.
    q, k, v, new_q, new_k, new_v,
    # cos, sin fp32 [table_rows, D/2]: token t reads row t % table_rows.
    tables, tokens, seq, table_rows, SIGN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """q and k rotated, v as it is. TILE: a `HeadTile`."""
    sizes = tokens, seq, table_rows
    _move_heads(q, new_q, tables, sizes, TILE.heads, TILE.q_heads, SIGN, TILE)
    _move_heads(k, new_k, tables, sizes, TILE.kv_heads, TILE.k_heads, SIGN, TILE)
    _move_heads(v, new_v, tables, sizes, TILE.kv_heads, TILE.k_heads, 0, TILE)


def _launch(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], cos: Tensor, sin: Tensor, sign: int) -> None:
    """From heads q [B, S, H, D], k and v [B, S, KV, D] to heads of the same shapes, contiguous along D."""
    batch, seq, heads, head_dim = sources[0].shape
    if tokens := batch * seq:
        ctas, tile = head_tiling(cos.device, tokens, (heads, sources[1].shape[2]), head_dim, OCCUPANCY.ctas)
        pairs = ((t, t.stride()[:3]) for t in (*sources, *targets))
        _qkv_rope_kernel[(ctas,)](
            *pairs, (cos, sin), tokens, seq, table_rows=cos.numel() // (head_dim // 2), SIGN=sign, TILE=tile,
            num_warps=WARPS, maxnreg=OCCUPANCY.registers,
        )  # fmt: skip


def launch_qkv_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel for `qkv_rope_ref`; all contiguous."""
    new = _empty(qkv, heads, head_dim)
    _launch(heads_of(qkv, head_dim, heads), new, cos, sin, 1)
    return new


def launch_qkv_rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The kernel for `qkv_rope_backward_ref`; gradients contiguous along D, tables contiguous."""
    dqkv = _empty_backward(dq, dk)
    _launch((dq, dk, dv), heads_of(dqkv, dq.shape[3], dq.shape[2]), cos, sin, -1)
    return dqkv


# ---- operators -------------------------------------------------------------------------------------------------------


def _empty(qkv: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq, width = qkv.shape
    kv_heads = (width // head_dim - heads) // 2
    q, k, v = (qkv.new_empty(batch, seq, count, head_dim) for count in (heads, kv_heads, kv_heads))
    return q, k, v


@operator("qkv_rope", fake=_empty)
def _qkv_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    if not qkv.is_cuda or forced() == "ref":
        return qkv_rope_ref(qkv, cos, sin, heads, head_dim)
    return launch_qkv_rope(*contiguous(qkv, cos, sin), heads=heads, head_dim=head_dim)


def _empty_backward(dq: Tensor, dk: Tensor) -> Tensor:
    batch, seq, heads, head_dim = dq.shape
    return dq.new_empty(batch, seq, (heads + 2 * dk.shape[2]) * head_dim)


@operator("qkv_rope_backward", fake=_empty_backward)
def qkv_rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not dq.is_cuda or forced() == "ref":
        return qkv_rope_backward_ref(dq, dk, dv, cos, sin)
    grads = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    return launch_qkv_rope_backward(*grads, *contiguous(cos, sin))


class QKVRopeFunction(torch.autograd.Function):
    """One function for q, k and v: so is the gradient of qkv one tensor."""

    @staticmethod
    def forward(ctx: Any, qkv, cos, sin, heads, head_dim):
        ctx.save_for_backward(cos, sin)
        return _qkv_rope(qkv, cos, sin, heads, head_dim)

    @staticmethod
    def backward(ctx: Any, dq, dk, dv):
        return qkv_rope_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


def qkv_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, S, (H + 2 KV) D], cos, sin fp32 [S, 1, D/2] or [B, S, 1, D/2] -> q [B, S, H, D] and k [B, S, KV, D],
    rotated, and v [B, S, KV, D], each in memory of its own. Differentiable in qkv."""
    q, k, v = QKVRopeFunction.apply(qkv, cos, sin, heads, head_dim)
    return q, k, v

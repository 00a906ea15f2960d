"""RMSNorm of each query and key head, then rotary positions (Qwen3), from the fused qkv projection.

    n = x / sqrt(mean(x²) + eps) * weight              x: one head of q or k [D]
    y = (n1 cos - n2 sin, n2 cos + n1 sin)             n1, n2: the halves of n; cos, sin [D/2] of its position

v is a view of qkv, which backward needs anyway. Backward computes the statistics again, which is cheaper than to read
them, and writes the gradient of all of qkv, dv's part too:

    g  = dy rotated back * weight,   dweight = sum over tokens and heads of (dy rotated back) * x * r
    dx = r * (g - x * r² * mean(g * x)),   r = 1 / sqrt(mean(x²) + eps)

Memory-bound. Bytes per token, of b-byte elements, with H query and KV key heads:

    forward     2 (H + KV) D b            302 MB, 71 us at H200's 4.28 TB/s: 16384 tokens, H 32, KV 4, D 128, bf16
    backward    (3 (H + KV) + 2 KV) D b   487 MB, 114 us

The kernels take 82 and 140 us there, Inductor 176 and 370 us: it reads q and k once for the norm and once for the
rotation, and writes the gradients of q, k and v before it concatenates them.

In backward each CTA adds up the gradients of the weights, and a second launch adds up those of the CTAs, in a fixed
order.
"""

from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.column_sums import launch_column_sums
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
from qtrain.kernels.norm.qkv_rope import rotate

FORWARD, BACKWARD = Occupancy(16, 64), Occupancy(10, 96)


# ---- the definition --------------------------------------------------------------------------------------------------


def qk_norm_rope_ref(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """qkv [B, S, (H + 2 KV) D], weights [D], cos, sin fp32 [S, 1, D/2] or [B, S, 1, D/2] -> q [B, S, H, D], k [B, S,
    KV, D] in qkv's dtype; computed in fp32, rounded once."""
    outs = []
    for x, weight in zip(heads_of(qkv, len(q_weight), heads), (q_weight, k_weight), strict=False):
        x = x.float()
        outs.append(rotate(x * _inverse_rms(x, eps) * weight.float(), cos, sin).to(qkv.dtype))
    return outs[0], outs[1]


def qk_norm_rope_backward_ref(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq [B, S, H, D], dk, dv [B, S, KV, D], the rest as in `qk_norm_rope_ref` -> dqkv like qkv, and fp32 [2, D]: the
    gradients of q_weight and k_weight."""
    grads, dweights = [], []
    per_kind = zip(heads_of(qkv, len(q_weight), dq.shape[2]), (q_weight, k_weight), (dq, dk), strict=False)
    for x, weight, dy in per_kind:
        x = x.float()
        r = _inverse_rms(x, eps)
        dn = rotate(dy.float(), cos, -sin)  # by the opposite angle: the transpose of the rotation
        g = dn * weight.float()
        dweights.append((dn * (x * r)).sum((0, 1, 2)))  # [D]
        grads.append((r * (g - x * (r * r * (g * x).mean(-1, keepdim=True)))).to(qkv.dtype))
    return torch.cat([t.flatten(2) for t in (*grads, dv)], dim=-1), torch.stack(dweights)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


# ---- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _inverse_rms_of(first, second, eps, D: tl.constexpr):
    """Of heads in two halves [ROWS, BLOCK] -> [ROWS, 1]."""
    # Masked lanes are 0; divided by D, not by the block.
    return tl.rsqrt(tl.sum(first * first + second * second, 1, keep_dims=True) * (1.0 / D) + eps)


@triton.jit
def _forward_heads(
    x_ptr, weight_ptr, table_ptrs, out_ptr, sizes, eps, HEADS: tl.constexpr, HEADS_PER_TILE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """This CTA's tokens of q, or of k. table_ptrs: cos, sin; sizes: tokens, elements of a row of x, rows of the
    tables."""
    cos_ptr, sin_ptr = table_ptrs
    tokens, width, table_rows = sizes
    D: tl.constexpr = TILE.head_dim
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    HALF: tl.constexpr = D // 2
    TOKENS: tl.constexpr = ROWS // HEADS_PER_TILE
    token_of_row, head = rows_of_tile(HEADS_PER_TILE, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    w1, w2 = load_halves(weight_ptr + column, column < HALF, HALF)
    for start in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        token = start + token_of_row
        inside = (token < tokens) & (column < HALF)
        table = (token % table_rows) * HALF + column
        cos, sin = tl.load(cos_ptr + table, inside, 0.0), tl.load(sin_ptr + table, inside, 0.0)
        token = token.to(tl.int64)  # from here on: qkv may have more than 2**31 elements
        x_ptrs, out_ptrs = x_ptr + token * width + head * D + column, out_ptr + (token * HEADS + head) * D + column
        for _ in range(HEADS // HEADS_PER_TILE):
            x1, x2 = load_halves(x_ptrs, inside, HALF)
            r = _inverse_rms_of(x1, x2, eps, D)
            n1, n2 = x1 * r * w1, x2 * r * w2
            store_halves(out_ptrs, n1 * cos - n2 * sin, n2 * cos + n1 * sin, inside, HALF)
            x_ptrs += HEADS_PER_TILE * D
            out_ptrs += HEADS_PER_TILE * D


@triton.jit
def _qk_norm_rope_kernel(
    # qkv [T, (H + 2 KV) D] bf16 or fp32; weights [D].
    x_ptr, q_weight_ptr, k_weight_ptr,
    # cos, sin fp32 [table_rows, D/2]: token t reads row t % table_rows.
    tables,
    # [T, H, D], [T, KV, D], of qkv's dtype.
    q_ptr, k_ptr, tokens, table_rows, eps, TILE: tl.constexpr,
):  # fmt: skip
    """q, then k. TILE: a `HeadTile`."""
    width: tl.constexpr = (TILE.heads + 2 * TILE.kv_heads) * TILE.head_dim
    sizes = tokens, width, table_rows
    _forward_heads(x_ptr, q_weight_ptr, tables, q_ptr, sizes, eps, TILE.heads, TILE.q_heads, TILE)
    k_x_ptr = x_ptr + TILE.heads * TILE.head_dim
    _forward_heads(k_x_ptr, k_weight_ptr, tables, k_ptr, sizes, eps, TILE.kv_heads, TILE.k_heads, TILE)


@triton.jit
def _backward_heads(
    dy, dv, inputs, table_ptrs, out_ptrs, sizes, eps, HEADS: tl.constexpr, HEADS_PER_TILE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """This CTA's tokens of q, or of k and, where dv's pointer is given, of v, which follows k in x and dx.

    dy, dv: pointer and strides (batch, sequence, head). inputs: x, and its weight. out_ptrs: dx, and this CTA's term of
    the weight's gradient. sizes: tokens, tokens of a sequence, elements of a row of x, rows of the tables."""
    dy_ptr, dy_strides = dy
    dv_ptr, dv_strides = dv
    x_ptr, weight_ptr = inputs
    cos_ptr, sin_ptr = table_ptrs
    dx_ptr, dweight_ptr = out_ptrs
    tokens, seq, width, table_rows = sizes
    D: tl.constexpr = TILE.head_dim
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    HALF: tl.constexpr = D // 2
    TOKENS: tl.constexpr = ROWS // HEADS_PER_TILE
    token_of_row, head = rows_of_tile(HEADS_PER_TILE, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    w1, w2 = load_halves(weight_ptr + column, column < HALF, HALF)  # fp32 [1, BLOCK], in registers for all tokens
    total1, total2 = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        token = start + token_of_row
        inside = (token < tokens) & (column < HALF)
        table = (token % table_rows) * HALF + column
        cos, sin = tl.load(cos_ptr + table, inside, 0.0), tl.load(sin_ptr + table, inside, 0.0)
        batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
        at = token.to(tl.int64) * width + head * D + column
        x_ptrs, dx_ptrs = x_ptr + at, dx_ptr + at
        dy_ptrs = dy_ptr + head_offset(batch, position, head, dy_strides) + column
        if dv_ptr is not None:
            dv_ptrs = dv_ptr + head_offset(batch, position, head, dv_strides) + column
        for _ in range(HEADS // HEADS_PER_TILE):
            x1, x2 = load_halves(x_ptrs, inside, HALF)
            dy1, dy2 = load_halves(dy_ptrs, inside, HALF)
            dn1, dn2 = dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin  # rotated back: the transpose of the rotation
            r = _inverse_rms_of(x1, x2, eps, D)
            g1, g2 = dn1 * w1, dn2 * w2
            # mean(g * x) * r²: the projection of the gradient onto x, which the norm removes.
            mean = tl.sum(g1 * x1 + g2 * x2, 1, keep_dims=True) * (1.0 / D) * r * r
            total1 += dn1 * (x1 * r)
            total2 += dn2 * (x2 * r)
            store_halves(dx_ptrs, r * (g1 - x1 * mean), r * (g2 - x2 * mean), inside, HALF)
            if dv_ptr is not None:
                dv1, dv2 = tl.load(dv_ptrs, inside), tl.load(dv_ptrs + HALF, inside)
                store_halves(dx_ptrs + HEADS * D, dv1, dv2, inside, HALF)
                dv_ptrs += HEADS_PER_TILE * dv_strides[2]
            x_ptrs += HEADS_PER_TILE * D
            dx_ptrs += HEADS_PER_TILE * D
            dy_ptrs += HEADS_PER_TILE * dy_strides[2]
    across = tl.arange(0, BLOCK)
    tl.store(dweight_ptr + across, tl.sum(total1, 0), across < HALF)
    tl.store(dweight_ptr + HALF + across, tl.sum(total2, 0), across < HALF)


@triton.jit
def _qk_norm_rope_backward_kernel(
    # [B, S, H, D], [B, S, KV, D] twice, with strides of batch, sequence and heads; contiguous along D.
    dq_ptr, dk_ptr, dv_ptr, dq_strides, dk_strides, dv_strides,
    # As forward.
    x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    # Like qkv; fp32 [CTAs, 2, D], each CTA's term of the weights' gradients.
    dx_ptr, dweight_ptr, tokens, seq, table_rows, eps, TILE: tl.constexpr,
):  # fmt: skip
    """q, then k and v. TILE: a `HeadTile`."""
    width: tl.constexpr = (TILE.heads + 2 * TILE.kv_heads) * TILE.head_dim
    # The terms are summed by a second launch, in a fixed order: atomics would make gradients depend on timing.
    dweight_ptr += tl.program_id(0) * (2 * TILE.head_dim)
    tables, sizes = (cos_ptr, sin_ptr), (tokens, seq, width, table_rows)
    _backward_heads(
        (dq_ptr, dq_strides), (None, None), (x_ptr, q_weight_ptr), tables, (dx_ptr, dweight_ptr), sizes, eps,
        TILE.heads, TILE.q_heads, TILE,
    )  # fmt: skip
    k_offset: tl.constexpr = TILE.heads * TILE.head_dim
    _backward_heads(
        (dk_ptr, dk_strides), (dv_ptr, dv_strides), (x_ptr + k_offset, k_weight_ptr), tables,
        (dx_ptr + k_offset, dweight_ptr + TILE.head_dim), sizes, eps, TILE.kv_heads, TILE.k_heads, TILE,
    )  # fmt: skip


# ---- launchers -------------------------------------------------------------------------------------------------------


def launch_qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The kernel for `qk_norm_rope_ref`; all contiguous."""
    (batch, seq, width), head_dim = qkv.shape, len(q_weight)
    kv_heads = (width // head_dim - heads) // 2
    q, k = qkv.new_empty(batch, seq, heads, head_dim), qkv.new_empty(batch, seq, kv_heads, head_dim)
    if tokens := batch * seq:
        ctas, tile = head_tiling(qkv.device, tokens, (heads, kv_heads), head_dim, FORWARD.ctas)
        _qk_norm_rope_kernel[(ctas,)](
            qkv, q_weight, k_weight, (cos, sin), q, k, tokens, table_rows=cos.numel() // (head_dim // 2), eps=eps,
            TILE=tile, num_warps=WARPS, maxnreg=FORWARD.registers,
        )  # fmt: skip
    return q, k


def launch_qk_norm_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel for `qk_norm_rope_backward_ref`; dq, dk and dv contiguous along D, the rest contiguous."""
    (batch, seq, heads, head_dim), kv_heads = dq.shape, dk.shape[2]
    dqkv, tokens = torch.empty_like(qkv), batch * seq
    if not tokens:
        return dqkv, qkv.new_zeros(2, head_dim, dtype=torch.float32)
    ctas, tile = head_tiling(qkv.device, tokens, (heads, kv_heads), head_dim, BACKWARD.ctas)
    dweights = qkv.new_empty(ctas, 2, head_dim, dtype=torch.float32)
    _qk_norm_rope_backward_kernel[(ctas,)](
        dq, dk, dv, dq.stride()[:3], dk.stride()[:3], dv.stride()[:3], qkv, q_weight, k_weight, cos, sin, dqkv,
        dweights, tokens, seq, table_rows=cos.numel() // (head_dim // 2), eps=eps, TILE=tile, num_warps=WARPS,
        maxnreg=BACKWARD.registers,
    )  # fmt: skip
    return dqkv, launch_column_sums(dweights.flatten(1)).view(2, head_dim)


# ---- operators -------------------------------------------------------------------------------------------------------


def _empty_qk_norm_rope(qkv, q_weight, heads):
    batch, seq, width = qkv.shape
    kv_heads, head_dim = (width // len(q_weight) - heads) // 2, len(q_weight)
    return qkv.new_empty(batch, seq, heads, head_dim), qkv.new_empty(batch, seq, kv_heads, head_dim)


@operator("qk_norm_rope", fake=_empty_qk_norm_rope)
def _qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    if not qkv.is_cuda or forced() == "ref":
        return qk_norm_rope_ref(qkv, q_weight, k_weight, cos, sin, heads, eps)
    return launch_qk_norm_rope(*contiguous(qkv, q_weight, k_weight, cos, sin), heads=heads, eps=eps)


def _empty_qk_norm_rope_backward(qkv, q_weight):
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return dqkv, qkv.new_empty(2, len(q_weight), dtype=torch.float32)


@operator("qk_norm_rope_backward", fake=_empty_qk_norm_rope_backward)
def qk_norm_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not qkv.is_cuda or forced() == "ref":
        return qk_norm_rope_backward_ref(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps)
    grads = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    return launch_qk_norm_rope_backward(*grads, *contiguous(qkv, q_weight, k_weight, cos, sin), eps=eps)


class QKNormRopeFunction(torch.autograd.Function):
    """One function for q, k and v: so is the gradient of qkv one tensor, with no concatenation."""

    @staticmethod
    def forward(ctx: Any, qkv, q_weight, k_weight, cos, sin, heads, eps):
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        q, k = _qk_norm_rope(qkv, q_weight, k_weight, cos, sin, heads, eps)
        return q, k, heads_of(qkv, len(q_weight), heads)[2]

    @staticmethod
    def backward(ctx: Any, dq, dk, dv):
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        dqkv, dweights = qk_norm_rope_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, ctx.eps)
        dq_weight, dk_weight = dweights.to(q_weight.dtype).unbind()
        return dqkv, dq_weight, dk_weight, None, None, None, None


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, S, (H + 2 KV) D], weights [D], cos, sin fp32 [S, 1, D/2] or [B, S, 1, D/2] -> q [B, S, H, D], normed and
    rotated k [B, S, KV, D], and v, a view of qkv. Differentiable in qkv and the weights."""
    q, k, v = QKNormRopeFunction.apply(qkv, q_weight, k_weight, cos, sin, heads, eps)
    return q, k, v

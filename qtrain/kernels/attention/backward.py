"""The backward pass of attention, for short sequences: two kernels, each with its sums in registers.

    p  = exp(scale * q · kᵀ - lse)      dp = do · vᵀ      ds = p * (dp - delta)      delta = sum(do * o) of a row
    dq = scale * ds · k                 dk = scale * dsᵀ · q                         dv = pᵀ · do

One kernel has a block of queries and walks through the keys before it; the other has a block of keys and walks through
the queries after it, of all heads that share it. So p and dp are computed twice: seven products for the five of
FlashAttention-2 (arXiv:2307.08691), which adds dq in memory instead, in fp32 and in any order, and converts it with a
kernel of its own, as it sums dk and dv of grouped heads. Here every result is written once, in its own dtype, and
always has the same bits. p and ds go from one product's accumulators into the next one's registers.

Blocks with the most work begin first: their number a head grows along the sequence.
"""

import torch
from torch import Tensor

from qtrain.kernels.attention.blocks import (
    LOG2E,
    AttentionTiling,
    VisibleKeys,
    block_of_queries,
    first_keys,
    head_blocks,
    hides_some,
    is_seen,
    load_rows,
    row_blocks,
    statistics_row,
    store_rows,
)
from qtrain.kernels.compiler import tl, triton

QUERIES_TILINGS = {64: AttentionTiling(64, 32, 4, 3, 4), 128: AttentionTiling(64, 64, 4, 2, 2)}
KEYS_TILINGS = {64: AttentionTiling(64, 64, 4, 3, 3), 128: AttentionTiling(64, 64, 4, 2, 2)}
"""By D; the fastest of about a dozen on an H200."""


@triton.jit
def _attention_queries_kernel(
    # [batch, seq, heads * D] in blocks of queries, [batch, seq, KV_HEADS * D] in blocks of keys.
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc,
    # fp32 [batch, heads, padded]; int32 [batch, seq] or None, see `VisibleKeys`.
    lse_ptr, delta_ptr, first_ptr,
    seq, heads, scale,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, TILING: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of a head, and their delta."""
    QUERIES: tl.constexpr = TILING.queries
    KEYS: tl.constexpr = TILING.keys
    item, sequence, head, start = block_of_queries(seq, heads, QUERIES)
    column, kv_column = head * D, head // GROUP * D
    query = tl.arange(0, QUERIES)
    at = statistics_row(item, seq) + start + query
    q, do = load_rows(q_desc, sequence, start, column), load_rows(do_desc, sequence, start, column)
    delta = tl.sum(do.to(tl.float32) * load_rows(o_desc, sequence, start, column).to(tl.float32), 1)
    tl.store(delta_ptr + at, delta)
    lse = tl.load(lse_ptr + at) * LOG2E
    dq = tl.zeros((QUERIES, D), tl.float32)
    first, low, high = first_keys(first_ptr, sequence * seq + start, QUERIES)
    for key_start in tl.range(low // KEYS * KEYS, start + QUERIES if CAUSAL else seq, KEYS):
        k, v = load_rows(k_desc, sequence, key_start, kv_column), load_rows(v_desc, sequence, key_start, kv_column)
        s, dp = tl.dot(q, k.T), tl.dot(do, v.T)
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        if hides_some(key_start, start, high, seq, KEYS, CAUSAL):
            key = key_start + tl.arange(0, KEYS)[None]
            p = tl.where(is_seen(key, start + query[:, None], first[:, None], first_ptr, seq, CAUSAL), p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    store_rows(dq_desc, sequence, start, column, (dq * scale).to(q.dtype))


@triton.jit
def _attention_keys_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc,
    # fp32 [batch * heads, padded] in blocks of queries; int32 [batch, seq] or None, see `VisibleKeys`.
    lse_desc, delta_desc, first_ptr, last_ptr,
    seq, heads, scale,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, TILING: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, which GROUP heads of queries read."""
    QUERIES: tl.constexpr = TILING.queries
    KEYS: tl.constexpr = TILING.keys
    blocks, kv_heads = tl.cdiv(seq, KEYS), heads // GROUP
    all_heads = tl.num_programs(0) // blocks
    start = tl.program_id(0) // all_heads * KEYS
    item = tl.program_id(0) % all_heads
    sequence, kv_head = item // kv_heads, item % kv_heads
    column = kv_head * D
    k, v = load_rows(k_desc, sequence, start, column), load_rows(v_desc, sequence, start, column)
    key, query = start + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    first_query, end = start // QUERIES * QUERIES if CAUSAL else 0, seq
    if last_ptr is not None:
        end = tl.load(last_ptr + sequence * seq + start + KEYS - 1) + 1
    steps = tl.cdiv(end - first_query, QUERIES)
    dk, dv = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    for step in tl.range(0, GROUP * steps):
        head, query_start = kv_head * GROUP + step // steps, first_query + step % steps * QUERIES
        q, do = load_rows(q_desc, sequence, query_start, head * D), load_rows(do_desc, sequence, query_start, head * D)
        lse = lse_desc.load([sequence * heads + head, query_start]) * LOG2E  # [1, QUERIES]
        delta = delta_desc.load([sequence * heads + head, query_start])
        s, dp = tl.dot(k, q.T), tl.dot(v, do.T)  # [KEYS, QUERIES]
        p = tl.exp2(s * (scale * LOG2E) - lse)
        first, _, high = first_keys(first_ptr, sequence * seq + query_start, QUERIES)
        if hides_some(start, query_start, high, seq, KEYS, CAUSAL):
            seen = is_seen(key[:, None], query_start + query[None], first[None], first_ptr, seq, CAUSAL)
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = (p * (dp - delta)).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    store_rows(dk_desc, sequence, start, column, (dk * scale).to(k.dtype))
    store_rows(dv_desc, sequence, start, column, dv.to(v.dtype))


def launch_queries(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    visible: VisibleKeys | None = None,
    causal: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of q [B, S, H, D], and delta fp32 [B, H, padded(S)]; k, v [B, S, KV, D], do, o as q; all of one
    dtype of 16 bits, as `launch_forward` takes them, which gives o and lse. out: memory for the gradient."""
    (batch, seq, heads, head_dim), t = q.shape, QUERIES_TILINGS[q.shape[-1]]
    dq, delta = q.new_empty(q.shape) if out is None else out, torch.empty_like(lse)
    q_blocks, o_blocks, do_blocks, dq_blocks = (head_blocks(x, t.queries) for x in (q, o, do, dq))
    _attention_queries_kernel[(triton.cdiv(seq, t.queries) * batch * heads,)](
        q_blocks, head_blocks(k, t.keys), head_blocks(v, t.keys), o_blocks, do_blocks, dq_blocks, lse, delta,
        visible and visible.first, seq, heads, scale,
        CAUSAL=causal, GROUP=heads // k.shape[2], TILING=t, D=head_dim, **t.options,
    )  # fmt: skip
    return dq, delta


def launch_keys(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    visible: VisibleKeys | None = None,
    causal: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; operands as for `launch_queries`, which computes delta."""
    (batch, seq, heads, head_dim), kv_heads, t = q.shape, k.shape[2], KEYS_TILINGS[q.shape[-1]]
    dk, dv = (k.new_empty(k.shape), v.new_empty(v.shape)) if out is None else out
    k_blocks, v_blocks, dk_blocks, dv_blocks = (head_blocks(x, t.keys) for x in (k, v, dk, dv))
    _attention_keys_kernel[(triton.cdiv(seq, t.keys) * batch * kv_heads,)](
        head_blocks(q, t.queries), k_blocks, v_blocks, head_blocks(do, t.queries), dk_blocks, dv_blocks,
        row_blocks(lse, t.queries), row_blocks(delta, t.queries), *(visible or (None, None)), seq, heads, scale,
        CAUSAL=causal, GROUP=heads // kv_heads, TILING=t, D=head_dim, **t.options,
    )  # fmt: skip
    return dk, dv

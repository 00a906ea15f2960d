"""The forward pass of attention, for short sequences: that of FlashAttention-2 (arXiv:2307.08691), the blocks of
queries with the most keys first."""

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
    padded,
    statistics_row,
    store_rows,
)
from qtrain.kernels.compiler import tl, triton

LEAST = tl.constexpr(-1e30)
FORWARD_TILINGS = {64: AttentionTiling(64, 64, 4, 2, 5), 128: AttentionTiling(128, 64, 8, 3, 1)}
"""By D; the fastest of about a dozen on an H200."""


@triton.jit
def _attention_forward_kernel(
    # [batch, seq, heads * D] in blocks of queries, [batch, seq, KV_HEADS * D] in blocks of keys.
    q_desc, k_desc, v_desc, o_desc,
    # fp32 [batch, heads, padded]; int32 [batch, seq] or None, see `VisibleKeys`.
    lse_ptr, first_ptr, seq, heads, scale,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, TILING: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """o and lse of a block of queries of a head."""
    QUERIES: tl.constexpr = TILING.queries
    KEYS: tl.constexpr = TILING.keys
    item, sequence, head, start = block_of_queries(seq, heads, QUERIES)
    column, kv_column = head * D, head // GROUP * D
    query = tl.arange(0, QUERIES)
    q = load_rows(q_desc, sequence, start, column)
    largest, total = tl.full((QUERIES,), -float("inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    o = tl.zeros((QUERIES, D), tl.float32)
    first, low, high = first_keys(first_ptr, sequence * seq + start, QUERIES)
    for key_start in tl.range(low // KEYS * KEYS, start + QUERIES if CAUSAL else seq, KEYS):
        k, v = load_rows(k_desc, sequence, key_start, kv_column), load_rows(v_desc, sequence, key_start, kv_column)
        s = tl.dot(q, k.T) * (scale * LOG2E)
        if hides_some(key_start, start, high, seq, KEYS, CAUSAL):
            key = key_start + tl.arange(0, KEYS)[None]
            seen = is_seen(key, start + query[:, None], first[:, None], first_ptr, seq, CAUSAL)
            s = tl.where(seen, s, -float("inf"))
        larger = tl.maximum(largest, tl.max(s, 1))
        if first_ptr is not None:
            larger = tl.maximum(larger, LEAST)  # of a query that sees no key of the first blocks
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
        largest = larger
    store_rows(o_desc, sequence, start, column, (o / total[:, None]).to(q.dtype))
    tl.store(lse_ptr + statistics_row(item, seq) + start + query, (largest + tl.log2(total)) / LOG2E)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: VisibleKeys | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q · kᵀ)·v over keys that are not later, or without `causal` over all, of q [B, S, H, D],
    k, v [B, S, KV, D], of 16 bits, the heads of a row side by side, S in multiples of 128 if causal -> [B, S, H, D];
    and the logarithm of the sum of exponentials, fp32 [B, H, padded(S)]."""
    (batch, seq, heads, head_dim), t = q.shape, FORWARD_TILINGS[q.shape[-1]]
    o, lse = q.new_empty(q.shape), torch.empty(batch, heads, padded(seq), dtype=torch.float32, device=q.device)
    _attention_forward_kernel[(triton.cdiv(seq, t.queries) * batch * heads,)](
        head_blocks(q, t.queries), head_blocks(k, t.keys), head_blocks(v, t.keys), head_blocks(o, t.queries), lse,
        visible and visible.first, seq, heads, scale,
        CAUSAL=causal, GROUP=heads // k.shape[2], TILING=t, D=head_dim, **t.options,
    )  # fmt: skip
    return o, lse

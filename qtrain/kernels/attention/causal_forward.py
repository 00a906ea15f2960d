"""The forward pass of causal attention, for short sequences: that of FlashAttention-2 (arXiv:2307.08691), the blocks of
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
    is_seen,
)
from qtrain.kernels.compiler import tl, triton

LEAST = tl.constexpr(-1e30)
FORWARD_TILINGS = {64: AttentionTiling(64, 64, 4, 2, 5), 128: AttentionTiling(128, 64, 8, 3, 1)}
"""By D; the fastest of about a dozen on an H200."""


@triton.jit
def _attention_forward_kernel(
    # [batch * seq, heads * D] in blocks of queries, [batch * seq, KV_HEADS * D] in blocks of keys.
    q_desc, k_desc, v_desc, o_desc,
    # fp32 [batch, heads, seq]; int32 [batch, seq] or None, see `VisibleKeys`.
    lse_ptr, first_ptr, seq, heads, scale, GROUP: tl.constexpr, TILING: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """o and lse of a block of queries of a head."""
    QUERIES: tl.constexpr = TILING.queries
    KEYS: tl.constexpr = TILING.keys
    item, sequence, head, start = block_of_queries(seq, heads, QUERIES)
    row, column, kv_column = sequence * seq + start, head * D, head // GROUP * D
    query = tl.arange(0, QUERIES)
    q = q_desc.load([row, column])
    largest, total = tl.full((QUERIES,), -float("inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    o = tl.zeros((QUERIES, D), tl.float32)
    first, low, high = first_keys(first_ptr, sequence * seq + start, QUERIES)
    for key_start in tl.range(low // KEYS * KEYS, start + QUERIES, KEYS):
        key_row = sequence * seq + key_start
        k, v = k_desc.load([key_row, kv_column]), v_desc.load([key_row, kv_column])
        s = tl.dot(q, k.T) * (scale * LOG2E)
        if (key_start + KEYS > start) | (key_start < high):
            seen = is_seen(key_start + tl.arange(0, KEYS)[None], start + query[:, None], first[:, None], first_ptr)
            s = tl.where(seen, s, -float("inf"))
        larger = tl.maximum(largest, tl.max(s, 1))
        if first_ptr is not None:
            larger = tl.maximum(larger, LEAST)  # of a query that sees no key of the first blocks
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
        largest = larger
    o_desc.store([row, column], (o / total[:, None]).to(q.dtype))
    tl.store(lse_ptr + item.to(tl.int64) * seq + start + query, (largest + tl.log2(total)) / LOG2E)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: VisibleKeys | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q · kᵀ)·v over keys that are not later, of q [B, S, H, D], k, v [B, S, KV, D], of 16 bits and
    contiguous, S in multiples of 128 -> [B, S, H, D]; and the logarithm of the sum of exponentials, fp32 [B, H, S]."""
    (batch, seq, heads, head_dim), t = q.shape, FORWARD_TILINGS[q.shape[-1]]
    o, lse = torch.empty_like(q), torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device)
    _attention_forward_kernel[(seq // t.queries * batch * heads,)](
        head_blocks(q, t.queries), head_blocks(k, t.keys), head_blocks(v, t.keys), head_blocks(o, t.queries), lse,
        visible and visible.first, seq, heads, scale, GROUP=heads // k.shape[2], TILING=t, D=head_dim, **t.options,
    )  # fmt: skip
    return o, lse

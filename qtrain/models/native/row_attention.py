"""Attention in which a row's bits do not depend on which rows are computed beside it.

Libraries choose tiles, and whether the keys are split among CTAs, by the shapes of a call, so that a token's result in
a batch of long sequences differs from that of the same token alone. Under --deterministic keys are added in blocks of
one size from the first key on, in one order, by both the training's forward pass and generation.

On a GPU that is flash attention over ragged batches, which never splits the keys. On a CPU each product is a sum over a
contiguous dimension of a fixed size, which PyTorch adds in one order; this takes more memory and time than a GEMM.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Keys that are added together on a CPU."""
LOWEST = -1e30
"""Instead of -Inf as the highest score of no keys: Inf - Inf is NaN."""


def attend_rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale·q·kᵀ)·v: q [B, H, S, D], k and v [B, KV heads, T, D or v's own] -> [B, H, S, D] in q's dtype.

    seen: bool, broadcasts to [B, 1, S, T]: the keys that a query sees, at least one. fp32, rounded once.
    """
    (batch, heads, rows, d), kv_heads, dtype = q.shape, k.shape[1], q.dtype
    scale = d**-0.5 if scale is None else scale
    pad = -k.shape[2] % BLOCK
    k, v = (F.pad(t.float(), (0, 0, 0, pad)) for t in (k, v))
    seen = F.pad(seen.expand(batch, 1, rows, -1), (0, pad)).unsqueeze(2)  # [B, 1, 1, S, T]
    q = q.float().reshape(batch, kv_heads, heads // kv_heads, rows, d) * scale
    highest = q.new_full(q.shape[:-1], LOWEST)
    total_weight, total = torch.zeros_like(highest), q.new_zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        keys, values = k[:, :, block], v[:, :, block].transpose(2, 3).contiguous()  # [B, KV, 64, D], [B, KV, Dv, 64]
        scores = (q.unsqueeze(-2) * keys[:, :, None, None]).sum(-1)  # [B, KV, H / KV, S, 64]
        scores = scores.masked_fill(~seen[..., block], -torch.inf)
        new = torch.maximum(highest, scores.amax(-1))
        weights, keep = torch.exp(scores - new.unsqueeze(-1)), torch.exp(highest - new)
        total_weight = total_weight * keep + weights.sum(-1)
        added = (weights.unsqueeze(-2) * values[:, :, None, None]).sum(-1)  # [B, KV, H / KV, S, Dv]
        total = total * keep.unsqueeze(-1) + added
        highest = new
    return (total / total_weight.unsqueeze(-1)).flatten(1, 2).to(dtype)


def causal(rows: int, device: torch.device) -> Tensor:
    """bool [S, S]: each query sees the keys up to its own."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


def flash_takes(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention computes such heads: in 16 bits, with values as wide as keys."""
    width = q.shape[-1]
    return q.is_cuda and q.element_size() == 2 and width == v.shape[-1] and width % 8 == 0 and width <= 256


def flash_rows(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float | None = None) -> Tensor:
    """Causal attention on a GPU: q [B, H, S, D], k and v [B, KV heads, T, D] -> [B, H, S, D]. The last of the S queries
    is at the last of the first `lengths` int [B] keys; None: S = T."""
    batch, _, rows, _ = q.shape
    places = k.shape[2]
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * size for size in (rows, places)]
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]  # [B·S, heads, D]
    used = None if lengths is None else lengths.to(torch.int32)
    out, *_ = torch.ops.aten._flash_attention_forward(
        *packed, *starts, rows, places, 0.0, True, False, scale=scale, seqused_k=used
    )
    return out.unflatten(0, (batch, rows)).transpose(1, 2)

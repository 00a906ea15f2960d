"""Attention and its gradients as PyTorch's operations: the definition that the kernels are tested against."""

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


def _scores(q: Tensor, k: Tensor, scale: float, first: Tensor | None, causal: bool) -> Tensor:
    """scale * q · kᵀ, fp32 [B, H, S, S], -inf where a key is not seen."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), _each_head(k, q))
    if not causal:
        return scores
    place = torch.arange(q.shape[1], device=q.device)
    hidden = place > place[:, None]
    if first is not None:
        hidden = hidden | (place < first[..., None])[:, None]
    return scores.masked_fill(hidden, -torch.inf)


def _each_head(t: Tensor, q: Tensor) -> Tensor:
    """k or v as each head of q reads it, fp32 [B, S, H, D]."""
    return t.float().repeat_interleave(q.shape[2] // t.shape[2], 2)


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q · kᵀ over keys that are seen) · v, added in fp32: q [B, S, H, D], k, v [B, S, KV, D] ->
    [B, S, H, D], and the logarithm of the sum of exponentials, fp32 [B, H, S]. first: of `VisibleKeys`; None: a query
    sees all keys that are not later, or without `causal` all."""
    scores = _scores(q, k, scale, first, causal)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), _each_head(v, q))
    return o.to(q.dtype).contiguous(), scores.logsumexp(-1)


def attention_backward_ref(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    first: Tensor | None = None,
    causal: bool = True,
) -> Gradients:
    """Gradients of q, k and v, given that of o; as the table of `backward.py` says."""
    p = (_scores(q, k, scale, first, causal) - lse[..., None]).exp()
    dp = torch.einsum("bqhd,bkhd->bhqk", do.float(), _each_head(v, q))
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2)
    ds = scale * p * (dp - delta[..., None])
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, _each_head(k, q))
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", a, b.float()) for a, b in ((ds, q), (p, do)))
    dk, dv = (t.unflatten(2, (k.shape[2], -1)).sum(3) for t in (dk, dv))
    dq, dk, dv = (t.to(q.dtype).contiguous() for t in (dq, dk, dv))
    return dq, dk, dv

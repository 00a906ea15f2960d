"""Causal attention as one operator. Forward: cuDNN's kernel, which is no slower than ours (`causal_forward.py`) but
takes no documents or windows. Backward: the faster one of cuDNN's and of ours (`causal_backward.py`)."""

from typing import Any

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_wgmma
from qtrain.kernels.attention.blocks import LONGEST_BLOCK, VisibleKeys
from qtrain.kernels.attention.causal_backward import KEYS_TILINGS, launch_keys, launch_queries
from qtrain.kernels.attention.causal_forward import launch_forward
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator

CUDNN, OWN = "cudnn", "triton"
LONGEST_SEQUENCE = 8192
"""Beyond it computing p and dp twice costs more than it saves, and timing both passes takes seconds."""

Gradients = tuple[Tensor, Tensor, Tensor]


def takes_causal_attention(device: torch.device, dtype: torch.dtype, seq: int, head_dim: int) -> bool:
    """Whether there are kernels: on Hopper, for bf16, D of 64 or 128, S a multiple of 128 up to LONGEST_SEQUENCE."""
    sizes = head_dim in KEYS_TILINGS and 0 < seq <= LONGEST_SEQUENCE and seq % LONGEST_BLOCK == 0
    taken = device.type == "cuda" and dtype == torch.bfloat16 and sizes
    return taken and forced() != "ref" and has_wgmma(device)


def supports_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take q, k and v [B, heads, S, D]."""
    alike = q.shape[-1] == k.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype and q.numel() > 0
    return alike and takes_causal_attention(q.device, q.dtype, *q.shape[2:])


def _scores(q: Tensor, k: Tensor, scale: float, first: Tensor | None) -> Tensor:
    """scale * q · kᵀ, fp32 [B, H, S, S], -inf where a key is not seen."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), _each_head(k, q))
    place = torch.arange(q.shape[1], device=q.device)
    hidden = place > place[:, None]
    if first is not None:
        hidden = hidden | (place < first[..., None])[:, None]
    return scores.masked_fill(hidden, -torch.inf)


def _each_head(t: Tensor, q: Tensor) -> Tensor:
    """k or v as each head of q reads it, fp32 [B, S, H, D]."""
    return t.float().repeat_interleave(q.shape[2] // t.shape[2], 2)


def causal_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q · kᵀ over keys that are seen) · v, added in fp32: q [B, S, H, D], k, v [B, S, KV, D] ->
    [B, S, H, D], and the logarithm of the sum of exponentials, fp32 [B, H, S]. first: of `VisibleKeys`; None: a query
    sees all keys that are not later."""
    scores = _scores(q, k, scale, first)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), _each_head(v, q))
    return o.to(q.dtype).contiguous(), scores.logsumexp(-1)


def causal_attention_backward_ref(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    first: Tensor | None = None,
) -> Gradients:
    """Gradients of q, k and v, given that of o; as the table of `causal_backward.py` says."""
    p = (_scores(q, k, scale, first) - lse[..., None]).exp()
    dp = torch.einsum("bqhd,bkhd->bhqk", do.float(), _each_head(v, q))
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2)
    ds = scale * p * (dp - delta[..., None])
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, _each_head(k, q))
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", a, b.float()) for a, b in ((ds, q), (p, do)))
    dk, dv = (t.unflatten(2, (k.shape[2], -1)).sum(3) for t in (dk, dv))
    dq, dk, dv = (t.to(q.dtype).contiguous() for t in (dq, dk, dv))
    return dq, dk, dv


@operator("causal_attention", fake=lambda q: (torch.empty_like(q), q.new_empty(_lse_shape(q), dtype=torch.float32)))
def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return causal_attention_ref(q, k, v, scale, first)
    visible = _visible(first, last)
    if visible is None and forced() != OWN and _has_cudnn():
        return _forward_cudnn(q, k, v, scale)
    return launch_forward(q, k, v, scale, visible)


def _has_cudnn() -> bool:
    """Whether this build of PyTorch has cuDNN's attention, and it is not turned off."""
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


def _visible(first: Tensor | None, last: Tensor | None) -> VisibleKeys | None:
    return None if first is None or last is None else VisibleKeys(first, last)


def _forward_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, compute_log_sumexp=True, is_causal=True, scale=scale
    )
    return o.transpose(1, 2).contiguous(), lse.view(_lse_shape(q))


def _lse_shape(q: Tensor) -> tuple[int, int, int]:
    """[B, H, S] of q [B, S, H, D]."""
    return q.shape[0], q.shape[2], q.shape[1]


@operator("causal_attention_backward", fake=lambda q, k, v: tuple(torch.empty_like(t) for t in (q, k, v)))
def causal_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    first: Tensor | None = None,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `causal_attention_backward_ref`; all contiguous."""
    if not q.is_cuda:
        return causal_attention_backward_ref(do, q, k, v, o, lse, scale, first)
    operands, visible = (do.contiguous(), q, k, v), _visible(first, last)

    def run(name: str) -> Gradients:
        if name == CUDNN:
            return _backward_cudnn(*operands, o, lse, scale)
        dq, delta = launch_queries(*operands, o, lse, scale, visible)
        return dq, *launch_keys(*operands, lse, delta, scale, visible)

    batch, seq, heads, head_dim = q.shape
    key = (batch * heads * seq, seq, head_dim, heads // k.shape[2], q.dtype)  # of all q·kᵀ: M, N and K
    names = [OWN, CUDNN] if visible is None and _has_cudnn() else [OWN]
    return run(choose("attention_backward", key, names, run))


def _backward_cudnn(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
    heads_first = (t.transpose(1, 2) for t in (do, q, k, v, o))
    seed = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    found = backward(
        *heads_first, lse[..., None], seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, True, scale=scale
    )
    dq, dk, dv = (t.transpose(1, 2).contiguous() for t in found)
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, first, last = inputs
    ctx.save_for_backward(q, k, v, *output, first, last)


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *operands, first, last = ctx.saved_tensors
    return *causal_attention_backward(do, *operands, ctx.scale, first, last), None, None, None


OPERATOR = torch.ops.qtrain.causal_attention.default
_causal_attention.register_autograd(_gradients, setup_context=_save)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: VisibleKeys | None = None) -> Tensor:
    """softmax(scale * q · kᵀ)·v over keys that are seen, of what `supports_causal_attention` says: q [B, H, S, D], k, v
    [B, KV heads, S, D] -> [B, H, S, D]. visible: None: all that are not later. Differentiable."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return _causal_attention(q, k, v, scale, *(visible or (None, None)))[0].transpose(1, 2)

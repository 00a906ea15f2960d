"""Causal attention as one operator. Forward: cuDNN's kernel, which is no slower than ours (`forward.py`) but takes no
documents or windows. Backward: the faster one of cuDNN's and of ours (`backward.py`)."""

from typing import Any

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_wgmma
from qtrain.kernels.attention.backward import KEYS_TILINGS, launch_keys, launch_queries
from qtrain.kernels.attention.blocks import LONGEST_BLOCK, VisibleKeys
from qtrain.kernels.attention.cudnn import CUDNN, OWN, backward_cudnn, forward_cudnn, has_cudnn
from qtrain.kernels.attention.forward import launch_forward
from qtrain.kernels.attention.reference import Gradients, attention_backward_ref, attention_ref
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator

LONGEST_SEQUENCE = 8192
"""Beyond it computing p and dp twice costs more than it saves, and timing both passes takes seconds."""


def takes_causal_attention(device: torch.device, dtype: torch.dtype, seq: int, head_dim: int) -> bool:
    """Whether there are kernels: on Hopper, for bf16, D of 64 or 128, S a multiple of 128 up to LONGEST_SEQUENCE."""
    sizes = head_dim in KEYS_TILINGS and 0 < seq <= LONGEST_SEQUENCE and seq % LONGEST_BLOCK == 0
    taken = device.type == "cuda" and dtype == torch.bfloat16 and sizes
    return taken and forced() != "ref" and has_wgmma(device)


def supports_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take q, k and v [B, heads, S, D]."""
    alike = q.shape[-1] == k.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype and q.numel() > 0
    return alike and takes_causal_attention(q.device, q.dtype, *q.shape[2:])


def _empty_causal_attention(q):
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@operator("causal_attention", fake=_empty_causal_attention)
def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return attention_ref(q, k, v, scale, first)
    visible = _visible(first, last)
    if visible is None and forced() != OWN and has_cudnn():
        return forward_cudnn(q, k, v, scale, True)
    return launch_forward(q, k, v, scale, visible)


def _visible(first: Tensor | None, last: Tensor | None) -> VisibleKeys | None:
    return None if first is None or last is None else VisibleKeys(first, last)


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
    """As `attention_backward_ref`; all contiguous."""
    if not q.is_cuda:
        return attention_backward_ref(do, q, k, v, o, lse, scale, first)
    operands, visible = (do.contiguous(), q, k, v), _visible(first, last)

    def run(name: str) -> Gradients:
        if name == CUDNN:
            return backward_cudnn(*operands, o, lse, scale, True)
        dq, delta = launch_queries(*operands, o, lse, scale, visible)
        return dq, *launch_keys(*operands, lse, delta, scale, visible)

    batch, seq, heads, head_dim = q.shape
    key = (batch * heads * seq, seq, head_dim, heads // k.shape[2], q.dtype)  # of all q·kᵀ: M, N and K
    names = [OWN, CUDNN] if visible is None and has_cudnn() else [OWN]
    return run(choose("attention_backward", key, names, run))


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

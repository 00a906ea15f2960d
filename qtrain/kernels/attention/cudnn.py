"""cuDNN's attention, by PyTorch's operators, on q [B, S, H, D], k and v [B, S, KV, D]."""

from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.attention.reference import Gradients

CUDNN, OWN = "cudnn", "triton"
"""Implementations that are timed against each other: cuDNN's kernels, and this package's."""


def has_cudnn() -> bool:
    """Whether this build of PyTorch has cuDNN's attention, and it is not turned off."""
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


def forward_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """o [B, S, H, D] and the logarithm of the sum of exponentials, fp32 [B, H, S]."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    return o.transpose(1, 2).contiguous(), lse.view(q.shape[0], q.shape[2], q.shape[1])


def backward_cudnn(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> Gradients:
    heads_first, rows = (t.transpose(1, 2) for t in (do, q, k, v, o)), lse.contiguous()[..., None]
    seed = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    found = backward(*heads_first, rows, seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale)
    dq, dk, dv = (t.transpose(1, 2).contiguous() for t in found)
    return dq, dk, dv

"""Attention of all queries to all keys, q, k and v side by side as one product leaves them: as in an image's encoder.

Either pass is the faster one of cuDNN's kernels and ours. Ours waste less of short sequences that are no multiple of
128 (257 tokens, a ViT's of 224 x 224 with patches of 14), read q, k and v where they are, and write their gradients
side by side, without a concatenation: for ViT-giant and 64 images that is 300 MB a layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.core.hardware.capabilities import has_wgmma
from qtrain.kernels.attention.backward import KEYS_TILINGS, launch_keys, launch_queries
from qtrain.kernels.attention.blocks import padded
from qtrain.kernels.attention.cudnn import CUDNN, OWN, backward_cudnn, forward_cudnn, has_cudnn
from qtrain.kernels.attention.forward import launch_forward
from qtrain.kernels.attention.reference import attention_backward_ref, attention_ref
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator

LONGEST_SEQUENCE = 1024
"""Beyond it the waste of short sequences is small, and PyTorch's own choice as good."""


def takes_packed_attention(qkv: Tensor) -> bool:
    """Whether there are kernels for qkv [B, S, 3, H, D]: on Hopper, for bf16, D of 64 or 128, S of 2 (cuDNN's least) to
    LONGEST_SEQUENCE."""
    sizes = qkv.shape[-1] in KEYS_TILINGS and 1 < qkv.shape[1] <= LONGEST_SEQUENCE and qkv.numel() > 0
    return qkv.is_cuda and qkv.dtype == torch.bfloat16 and sizes and forced() != "ref" and has_wgmma(qkv.device)


def _key(qkv: Tensor) -> tuple[Any, ...]:
    """Of a choice: of all q·kᵀ M, N and K, and the dtype."""
    batch, seq, _, heads, head_dim = qkv.shape
    return batch * heads * seq, seq, head_dim, qkv.dtype


def _names() -> list[str]:
    return [OWN, CUDNN] if has_cudnn() else [OWN]


def _empty_packed_attention(qkv):
    batch, seq, _, heads, head_dim = qkv.shape
    lse = qkv.new_empty(batch, heads, padded(seq), dtype=torch.float32)
    return qkv.new_empty(batch, seq, heads, head_dim), lse


@operator("packed_attention", fake=_empty_packed_attention)
def _packed_attention(qkv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.contiguous().unbind(2)
    if not qkv.is_cuda:
        return _with_padding(*attention_ref(q, k, v, scale, causal=False))

    def run(name: str) -> tuple[Tensor, Tensor]:
        if name == CUDNN:
            return _with_padding(*forward_cudnn(q, k, v, scale, causal=False))
        return launch_forward(q, k, v, scale, causal=False)

    return run(choose("packed_attention", _key(qkv), _names(), run))


def _with_padding(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse [B, H, S] as our kernels leave and read it."""
    return o, F.pad(lse, (0, padded(lse.shape[-1]) - lse.shape[-1]))


@operator("packed_attention_backward", fake=lambda qkv: torch.empty_like(qkv, memory_format=torch.contiguous_format))
def packed_attention_backward(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, scale: float) -> Tensor:
    """The gradient of qkv [B, S, 3, H, D], given that of o [B, S, H, D]. lse: fp32 [B, H, padded(S)]."""
    do, (q, k, v) = do.contiguous(), qkv.contiguous().unbind(2)
    without_padding = do, q, k, v, o, lse[..., : qkv.shape[1]], scale
    if not qkv.is_cuda:
        return torch.stack(attention_backward_ref(*without_padding, causal=False), 2)

    def run(name: str) -> Tensor:
        if name == CUDNN:
            return torch.stack(backward_cudnn(*without_padding, causal=False), 2)
        dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        dq, dk, dv = dqkv.unbind(2)
        _, delta = launch_queries(do, q, k, v, o, lse, scale, causal=False, out=dq)
        launch_keys(do, q, k, v, lse, delta, scale, causal=False, out=(dk, dv))
        return dqkv

    return run(choose("packed_attention_backward", _key(qkv), _names(), run))


def _save(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.scale = inputs
    ctx.save_for_backward(qkv, *output)


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return packed_attention_backward(do, *ctx.saved_tensors, ctx.scale), None


PACKED_OPERATOR = torch.ops.qtrain.packed_attention.default
_packed_attention.register_autograd(_gradients, setup_context=_save)


def packed_attention(qkv: Tensor, scale: float) -> Tensor:
    """softmax(scale * q · kᵀ)·v of qkv [B, S, 3, H, D], of what `takes_packed_attention` says -> [B, S, H, D].
    Differentiable."""
    return _packed_attention(qkv, scale)[0]

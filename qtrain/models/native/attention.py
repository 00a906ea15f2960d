"""Causal grouped-query attention with rotary positions, over fused q, k, v.

Without a mask: on CUDA cuDNN's kernels or our own (`kernels/attention`), whichever are faster, elsewhere PyTorch's.
With documents or a sliding window: on a CPU a boolean mask; on CUDA our own kernels, or flex_attention over a block
mask where they do not take the heads. What is seen is computed once per forward, shared by all layers, and empty
blocks are skipped.
"""

import functools
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from qtrain.kernels.attention.blocks import VisibleKeys
from qtrain.kernels.attention.causal import causal_attention, supports_causal_attention
from qtrain.kernels.norm.qk_norm_rope import qk_norm_rope
from qtrain.kernels.norm.qkv_rope import qkv_rope, rotate
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.row_attention import attend_rows, causal, flash_rows, flash_takes

Mask = Tensor | BlockMask | VisibleKeys | None

_DETERMINISTIC_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CUDA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, *_DETERMINISTIC_BACKENDS]  # cuDNN's backward adds with atomics

_compiled = functools.cache(torch.compile)  # uncompiled, flex_attention and its mask would materialize [B, H, S, S]


def attention_mask(
    doc_ids: Tensor | None,
    batch: int,
    seq_len: int,
    window: int | None,
    device: torch.device,
    own_kernels: bool = False,
) -> Mask:
    """Which keys a query sees: bool [B or 1, 1, S, S] on CPU, VisibleKeys for our own kernels on CUDA, or else a
    BlockMask; None for plain causal attention.

    doc_ids [B, S]: attention stays within equal ids. window: it stays within the last `window` positions.
    """
    # It hides nothing then: without documents the causal kernels need no mask.
    if window is not None and seq_len <= window:
        window = None
    if doc_ids is None and window is None:
        return None

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = query >= key
        if window is not None:
            keep = keep & (query - key < window)
        if doc_ids is not None:
            keep = keep & (doc_ids[b, query] == doc_ids[b, key])
        return keep

    if own_kernels:
        return VisibleKeys.make(batch, seq_len, doc_ids, window, device)
    if device.type == "cuda":
        # None: one mask for the whole batch, as for all heads.
        rows = None if doc_ids is None else batch
        return _compiled(create_block_mask)(sees, rows, None, seq_len, seq_len, device=device.type)
    # [B, 1, 1, 1] against queries [S, 1] and keys [S].
    b = torch.arange(1 if doc_ids is None else batch, device=device)[:, None, None, None]
    positions = torch.arange(seq_len, device=device)
    return sees(b, b, positions[:, None], positions)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """softmax(scale·q·kᵀ)·v over visible keys: q [B, H, S, D], k and v [B, KV heads, S, D or v's own] -> [B, H, S, D].

    scale: None: 1/√D."""
    own_scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(mask, VisibleKeys):
        return causal_attention(q, k, v, own_scale, mask)
    grouped = q.shape[1] != k.shape[1]
    in_one_order = torch.are_deterministic_algorithms_enabled()
    if in_one_order and not q.is_cuda and not isinstance(mask, BlockMask):
        return attend_rows(q, k, v, causal(q.shape[2], q.device) if mask is None else mask, scale)
    if isinstance(mask, BlockMask):
        # In a compiled layer it is traced with the rest; elsewhere it is compiled by itself.
        flex = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
        return flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    if in_one_order and not torch.is_grad_enabled() and flash_takes(q, v):
        return flash_rows(q, k, v, None, scale)
    if not in_one_order and torch.is_grad_enabled() and supports_causal_attention(q, k, v):
        return causal_attention(q, k, v, own_scale)
    if q.is_cuda:
        backends = _DETERMINISTIC_BACKENDS if in_one_order else _CUDA_BACKENDS
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


class SequenceInfo(NamedTuple):
    """What every layer is told of the sequences, apart from the residual stream."""

    batch: int
    seq_len: int
    cos: Tensor
    sin: Tensor
    """Rotary tables [S or B, S, 1, D/2]."""
    mask: Mask = None
    sharded: bool = False
    """Whether processes shard the stream along its batch * seq_len tokens (sequence and context parallelism)."""


class SequencePart(Protocol):
    """Which tokens of each sequence this process computes, where several compute a sequence together."""

    def divides(self, seq_len: int) -> bool:
        """Whether sequences of this length have a part for each process."""
        ...

    def own(self, t: Tensor, dim: int = 1) -> Tensor:
        """This process's part of t, along the dimension of the sequence."""
        ...

    def total(self, t: Tensor) -> Tensor:
        """The sum over the processes."""
        ...


class KVCache(Protocol):
    """The interface of a cache of keys and values during generation."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """`attend`, over the keys and values that are cached too; k and v join them."""
        ...


class Attention(nn.Module):
    """Grouped-query attention (GQA), [B, S, C] -> [B, S, C]. `qkv` holds the rows of q, k, then v."""

    q_norm: Any
    k_norm: Any
    """An nn.RMSNorm or a parallel kind of it, None where the config has no `qk_norm`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.split_sizes = [config.q_size, config.kv_size, config.kv_size]
        self.projections = {"qkv": self.split_sizes}  # `parameter_groups` reads it
        self.qkv = nn.Linear(config.hidden_size, config.qkv_size, bias=config.qkv_bias)
        self.norms_heads = config.qk_norm == "heads"
        # Over each head alone, or over all heads.
        q_width, k_width = (config.head_dim,) * 2 if self.norms_heads else (config.q_size, config.kv_size)
        self.q_norm = nn.RMSNorm(q_width, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(k_width, eps=config.rms_norm_eps) if config.qk_norm else None
        self.sub_norm = nn.RMSNorm(config.q_size, eps=config.rms_norm_eps) if config.sub_norm else None
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        self.cache: KVCache | None = None  # set during generation (`generation/reader.py`)

    def forward(self, x: Tensor, info: SequenceInfo) -> Tensor:
        return self.attend(self.qkv(x), info)

    def attend(self, qkv: Tensor, info: SequenceInfo) -> Tensor:
        """Everything after `qkv`."""
        q, k, v = (t.transpose(1, 2) for t in self._heads(qkv, info.cos, info.sin))
        y = self.over_keys(q, k, v, info).transpose(1, 2).flatten(2)  # [B, S, H·D]
        return self.o_proj(y if self.sub_norm is None else self.sub_norm(y))

    def over_keys(self, q: Tensor, k: Tensor, v: Tensor, info: SequenceInfo) -> Tensor:
        """`attend` over the keys that there are; parallel kinds bring those of other processes."""
        return (attend if self.cache is None else self.cache.attend)(q, k, v, info.mask)

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, S, heads, D] of qkv [B, S, C]; q and k normed, where the model norms them, and rotated."""
        heads = self.split_sizes[0] // self.head_dim
        if self.norms_heads and qkv.is_cuda:
            return qk_norm_rope(qkv, self.q_norm.weight, self.k_norm.weight, cos, sin, heads, self.q_norm.eps)
        if self.q_norm is None:
            return qkv_rope(qkv, cos, sin, heads, self.head_dim)
        q, k, v = qkv.split(self.split_sizes, dim=-1)
        if not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.norms_heads:  # PyTorch's operations are faster than the kernel's reference
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

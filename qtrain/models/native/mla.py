"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are projected from a narrow vector.

    [q_latent, kv_latent, k_rope] = qkv_a(x)            one linear, which reads x once
    q = q_b(norm(q_latent))                             per head: [plain, rope]
    [k_plain, v] = kv_b(norm(kv_latent))                per head
    k = [k_plain, rotate(k_rope)]                       k_rope is one for all heads
    y = o_proj(softmax(scale · q·kᵀ) · v)

Without a latent vector of the queries, `qkv_a` holds the rows of q itself in its place. Pairs that the checkpoint
stores as neighbors are rotated as halves: queries and keys are permuted alike, so their products are the same.
"""

import torch
from torch import Tensor, nn

from qtrain.kernels.norm.qkv_rope import rotate
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import KVCache, SequenceInfo, attend

LATENT_NORM_EPS = 1e-6
"""Of the norms of latent vectors, which do not follow the config's."""


class MultiHeadLatentAttention(nn.Module):
    """[B, S, C] -> [B, S, C]."""

    cache: KVCache | None = None  # set during generation: keys and values as they are attended to

    def __init__(self, config: ModelConfig):
        super().__init__()
        latent, heads = config.latent, config.num_attention_heads
        self.latent = latent
        self.scale = config.rope.logit_scale * latent.head_dim**-0.5
        self.split_sizes = [latent.q_rank or config.q_size, latent.kv_rank, latent.rope_dim]
        self.qkv_a = nn.Linear(config.hidden_size, sum(self.split_sizes), bias=False)
        self.q_norm = nn.RMSNorm(latent.q_rank, eps=LATENT_NORM_EPS) if latent.q_rank else None
        self.q_b = nn.Linear(latent.q_rank, config.q_size, bias=False) if latent.q_rank else None
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=LATENT_NORM_EPS)
        self.kv_b = nn.Linear(latent.kv_rank, heads * (latent.plain_dim + latent.value_dim), bias=False)
        self.o_proj = nn.Linear(config.value_size, config.hidden_size, bias=False)
        # `parameter_groups` reads it; the key's rotated part belongs to the projection of the latent vector.
        self.projections = {"qkv_a": [self.split_sizes[0], latent.kv_rank + latent.rope_dim]}

    def forward(self, x: Tensor, info: SequenceInfo) -> Tensor:
        latent = self.latent
        q, kv, k_rope = self.qkv_a(x).split(self.split_sizes, dim=-1)
        if self.q_b is not None and self.q_norm is not None:
            q = self.q_b(self.q_norm(q))
        q = q.unflatten(-1, (-1, latent.head_dim))  # [B, S, H, D]
        # [B, S, H, plain_dim + value_dim]
        kv = self.kv_b(self.kv_norm(kv)).unflatten(-1, (-1, latent.plain_dim + latent.value_dim))
        q_plain, q_rope = q.split([latent.plain_dim, latent.rope_dim], dim=-1)
        k_plain, v = kv.split([latent.plain_dim, latent.value_dim], dim=-1)
        # The key's rotated part is one head, [B, S, 1, rope_dim], which all heads share below.
        q_rope, k_rope = (rotate(self._halves(t), info.cos, info.sin) for t in (q_rope, k_rope.unsqueeze(2)))
        q = torch.cat((q_plain, q_rope), dim=-1)
        k = torch.cat((k_plain, k_rope.expand(-1, -1, k_plain.shape[2], -1)), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o_proj(self.over_keys(q, k, v, info).transpose(1, 2).flatten(2))

    def over_keys(self, q: Tensor, k: Tensor, v: Tensor, info: SequenceInfo) -> Tensor:
        """As in `Attention`."""
        return (attend if self.cache is None else self.cache.attend)(q, k, v, info.mask, self.scale)

    def _halves(self, x: Tensor) -> Tensor:
        """[..., rope_dim] with the first elements of all pairs, then the second ones."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.latent.interleaved else x

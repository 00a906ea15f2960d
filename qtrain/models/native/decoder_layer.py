"""A layer of the native decoder: pre-norm attention and gated MLP or mixture of experts, each with its residual."""

from typing import Any

import torch
from torch import Tensor, nn

from qtrain.kernels.norm.residual_norm import residual_norm
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import Attention, SequenceInfo
from qtrain.models.native.mla import MultiHeadLatentAttention
from qtrain.models.native.mlp import MLP
from qtrain.models.native.mlp_chunks import run_in_chunks
from qtrain.models.native.moe import MoE, Routed
from qtrain.models.native.recompute import LayerRegions
from qtrain.models.native.router import RouterLosses


class ResidualNorm(nn.RMSNorm):
    """The stream [..., C] -> itself, for the residual, and its RMSNorm."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert self.eps is not None
        return residual_norm(x, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """One layer, [B, S, C] -> [B, S, C]; with a mixture of experts -> Routed. Given a `delta` [B, S, C] too, it adds
    that to x first, and leaves its own last sum as two terms. router_losses: of a mixture; None: the MLP is a dense
    one. `regions`: what its backward recomputes instead of keeping. `mlp_chunks`: the chunks of tokens that a dense MLP
    runs in, if the layer is recomputed as a whole; 0: all tokens at once."""

    def __init__(self, config: ModelConfig, router_losses: RouterLosses | None = None):
        super().__init__()
        self.attn_norm = ResidualNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = Attention(config) if config.mla is None else MultiHeadLatentAttention(config)
        self.mlp_norm = ResidualNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config) if router_losses is None else MoE(config, router_losses)
        self.regions = LayerRegions()
        self.mlp_chunks = 0

    def forward(
        self, x: Tensor, info: SequenceInfo, delta: Tensor | None = None
    ) -> Tensor | Routed | tuple[Tensor, ...]:
        if self.mlp_chunks:
            return run_in_chunks(self, x, info, self.mlp_chunks)
        if delta is not None:
            return self._mlp_terms(self.attention_half(x + delta, info), info)
        return self.regions.layer(self._forward, x, info)

    def _forward(self, x: Tensor, info: SequenceInfo) -> Tensor | Routed:
        return self.mlp_half(self.attention_half(x, info), info)

    def attention_half(self, x: Tensor, info: SequenceInfo) -> Tensor:
        x, normed = self.attn_norm(x)
        return x + self.regions.attention(self.attn, normed, info)

    def mlp_half(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor | Routed:
        x, y, *router_out = self._mlp_terms(x, info)
        return (x + y, *router_out) if router_out else x + y

    def _mlp_terms(self, x: Tensor, info: SequenceInfo | None) -> tuple[Tensor, ...]:
        """The terms of the stream that leaves, and with a mixture what else it returns."""
        x, normed = self.mlp_norm(x)
        return x, *outputs(self.regions.mlp(self.mlp, normed, info))

    def compile(self, **options: Any) -> None:
        if not self.mlp_chunks:
            super().compile(**options)
            return
        # The loop over chunks stays in Python: all chunks share the code of one half (`mlp_chunks.py`).
        self.attention_half = torch.compile(self.attention_half, **options)
        self.mlp_half = torch.compile(self.mlp_half, **options)


class NoDelta(torch.autograd.Function):
    """x -> zeros like it, which have a gradient where x has one: else the first layer would be compiled apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


def outputs(layer_out: Tensor | Routed) -> tuple[Tensor, ...]:
    """The stream that leaves a layer, and with a mixture what else it returns."""
    return layer_out if isinstance(layer_out, tuple) else (layer_out,)

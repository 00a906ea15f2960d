"""The native decoder: embedding, pre-norm layers of attention and gated MLP, norm, head.

Projections that read the same input are one linear (`qkv`, `gate_up`): the input is quantized once, and GEMMs are
larger. Linears are always called as modules, so they can be swapped for quantized ones after the model is built.
"""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qtrain.kernels.swiglu.swiglu import swiglu
from qtrain.models.attention import Attention, Mask, attention_mask
from qtrain.models.config import ModelConfig
from qtrain.models.loss import LossSums, linear_cross_entropy
from qtrain.models.rope import document_positions, rope_tables
from qtrain.models.selective_recompute import selective_contexts
from qtrain.quant import supports_swiglu_mlp, swiglu_mlp

Recompute = Literal["none", "selective", "full"]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [B, S, C] -> [B, S, C]. `gate_up` holds the rows of gate, then up."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.fused_rows = {"gate_up": [config.intermediate_size] * 2}  # as in `Attention`
        self.sub_norm = nn.RMSNorm(config.intermediate_size, eps=config.rms_norm_eps) if config.sub_norm else None
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.sub_norm is None and supports_swiglu_mlp(self.gate_up, self.down_proj):
            return swiglu_mlp(self.gate_up, self.down_proj, x)
        gate_up = self.gate_up(x)  # [B, S, 2I]
        if x.is_cuda:
            y = swiglu(gate_up)
        else:  # PyTorch's operations are faster than the kernel's reference
            gate, up = gate_up.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return self.down_proj(y if self.sub_norm is None else self.sub_norm(y))


class DecoderLayer(nn.Module):
    """One layer, [B, S, C] -> [B, S, C]. `recompute`: what its backward recomputes instead of keeping."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x, cos, sin, mask)
        run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # a layer has no dropout
        if self.recompute == "selective":
            return run(self._forward, x, cos, sin, mask, context_fn=selective_contexts)
        return run(self._forward, x, cos, sin, mask)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A causal language model.

    `loss_chunks` (0: chosen by size) and `z_loss` are read at every call; see `linear_cross_entropy`.
    """

    fullgraph = True  # a graph break in a layer is a bug

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.loss_chunks = 0
        self.z_loss = 0.0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's weight with the head, if the config says so. Needed again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def add_sub_norms(self, flag: str) -> None:
        """Add BitNet's norms, with weights of 1, before each output projection, unless they exist.

        UserError naming `flag` where the model could not be exported (`ModelConfig.with_sub_norms`).
        """
        if self.config.sub_norm:
            return
        self.config = self.config.with_sub_norms(flag)
        for layer in self.layers:
            for module, output in ((layer.attn, layer.attn.o_proj), (layer.mlp, layer.mlp.down_proj)):
                like = {"device": output.weight.device, "dtype": output.weight.dtype}
                module.sub_norm = nn.RMSNorm(output.in_features, eps=self.config.rms_norm_eps, **like)

    def set_recompute(self, mode: Recompute) -> None:
        for layer in self.layers:
            layer.recompute = mode

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Tensor | LossSums:
        """input_ids, labels, doc_ids: int [B, S].

        Without labels: logits [B, S, V] in the model's dtype. With labels (already shifted; -100 is ignored): sums over
        the trained tokens. doc_ids: attention stays within equal ids, and positions restart at each document.
        """
        batch, seq_len = input_ids.shape
        x = self.embed_tokens(input_ids)  # [B, S, C]
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, seq_len, x.device)
        if doc_ids is not None:
            positions = document_positions(doc_ids)
            cos, sin = cos[positions], sin[positions]  # [B, S, D/2]
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        mask = attention_mask(doc_ids, batch, seq_len, self.config.sliding_window, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        x = self.norm(x)
        if labels is None:
            return self.lm_head(x)
        return linear_cross_entropy(x.flatten(0, 1), self.lm_head, labels.flatten(), self.loss_chunks, self.z_loss)

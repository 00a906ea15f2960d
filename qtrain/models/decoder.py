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

from qtrain.distributed.tensor_group import TensorGroup
from qtrain.kernels.swiglu.swiglu import swiglu
from qtrain.models.attention import Attention, Mask, attention_mask
from qtrain.models.config import ModelConfig
from qtrain.models.loss import LossSums, linear_cross_entropy
from qtrain.models.parallel_loss import parallel_cross_entropy
from qtrain.models.rope import document_positions, rope_tables
from qtrain.models.selective_recompute import selective_contexts
from qtrain.models.tensor_parallel import TensorParallel, Tokens, inner_norm
from qtrain.quant import supports_swiglu_mlp, swiglu_mlp

Recompute = Literal["none", "selective", "full"]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [B, S, C] -> [B, S, C]. `gate_up` holds the rows of gate, then up."""

    def __init__(self, config: ModelConfig, tensor: TensorParallel | None = None):
        super().__init__()
        self.tensor = tensor
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.fused_rows = {"gate_up": [config.intermediate_size] * 2}  # as in `Attention`
        self.sub_norm = inner_norm(config.intermediate_size, config, tensor) if config.sub_norm else None
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        if self.tensor is None:
            return self._forward(x)
        gather = self.tensor.code_gather(self.gate_up, x, tokens)
        y = self._forward(x if gather else self.tensor.enter(x, tokens), gather)
        return self.tensor.leave(y, tokens)

    def _forward(self, x: Tensor, gather: TensorGroup | None = None) -> Tensor:
        """gather: the ranks whose tokens `gate_up` takes besides this rank's."""
        if x.is_cuda and self.sub_norm is None and supports_swiglu_mlp(self.gate_up, self.down_proj):
            return swiglu_mlp(self.gate_up, self.down_proj, x, gather)
        gate_up = self.gate_up(x) if gather is None else self.gate_up(x, gather)  # [B, S, 2I]
        if x.is_cuda:
            y = swiglu(gate_up)
        else:  # PyTorch's operations are faster than the kernel's reference
            gate, up = gate_up.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return self.down_proj(y if self.sub_norm is None else self.sub_norm(y))


class DecoderLayer(nn.Module):
    """One layer, [B, S, C] -> [B, S, C], or this rank's tokens of it (`tensor_parallel.py`). `recompute`: what its
    backward recomputes instead of keeping."""

    def __init__(self, config: ModelConfig, tensor: TensorParallel | None = None):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = Attention(config, tensor)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, tensor)
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, tokens: Tokens | None = None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x, cos, sin, mask, tokens)
        run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # a layer has no dropout
        if self.recompute == "selective":
            return run(self._forward, x, cos, sin, mask, tokens, context_fn=selective_contexts)
        return run(self._forward, x, cos, sin, mask, tokens)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, tokens: Tokens | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, tokens)
        return x + self.mlp(self.mlp_norm(x), tokens)


class Decoder(nn.Module):
    """A causal language model.

    `loss_chunks` (0: chosen by size) and `z_loss` are read at every call; see `linear_cross_entropy`. With `tensor`
    this is one rank's part of the model that `config` describes; `local` has the rank's own sizes.
    """

    fullgraph = True  # a graph break in a layer is a bug

    def __init__(self, config: ModelConfig, tensor: TensorParallel | None = None):
        super().__init__()
        self.config, self.tensor = config, tensor
        self.local = local = config if tensor is None else tensor.local
        self.loss_chunks = 0
        self.z_loss = 0.0
        self.embed_tokens = nn.Embedding(local.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(local, tensor) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, local.vocab_size, bias=False)
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
                module.sub_norm = inner_norm(output.in_features, self.config, self.tensor, **like)

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
        tokens = (batch, seq_len) if self.tensor is not None and self.tensor.sequence else None
        x = self.embed(input_ids, tokens)  # [B, S, C], or this rank's tokens
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, seq_len, x.device)
        if doc_ids is not None:
            positions = document_positions(doc_ids)
            cos, sin = cos[positions], sin[positions]  # [B, S, D/2]
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        mask = attention_mask(doc_ids, batch, seq_len, self.config.sliding_window, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, tokens)
        x = self.norm(x)
        if labels is None:
            return self.logits(x, tokens)
        if self.tensor is not None:
            x = self.tensor.enter(x, tokens).flatten(0, 1)
            labels = labels.flatten()
            return parallel_cross_entropy(x, self.lm_head, labels, self.tensor, self.loss_chunks, self.z_loss)
        return linear_cross_entropy(x.flatten(0, 1), self.lm_head, labels.flatten(), self.loss_chunks, self.z_loss)

    def embed(self, input_ids: Tensor, tokens: Tokens | None = None) -> Tensor:
        """The stream that enters the first layer."""
        return (
            self.embed_tokens(input_ids)
            if self.tensor is None
            else self.tensor.embed(self.embed_tokens, input_ids, tokens)
        )

    def logits(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Logits over the whole vocabulary of the stream that leaves the last norm."""
        return self.lm_head(x) if self.tensor is None else self.tensor.logits(self.lm_head, x, tokens)

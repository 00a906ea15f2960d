"""The native decoder: embedding, pre-norm layers of attention and gated MLP or mixture of experts, norm, head.

Projections that read the same input are one linear (`qkv`, `gate_up`): the input is quantized once, and GEMMs are
larger. Linears are always called as modules, so they can be swapped for quantized ones after the model is built.
"""

import functools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qtrain.comm.split import Split
from qtrain.comm.tensor_group import TensorGroup
from qtrain.kernels.cross_entropy import IGNORED
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import Attention, Mask, attention_mask
from qtrain.models.native.expert_load import ExpertLoad
from qtrain.models.native.expert_parallel import ExpertParallel
from qtrain.models.native.latent_attention import LatentAttention
from qtrain.models.native.loss import LossSums, linear_cross_entropy
from qtrain.models.native.mixture import MixtureMLP, Routed
from qtrain.models.native.mlp import MLP
from qtrain.models.native.parallel_loss import parallel_cross_entropy
from qtrain.models.native.rope import document_positions, rope_tables
from qtrain.models.native.router import RouterLosses
from qtrain.models.native.selective_recompute import selective_contexts
from qtrain.models.native.tensor_parallel import TensorParallel, Tokens, norm_of_part

Recompute = Literal["none", "selective", "full"]


class DecoderLayer(nn.Module):
    """One layer, [B, S, C] -> [B, S, C], or this rank's tokens of it (`tensor_parallel.py`); with a mixture of experts
    -> Routed. router_losses: of a mixture; None: the MLP is a dense one. `recompute`: what its backward recomputes
    instead of keeping."""

    def __init__(
        self,
        config: ModelConfig,
        tensor: TensorParallel | None = None,
        experts: TensorGroup | None = None,
        *,
        router_losses: RouterLosses | None = None,
    ):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = Attention(config, tensor) if config.latent is None else LatentAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        routed = router_losses is not None
        self.mlp = MixtureMLP(config, router_losses, experts, tensor) if routed else MLP(config, tensor)
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, tokens: Tokens | None = None) -> Tensor | Routed:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x, cos, sin, mask, tokens)
        run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # a layer has no dropout
        if self.recompute == "selective":
            return run(self._forward, x, cos, sin, mask, tokens, context_fn=selective_contexts)
        return run(self._forward, x, cos, sin, mask, tokens)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, tokens: Tokens | None) -> Tensor | Routed:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, tokens)
        y, *of_router = outputs(self.mlp(self.mlp_norm(x), tokens))
        return (x + y, *of_router) if of_router else x + y


def outputs(of_layer: Tensor | Routed) -> tuple[Tensor, ...]:
    """The stream that leaves a layer, and with a mixture what else it returns."""
    return of_layer if isinstance(of_layer, tuple) else (of_layer,)


class Output(nn.Module):
    """The end of a decoder, a module of its own so that full sharding can gather the head while it runs."""

    def __init__(self, tensor: TensorParallel | None):
        super().__init__()
        self.tensor = tensor

    def forward(
        self,
        x: Tensor,
        head: nn.Module,
        labels: Tensor | None = None,
        chunks: int = 0,
        z_loss: float = 0.0,
        tokens: Tokens | None = None,
    ) -> Tensor | LossSums:
        """Logits over the whole vocabulary of the stream x that leaves the last norm, or of this rank's `tokens` of it;
        with labels [T] the loss of x [T, C]."""
        if labels is None:
            return head(x) if self.tensor is None else self.tensor.logits(head, x, tokens)
        if self.tensor is None:
            return linear_cross_entropy(x, head, labels, chunks, z_loss)
        return parallel_cross_entropy(x, head, labels, self.tensor, chunks, z_loss)


class Decoder(nn.Module):
    """A causal language model.

    `loss_chunks` (0: chosen by size) and `z_loss` are read at every call; see `linear_cross_entropy`. So is
    `router_losses`. With `tensor` this is one rank's part of the model that `config` describes; `local` has the rank's
    own sizes. With either it has only some of a mixture's experts.
    """

    fullgraph = True  # a graph break in a layer is a bug

    def __init__(
        self, config: ModelConfig, tensor: TensorParallel | None = None, experts: ExpertParallel | None = None
    ):
        super().__init__()
        assert tensor is None or experts is None, "tensor parallelism divides the experts too"
        self.config, self.tensor = config, tensor
        self.parts = tensor or experts
        self.local = local = config if tensor is None else tensor.local
        self.loss_chunks = 0
        self.z_loss = 0.0
        self.router_losses = RouterLosses()
        self.embed_tokens = nn.Embedding(local.vocab_size, config.hidden_size)
        routed, parts = set(config.mixture_layers), tensor or experts
        self.layers = nn.ModuleList(
            DecoderLayer(
                local, tensor, parts and parts.group, router_losses=self.router_losses if i in routed else None
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, local.vocab_size, bias=False)
        self.output = Output(tensor)
        self.expert_load = ExpertLoad(len(routed), config.mixture.experts) if routed else None
        self.tie()

    def split(self, name: str) -> Split | None:
        """Which part of the parameter `name` this rank holds; None: all of it."""
        return None if self.parts is None else self.parts.split(name)

    def tie(self) -> None:
        """Share the embedding's weight with the head, if the config says so. Needed again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def reset_buffers(self) -> None:
        """Initialize what is not a parameter. Needed after `to_empty`."""
        if self.expert_load is not None:
            self.expert_load.reset()
        for bias in self._router_biases():
            bias.zero_()

    def _router_biases(self) -> list[Tensor]:
        """The routers' biases, none where they have none."""
        routers = [layer.mlp.router for layer in self.layers if isinstance(layer.mlp, MixtureMLP)]
        return [router.bias for router in routers if router.bias is not None]

    def end_step(self, bias_rate: float = 0.0) -> None:
        """After an optimizer step: balance the routers' biases with this rate (`ExpertLoad.end_step`)."""
        if self.expert_load is not None:
            self.expert_load.end_step(self._router_biases(), bias_rate)

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
                module.sub_norm = norm_of_part(output.in_features, self.config, self.tensor, **like)

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
        cos, sin = rope_tables(self.config.rope, self.config.rope_dim, seq_len, x.device)
        if doc_ids is not None:
            positions = document_positions(doc_ids)
            cos, sin = cos[positions], sin[positions]  # [B, S, D/2]
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        mask = attention_mask(doc_ids, batch, seq_len, self.config.sliding_window, x.device)
        routed = []
        for layer in self.layers:
            x, *of_router = outputs(layer(x, cos, sin, mask, tokens))
            routed += [of_router] if of_router else []
        x = self.norm(x)
        if labels is None:
            return self.logits(x, tokens)
        sums = self._loss(x, labels, tokens)
        return sums if not routed or not torch.is_grad_enabled() else self._with_routers(sums, routed, labels)

    def _loss(self, x: Tensor, labels: Tensor, tokens: Tokens | None) -> LossSums:
        if self.tensor is not None:
            x = self.tensor.enter(x, tokens)
        return LossSums(*self.output(x.flatten(0, 1), self.lm_head, labels.flatten(), self.loss_chunks, self.z_loss))

    def _with_routers(self, sums: LossSums, routed: list[list[Tensor]], labels: Tensor) -> LossSums:
        """Count the routes, and add the routers' losses to the loss, as means over its trained tokens."""
        loads, losses = zip(*routed, strict=True)
        self.expert_load.count(list(loads))
        weights = self.router_losses
        if not weights.balance and not weights.z:
            return sums
        balance, z = torch.stack(losses).mean(dim=0).unbind()
        auxiliary = weights.balance * balance + weights.z * z
        return sums._replace(loss=sums.loss + (labels != IGNORED).sum() * auxiliary)

    def embed(self, input_ids: Tensor, tokens: Tokens | None = None) -> Tensor:
        """The stream that enters the first layer."""
        return (
            self.embed_tokens(input_ids)
            if self.tensor is None
            else self.tensor.embed(self.embed_tokens, input_ids, tokens)
        )

    def logits(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Logits over the whole vocabulary of the stream that leaves the last norm."""
        return self.output(x, self.lm_head, tokens=tokens)

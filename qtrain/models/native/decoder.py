"""The native decoder: embedding, pre-norm layers of attention and gated MLP or mixture of experts, norm, head.

Projections that read the same input are one linear (`qkv`, `gate_up`): the input is quantized once, and GEMMs are
larger. Linears are always called as modules, so they can be swapped for quantized ones after the model is built.
"""

from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.attention.causal import takes_causal_attention
from qtrain.kernels.cross_entropy import IGNORED
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import SequenceInfo, SequencePart, attention_mask
from qtrain.models.native.decoder_layer import DecoderLayer, NoDelta, outputs
from qtrain.models.native.distillation import Distillation
from qtrain.models.native.expert_load import ExpertLoad
from qtrain.models.native.loss import EntropyOf, LossSums, chunk_rows, linear_cross_entropy, plain_entropy
from qtrain.models.native.mlp import MLP
from qtrain.models.native.moe import Experts, MoE
from qtrain.models.native.recompute import Kinds, LayerRegions, run
from qtrain.models.native.residual_offload import ResidualOffload
from qtrain.models.native.rope import document_positions, rope_tables
from qtrain.models.native.router import RouterLosses
from qtrain.quant import MLPMemory
from qtrain.tensors.partition import Partition, Parts


class Embedding(nn.Embedding):
    """ids [B, S] -> the residual stream [B, S, C]. sharded: as in `SequenceInfo`, which parallel kinds of it read."""

    def forward(self, ids: Tensor, sharded: bool = False) -> Tensor:
        return super().forward(ids)


class Output(nn.Module):
    """The end of a decoder, a module of its own so that full sharding can gather the head while it runs."""

    def forward(
        self,
        x: Tensor,
        head: nn.Module,
        info: SequenceInfo | None = None,
        labels: Tensor | None = None,
        chunks: int = 0,
        z_loss: float = 0.0,
        entropy_of: EntropyOf = plain_entropy,
    ) -> Tensor | LossSums:
        """Logits of the stream x [..., C] that leaves the last norm; with labels [T] the loss of its T tokens."""
        if labels is None:
            return head(x)
        return linear_cross_entropy(x.flatten(0, -2), head, labels, chunks, z_loss, entropy_of)


class Decoder(nn.Module):
    """A causal language model.

    `loss_chunks` (0: chosen by size) and `z_loss` are read at every call; see `linear_cross_entropy`. So is
    `router_losses`. It is declared for one process; `parallel/layers/place.py` replaces modules by parallel kinds of
    them, with local sizes.
    """

    fullgraph = True  # a graph break in a layer is a bug
    layers: Any
    """An nn.ModuleList of DecoderLayer, parallel kinds of them included."""
    expert_load: ExpertLoad | MaybeNone

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.loss_chunks = 0
        self.z_loss = 0.0
        self.router_losses = RouterLosses()
        self.kv_heads = config.num_key_value_heads
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        routed = set(config.moe_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.router_losses if i in routed else None) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.output = Output()
        self.expert_load = ExpertLoad(len(routed), config.mixture.experts) if routed else None
        self.parts: Parts | None = None
        """How processes split the parameters; None: this one holds all."""
        self.residual_offload: ResidualOffload | None = None
        """What keeps layers' inputs in host memory, or in parts, for backward; None: they stay where they are."""
        self.joins_layers = False
        """Whether a layer's last sum is left to the next layer in training (`join_layers`)."""
        self.distillation: Distillation | None = None
        """The teacher whose distribution the training loss follows too; None: cross-entropy alone."""
        self.shards_sequence = False
        """Whether processes shard the residual stream along tokens in training."""
        self.sequence_part: SequencePart | None = None
        """The part of each sequence whose loss this process computes; None: all of it."""
        self.make_norm: Callable[..., nn.Module] = nn.RMSNorm
        """Of the norms that `add_sub_norms` adds."""
        self.tie()

    def partition(self, name: str) -> Partition | None:
        """The part of the parameter `name` that this process holds; None: all of it."""
        return None if self.parts is None else self.parts.partition(name)

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
        routers = [layer.mlp.router for layer in self.layers if isinstance(layer.mlp, MoE)]
        return [router.bias for router in routers if router.bias is not None]

    def end_step(self, bias_rate: float = 0.0) -> None:
        """Of a step that is applied: balance the routers' biases with this rate (`ExpertLoad.end_step`)."""
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
                module.sub_norm = self.make_norm(output.in_features, eps=self.config.rms_norm_eps, **like)

    def set_recompute(self, kinds: Kinds, keep_8bit: Set[str] = frozenset()) -> None:
        gate_up = "gate_up" in keep_8bit
        memory = MLPMemory(gate_up, recomputes_activation=gate_up and "swiglu" in kinds)
        for layer in self.layers:
            layer.regions = LayerRegions.of(kinds, gate_up)
            for module in layer.modules():
                if isinstance(module, MLP | Experts):
                    module.memory = memory

    def set_mlp_chunks(self, chunks: int) -> None:
        """Run the MLPs of layers that are recomputed as a whole in so many chunks of tokens; mixtures run as before. To
        be called before layers are compiled."""
        for layer in self.layers:
            layer.mlp_chunks = chunks if isinstance(layer.mlp, MLP) else 0

    def join_layers(self) -> None:
        """Leave each layer's last sum to the next layer, where a compiler computes it with the norm that reads it. Not
        of layers that are recomputed as a whole or whose inputs are kept elsewhere: backward would keep two terms."""
        in_parts = all(layer.regions.layer is run and not layer.mlp_chunks for layer in self.layers)
        self.joins_layers = in_parts and self.residual_offload is None

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Tensor | LossSums:
        """input_ids, labels, doc_ids: int [B, S].

        Without labels: logits [B, S, V] in the model's dtype. With labels (already shifted; -100 is ignored): sums over
        the trained tokens. doc_ids: attention stays within equal ids, and positions restart at each document.

        With a `sequence_part` the sums are those of this process's tokens; without gradients those of all.
        """
        part = None if labels is None else self.sequence_part
        if part is not None and not part.divides(input_ids.shape[1]):
            assert not torch.is_grad_enabled(), "sequences that are trained have a part for each process"
            part = None  # an evaluation's last window: every process computes all of it
        entropy_of = plain_entropy
        if labels is not None and self.distillation is not None and torch.is_grad_enabled():
            # The teacher runs first, while backward of this model keeps nothing yet.
            entropy_of = self.distillation.entropy_of(input_ids, doc_ids)
        x, info, routed = self.hidden_states(input_ids, doc_ids, part)
        if labels is None:
            return self.output(x, self.lm_head, info)
        options, own_labels = (self.loss_chunks, self.z_loss, entropy_of), labels if part is None else part.own(labels)
        sums = LossSums(*self.output(x, self.lm_head, info, own_labels.flatten(), *options))
        if not torch.is_grad_enabled():
            return sums if part is None else LossSums(*map(part.total, sums))
        return sums if not routed else self._with_routers(sums, routed, labels)

    def trace_loss(self, tokens: int) -> None:
        """Run the operators of the loss of `tokens` tokens, of two chunks at most, on uninitialized memory, so that
        `compile_ahead.trace` finds their kernels."""
        like, rows = self.norm.weight, chunk_rows(tokens, self.loss_chunks, self.norm.weight.is_cuda)
        chunks = 1 if tokens <= rows else 2
        x = like.new_empty(min(tokens, chunks * rows), len(like)).requires_grad_()
        labels = torch.empty(len(x), dtype=torch.int64, device=x.device)
        linear_cross_entropy(x, self.lm_head, labels, chunks, self.z_loss)

    def hidden_states(
        self, input_ids: Tensor, doc_ids: Tensor | None = None, part: SequencePart | None = None
    ) -> tuple[Tensor, SequenceInfo, list[list[Tensor]]]:
        """The stream [B, S, C] that leaves the last norm, and what each router returns. part: of its tokens."""
        batch, seq_len = input_ids.shape
        cos, sin = rope_tables(self.config.rope, self.config.rope_dim, seq_len, input_ids.device)
        # Positions and the mask are those of the whole sequence; of a part no other rows are read.
        if doc_ids is not None:
            positions = document_positions(doc_ids)
            positions = positions if part is None else part.own(positions)
            cos, sin = cos[positions], sin[positions]  # [B, S, D/2]
        elif part is not None:
            cos, sin = part.own(cos, 0), part.own(sin, 0)
        # [S, 1, D/2], of documents [B, S, 1, D/2]: the same for all heads.
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        device, config = input_ids.device, self.config
        own = config.mla is None and takes_causal_attention(device, self.norm.weight.dtype, seq_len, config.head_dim)
        mask = attention_mask(doc_ids, batch, seq_len, config.sliding_window, device, own)
        input_ids = input_ids if part is None else part.own(input_ids)
        info = SequenceInfo(batch, seq_len, cos, sin, mask, self.shards_sequence or part is not None)
        x, routed = self.embed_tokens(input_ids, info.sharded), []
        if self.joins_layers and torch.is_grad_enabled():
            delta = NoDelta.apply(x)
            for layer in self.layers:
                x, delta, *router_out = layer(x, info, delta)
                routed += [router_out] if router_out else []
            return self.norm(x + delta), info, routed
        for index, layer in enumerate(self.layers):
            call = layer if self.residual_offload is None else partial(self.residual_offload.run, index, layer)
            x, *router_out = outputs(call(x, info))
            routed += [router_out] if router_out else []
        return self.norm(x), info, routed

    def _with_routers(self, sums: LossSums, routed: list[list[Tensor]], labels: Tensor) -> LossSums:
        """Count the routes, and add the routers' losses to the loss, as means over its trained tokens."""
        loads, losses = zip(*routed, strict=True)
        self.expert_load.count(list(loads))
        weights = self.router_losses
        if not weights.balance and not weights.z:
            return sums
        # fp32 [2] of each mixture: the mean over the layers.
        balance, z = torch.stack(losses).mean(dim=0).unbind()
        auxiliary = weights.balance * balance + weights.z * z
        # The caller divides the sum by the trained tokens: times their number, it stays a mean.
        return sums._replace(loss=sums.loss + (labels != IGNORED).sum() * auxiliary)

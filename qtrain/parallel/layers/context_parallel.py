"""Context parallelism (CP): each of N ranks computes S / N consecutive tokens of every sequence of a micro-batch.

All of a layer but attention works token by token, so that weights, gradients and optimizer states are those of data
parallelism. Around attention two all-to-alls move from tokens to heads and back (DeepSpeed-Ulysses):

    q, k, v  [B, S / N, heads, D] of all heads and this rank's tokens  ->  [B, S, heads / N, D]
    y        [B, S, heads / N, D]                                      ->  [B, S / N, heads, D]

Each head is computed over the whole sequence by one rank, with the kernels, the mask and the positions of one process,
and so with its bits. Backward moves the gradients the other way. Of N ranks each sends (N - 1) / N of

    (2 q + 2 kv heads) · D elements per token of its own in forward, and as many in backward.

Where there are fewer key-value heads than ranks, each is sent to all ranks that have queries for it.

    Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.comm.rank_group import RankGroup
from qtrain.core.errors import UserError
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.grouped.token_permutation import tokens_per_expert
from qtrain.models import Decoder
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import Attention, SequenceInfo
from qtrain.models.native.mla import MultiHeadLatentAttention
from qtrain.models.native.moe import MoE
from qtrain.models.native.router import Routing, TokenSum
from qtrain.parallel.layers import become
from qtrain.parallel.layers.exchange import ContextExchange
from qtrain.quant.quantized_model import SharedLinear


def check_context(config: ModelConfig | MaybeNone, ranks: int, seq_len: int) -> None:
    """UserError where `--cp ranks` does not divide the sequences, or the heads of attention."""
    if seq_len % ranks:
        fix = f"give --seq_len {seq_len // ranks * ranks or ranks}"
        raise UserError(f"--cp: {ranks} does not divide the {seq_len} tokens of a sequence; {fix}, or another --cp.")
    heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        allowed = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UserError(
            f"--cp: {ranks} ranks cannot share the model's {heads} attention heads, with {kv_heads} key-value heads, "
            f"equally; allowed: {', '.join(map(str, allowed))}."
        )


def _kv_heads(config: ModelConfig) -> int:
    """Latent attention makes keys and values of every head."""
    return config.num_attention_heads if config.mla is not None else config.num_key_value_heads


def exchanged_width(config: ModelConfig, ranks: int) -> int:
    """Elements of a token that a rank has in the all-to-alls of a layer's forward pass, over all heads."""
    # Key-value heads are repeated up to the number of ranks.
    kv_heads = max(_kv_heads(config), ranks)
    value_dim = config.value_size // config.num_attention_heads
    return config.q_size + kv_heads * (config.head_dim + value_dim) + config.value_size


@dataclass(frozen=True)
class ContextParallel:
    """How the ranks of a group share the sequences that a decoder trains on: a `SequencePart`, and what `place` puts
    into the model."""

    group: RankGroup

    @property
    def sequence_parts(self) -> int:
        """In which a rank's linears read a sequence."""
        return self.group.ranks

    # ---- the part of a sequence --------------------------------------------------------------------------------------

    def divides(self, seq_len: int) -> bool:
        return seq_len % self.group.ranks == 0

    def own(self, t: Tensor, dim: int = 1) -> Tensor:
        return t.chunk(self.group.ranks, dim)[self.group.rank]

    def total(self, t: Tensor) -> Tensor:
        return self.group.all_reduce_fp64(t.double()).to(t.dtype)

    # ---- the model ---------------------------------------------------------------------------------------------------

    def place(self, model: Decoder) -> None:
        """Have a decoder on the meta device compute its part of each sequence."""
        model.sequence_part = self
        for name, module in list(model.named_modules()):
            if (parallel := self._parallel_kind(module)) is not None:
                model.set_submodule(name, parallel)

    def _parallel_kind(self, module: nn.Module) -> nn.Module | None:
        if isinstance(module, Attention):
            return CPAttention(module, self.group)
        if isinstance(module, MultiHeadLatentAttention):
            return CPLatentAttention(module, self.group)
        return CPMoE(module, self.group) if isinstance(module, MoE) else None

    def shared_linear(self, name: str) -> SharedLinear | None:
        """Of the linear `name`; None for experts, which scale the rows that a rank routes to them, and for the head,
        which scales those of a chunk of the loss."""
        own = ".experts." in name or not name.startswith("layers.")
        return None if own else SharedLinear(exchange=ContextExchange(self.group))


# ---- attention -------------------------------------------------------------------------------------------------------


def to_heads(tensors: Sequence[Tensor], group: RankGroup) -> list[Tensor]:
    """Each [B, heads, S / N, D] of this rank's tokens -> [B, heads / N, S, D] of this rank's heads, by one all-to-all.
    Fewer heads than ranks are repeated."""
    messages = []
    for t in tensors:
        t = t.transpose(1, 2)  # [B, S / N, heads, D]
        if t.shape[2] < group.ranks:
            t = t.repeat_interleave(group.ranks // t.shape[2], dim=2)
        messages.append(t.unflatten(2, (group.ranks, -1)).movedim(2, 0))  # [N, B, S / N, heads / N, D]
    sizes = [m.shape[3] * m.shape[4] for m in messages]
    # [N (part of the sequence), B, S / N, all of this rank's heads]
    received = group.all_to_all(torch.cat([m.flatten(3) for m in messages], dim=-1))
    sequences = received.movedim(0, 1).flatten(1, 2).split(sizes, dim=-1)  # [B, S, heads / N · D]
    return [s.unflatten(-1, m.shape[3:]).transpose(1, 2) for s, m in zip(sequences, messages, strict=True)]


def to_tokens(y: Tensor, group: RankGroup) -> Tensor:
    """[B, heads / N, S, D] of this rank's heads -> [B, heads, S / N, D] of its tokens."""
    messages = y.transpose(1, 2).unflatten(1, (group.ranks, -1)).movedim(1, 0)  # [N, B, S / N, heads / N, D]
    received = group.all_to_all(messages)  # [N (part of the heads), ...]
    return received.movedim(0, 2).flatten(2, 3).transpose(1, 2)


class _OverAllKeys(nn.Module):
    """Attention from this rank's tokens to all of the sequence; where the sequence is not shared, that of one
    process."""

    def __init__(self, attention: nn.Module, group: RankGroup):
        become(self, attention)
        self.group = group

    def over_keys(self, q: Tensor, k: Tensor, v: Tensor, info: SequenceInfo) -> Tensor:
        attend_all: Any = super().over_keys  # that of the other base
        if not info.sharded:
            return attend_all(q, k, v, info)
        return to_tokens(attend_all(*to_heads((q, k, v), self.group), info), self.group)


class CPAttention(_OverAllKeys, Attention):
    """Attention with queries, keys and values of heads."""


class CPLatentAttention(_OverAllKeys, MultiHeadLatentAttention):
    """Latent attention."""


class CPMoE(MoE):
    """A mixture of which each rank routes and computes its own tokens. The routers' losses are its terms of all
    tokens'."""

    def __init__(self, mixture: MoE, group: RankGroup):
        become(self, mixture)
        self.group = group

    def statistics(self, routing: Routing, info: SequenceInfo) -> tuple[Tensor, Tensor]:
        """Load of this rank's tokens, which data-parallel ranks add, and losses."""
        if not info.sharded:
            return super().statistics(routing, info)
        load = tokens_per_expert(routing.experts, self.router.moe.experts)
        terms = TokenSum(_own_term, info.batch * info.seq_len)
        every = self.group.all_reduce_no_grad(load) if self.losses.balance else load
        return load, self.losses.of(routing, every, terms)


def _own_term(t: Tensor) -> Tensor:
    return t

"""Tensor parallelism of the native decoder: each rank of a group computes a part of every layer, with local sizes.

    qkv, gate_up            rows are divided (column-parallel): the rank's heads of q, k, v; its slice of gate, of up
    o_proj, down_proj       columns are divided (row-parallel): partial sums, which the ranks add; rank 0 adds the bias
    embed_tokens, lm_head   rows of the vocabulary are divided
    norms over all heads    divided like qkv; the ranks add their squares (OLMoE's of q and k, BitNet's)
    experts                 every rank has some of them (`expert_parallel.py`)
    norms, routers,         every rank has all of them, and computes them for its own tokens
    shared experts

With sequence parallelism the residual stream and the norms are divided along the tokens of the micro-batch: ranks
gather the tokens where attention, the MLP and the head begin, and add and divide again where they end. An exchange
moves half the bytes of the all-reduce that two of them replace, and the stream takes a rank's share of the memory.
Tokens that do not divide are padded with zeros.

    Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

import dataclasses
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.comm.split import Split
from qtrain.comm.tensor_group import TensorGroup
from qtrain.core.errors import UserError
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.expert_parallel import expert_split, rank_experts
from qtrain.quant import LowBitLinear, gathers_codes

Tokens = tuple[int, int]
"""Sequences and tokens of each, of a stream that is divided along tokens."""

VOCABULARY_ALIGNMENT = 64
"""Ranks' rows of a large vocabulary begin at multiples of it, which GEMMs and shards read best."""


def check_divisible(config: ModelConfig, ranks: int, sequence: bool = True) -> None:
    """UserError where `--tp ranks` does not divide what it must, or where layers cannot be divided at all."""
    if config.mixture is not None and not sequence:
        raise UserError("--no_sequence_parallel: ranks of --tp route their own tokens to experts; leave it out.")
    if config.latent is not None:
        raise UserError("--tp: a model with latent attention cannot be divided by tensor parallelism; leave it out.")
    sizes = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    if len(config.mixture_layers) < config.num_hidden_layers:
        sizes["intermediate size"] = config.intermediate_size
    if config.mixture is not None:
        sizes["experts"] = config.mixture.experts
    for what, size in sizes.items():
        if size % ranks:
            allowed = [d for d in range(1, 1025) if not any(of % d for of in sizes.values())]
            raise UserError(
                f"--tp: {ranks} does not divide the model's {what}, {size}; allowed: {', '.join(map(str, allowed))}."
            )
    if config.vocab_size < ranks:
        raise UserError(f"--tp: {ranks} ranks are more than the vocabulary's {config.vocab_size} tokens.")


def rank_config(config: ModelConfig, ranks: int, vocabulary: int = 0) -> ModelConfig:
    """The sizes of one rank's layers, but for experts, among which its routers choose. vocabulary: its tokens; 0: the
    most that a rank has."""
    return dataclasses.replace(
        config,
        vocab_size=vocabulary or -(-config.vocab_size // ranks),
        num_attention_heads=config.num_attention_heads // ranks,
        num_key_value_heads=config.num_key_value_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )


def planned_config(config: ModelConfig, tp: int, ep: int) -> ModelConfig:
    """The sizes of what one rank holds with --tp or --ep, its experts among them."""
    if tp > 1:
        return rank_experts(rank_config(config, tp), tp, micro_batches=1)
    return rank_experts(config, ep, micro_batches=ep)


class TensorParallel:
    """The part of a decoder that one rank computes. config: of the whole model; local: of this rank's layers."""

    def __init__(self, config: ModelConfig, group: TensorGroup, *, sequence: bool = True):
        check_divisible(config, group.ranks, sequence)
        self.group, self.sequence, self.config = group, sequence, config

    @cached_property
    def vocabulary(self) -> list[tuple[int, int]]:
        """Rows of the vocabulary of every rank."""
        size, ranks = self.config.vocab_size, self.group.ranks
        unit = VOCABULARY_ALIGNMENT if size >= 8 * ranks * VOCABULARY_ALIGNMENT else 1
        cuts = [min(size, -(-size * r // (ranks * unit)) * unit) for r in range(ranks + 1)]
        return list(pairwise(cuts))

    @property
    def first_token(self) -> int:
        """The first row of the vocabulary that this rank holds."""
        return self.vocabulary[self.group.rank][0]

    @cached_property
    def local(self) -> ModelConfig:
        start, stop = self.vocabulary[self.group.rank]
        return rank_config(self.config, self.group.ranks, stop - start)

    # ---- parameters --------------------------------------------------------------------------------------------------

    def split(self, name: str) -> Split | None:
        """Which part of the parameter `name` this rank holds; None: all of it."""
        config, ranks, rank = self.config, self.group.ranks, self.group.rank
        *_, module, kind = name.split(".")
        owner = name.split(".")[-3:-2]
        if owner in (["experts"], ["shared"]):
            return expert_split(config, self.group, name)
        if module in ("embed_tokens", "lm_head"):
            return Split(0, config.vocab_size, (self.vocabulary[rank],))
        if module == "qkv":
            return Split.evenly(0, (config.q_size, config.kv_size, config.kv_size), ranks, rank)
        if module == "gate_up":
            return Split.evenly(0, (config.intermediate_size,) * 2, ranks, rank)
        if module in ("o_proj", "down_proj") and kind == "bias":
            return Split(0, config.hidden_size, ((0, config.hidden_size),), held=rank == 0)
        if module in ("o_proj", "down_proj"):
            return Split.evenly(1, (config.q_size if module == "o_proj" else config.intermediate_size,), ranks, rank)
        if module == "sub_norm":
            return Split.evenly(0, (config.q_size if owner == ["attn"] else config.intermediate_size,), ranks, rank)
        if module in ("q_norm", "k_norm") and config.qk_norm == "whole":
            return Split.evenly(0, (config.q_size if module == "q_norm" else config.kv_size,), ranks, rank)
        return None

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each rank computes a term of the gradient of `name`: norms, routers and shared experts, of its heads
        or its tokens."""
        return self.split(name) is None and (self.sequence or name.split(".")[-2] in ("q_norm", "k_norm"))

    # ---- the stream --------------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Where a part begins that all ranks compute together: x [T / ranks, C] -> [B, S, C]. tokens None: x is
        [B, S, C] on all ranks already."""
        if tokens is None:
            return self.group.copy(x)
        return self.group.gather(x)[: tokens[0] * tokens[1]].unflatten(0, tokens)

    def own_tokens(self, rows: int, tokens: Tokens) -> int:
        """How many of this rank's `rows` of the divided stream are tokens; the others are padding."""
        return max(0, min(rows, tokens[0] * tokens[1] - self.group.rank * rows))

    def leave(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Where it ends: the sum over the ranks of x [..., C], of which each keeps its tokens, [T / ranks, C]."""
        if tokens is None:
            return self.group.reduce(x)
        x = x.flatten(0, -2)
        if padding := -x.shape[0] % self.group.ranks:
            x = F.pad(x, (0, 0, 0, padding))
        return self.group.scatter_sum(x)

    def column(self, linear: nn.Module, x: Tensor, tokens: Tokens | None) -> Tensor:
        """`linear`, whose rows are divided, of the whole stream: -> [B, S, rows of this rank]."""
        if gather := self.code_gather(linear, x, tokens):
            return linear(x, gather)[: tokens[0] * tokens[1]].unflatten(0, tokens)
        return linear(self.enter(x, tokens))

    def code_gather(self, linear: nn.Module, x: Tensor, tokens: Tokens | None) -> TensorGroup | None:
        """The group, if `linear` itself takes the ranks' tokens and gathers them as codes; else None."""
        codes = tokens is not None and isinstance(linear, LowBitLinear) and gathers_codes(linear.scheme)
        return self.group if codes and x.shape[0] % 2 == 0 else None  # two 4-bit codes share a byte

    def embed(self, embedding: nn.Embedding, ids: Tensor, tokens: Tokens | None) -> Tensor:
        """The embedding of ids [B, S], of which each rank has some rows."""
        own = ids - self.first_token
        missing = (own < 0) | (own >= embedding.num_embeddings)
        return self.leave(embedding(own.masked_fill(missing, 0)).masked_fill(missing.unsqueeze(-1), 0.0), tokens)

    def logits(self, head: nn.Module, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Logits of the whole vocabulary on all ranks, [..., V]; not differentiable."""
        sizes = [stop - start for start, stop in self.vocabulary]
        own = head(self.enter(x, tokens)).detach()
        padded = F.pad(own, (0, max(sizes) - own.shape[-1])).movedim(-1, 0)
        every = self.group.gathered(padded).movedim(0, -1).split(max(sizes), dim=-1)
        return torch.cat([part[..., :size] for part, size in zip(every, sizes, strict=True)], dim=-1)


class DividedRMSNorm(nn.Module):
    """RMSNorm over the last dimension, of whose `whole` elements every rank has some: ranks add their squares."""

    def __init__(self, size: int, eps: float, group: TensorGroup, **like: torch.device | torch.dtype | None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **like))
        self.eps, self.group, self.whole = eps, group, size * group.ranks

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        square = self.group.total(wide.square().sum(-1, keepdim=True)) / self.whole
        return (wide * torch.rsqrt(square + self.eps) * self.weight).to(x.dtype)


def norm_of_part(
    size: int, config: ModelConfig, tensor: TensorParallel | None, **like: torch.device | torch.dtype | None
) -> nn.Module:
    """A norm over a dimension of which this rank has `size` elements; tensor None: all."""
    if tensor is None:
        return nn.RMSNorm(size, eps=config.rms_norm_eps, **like)
    return DividedRMSNorm(size, config.rms_norm_eps, tensor.group, **like)

"""The modules of the native decoder under tensor parallelism (TP), with or without sequence parallelism (SP).

With SP the residual stream and the norms are sharded along the tokens of the micro-batch: ranks all-gather the tokens
where attention, the MLP and the head begin (`ResidualStream.enter`), and reduce-scatter where they end
(`ResidualStream.leave`). That is half the bytes of the all-reduce that two of them replace, and the stream takes a
rank's share of the memory. Tokens are padded with zeros to a multiple of the ranks. Low-bit linears gather codes
instead (`exchange.py`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.comm.rank_group import RankGroup
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.cross_entropy import IGNORED
from qtrain.kernels.grouped.token_permutation import tokens_per_expert
from qtrain.models.native.attention import Attention, SequenceInfo
from qtrain.models.native.decoder import Embedding, Output
from qtrain.models.native.loss import EntropyOf, LossSums, linear_cross_entropy, plain_entropy
from qtrain.models.native.mlp import MLP
from qtrain.models.native.moe import MoE
from qtrain.models.native.router import Routing, TokenSum
from qtrain.parallel.layers import become
from qtrain.parallel.layers.exchange import TokenExchange, gathers_codes
from qtrain.quant import LowBitLinear


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream of a group. sequence: whether it is sharded along tokens."""

    group: RankGroup
    sequence: bool

    def enter(self, x: Tensor, info: SequenceInfo | None) -> Tensor:
        """Where a part begins that all ranks compute together: x [T / ranks, C] -> [B, S, C]. Where the stream is not
        sharded, x is [B, S, C] on all ranks already."""
        if info is None or not info.sharded:
            return self.group.copy(x)
        # Without the padding.
        return self.group.all_gather(x)[: info.batch * info.seq_len].unflatten(0, (info.batch, info.seq_len))

    def leave(self, x: Tensor, sharded: bool) -> Tensor:
        """Where it ends: the sum over the ranks of x [..., C], of which each keeps its tokens, [T / ranks, C]."""
        if not sharded:
            return self.group.all_reduce(x)
        x = x.flatten(0, -2)
        # Reduce-scatter takes equal parts; rows of zeros add nothing, and are cut off on entry.
        if padding := -x.shape[0] % self.group.ranks:
            x = F.pad(x, (0, 0, 0, padding))
        return self.group.reduce_scatter(x)

    def exchange(self, linear: nn.Module, x: Tensor, info: SequenceInfo) -> TokenExchange | None:
        """If `linear` itself takes the ranks' tokens and gathers them as codes; else None."""
        codes = info.sharded and isinstance(linear, LowBitLinear) and gathers_codes(linear.scheme)
        codes = codes and not linear.in_high_precision
        return TokenExchange(self.group) if codes and x.shape[0] % 2 == 0 else None  # two 4-bit codes share a byte


class TPAttention(Attention):
    """Attention over this rank's heads. split_sizes: rows of q, k, v."""

    def __init__(self, attention: Attention, stream: ResidualStream, split_sizes: list[int]):
        become(self, attention)
        self.stream, self.split_sizes = stream, split_sizes
        self.projections = {"qkv": split_sizes}

    def forward(self, x: Tensor, info: SequenceInfo) -> Tensor:
        if exchange := self.stream.exchange(self.qkv, x, info):
            tokens = info.batch, info.seq_len
            qkv = self.qkv(x, exchange)[: info.batch * info.seq_len].unflatten(0, tokens)
        else:
            qkv = self.qkv(self.stream.enter(x, info))
        return self.stream.leave(self.attend(qkv, info), info.sharded)


class TPMLP(MLP):
    """The MLP over this rank's slice of the intermediate size."""

    def __init__(self, mlp: MLP, stream: ResidualStream):
        become(self, mlp)
        self.stream = stream
        self.projections = {"gate_up": [mlp.gate_up.weight.shape[0] // 2] * 2}

    def forward(self, x: Tensor, info: SequenceInfo | MaybeNone = None) -> Tensor:
        exchange = self.stream.exchange(self.gate_up, x, info)
        y = self.compute(x if exchange else self.stream.enter(x, info), exchange)
        return self.stream.leave(y, info.sharded)


class TPMoE(MoE):
    """A mixture whose experts are spread over the ranks; each rank routes its own tokens."""

    def __init__(self, mixture: MoE, stream: ResidualStream):
        become(self, mixture)
        self.stream = stream

    def statistics(self, routing: Routing, info: SequenceInfo) -> tuple[Tensor, Tensor]:
        """Of all ranks' tokens."""
        if not info.sharded:  # generation: all ranks route the same tokens
            return super().statistics(routing, info)
        group, tokens, rows = self.stream.group, info.batch * info.seq_len, len(routing.experts)
        routing = routing.first(max(0, min(rows, tokens - group.rank * rows)))  # the others are padding
        load = group.all_reduce_no_grad(tokens_per_expert(routing.experts, self.router.moe.experts))
        return load, self.losses.of(routing, load, TokenSum(group.all_reduce, tokens))


class TPEmbedding(Embedding):
    """The embedding of this rank's rows of the vocabulary, which begin at `first`."""

    def __init__(self, embedding: Embedding, stream: ResidualStream, first: int):
        become(self, embedding)
        self.stream, self.first = stream, first

    def forward(self, ids: Tensor, sharded: bool = False) -> Tensor:
        own = ids - self.first
        missing = (own < 0) | (own >= self.num_embeddings)  # [B, S]: ids of other ranks' rows
        found = F.embedding(own.masked_fill(missing, 0), self.weight)
        # Zeros for them: of each token exactly one rank adds its row, so the sum is exact.
        return self.stream.leave(found.masked_fill(missing.unsqueeze(-1), 0.0), sharded)


class TPOutput(Output):
    """Logits and loss of a head of which each rank has the rows `vocabulary[rank]`."""

    def __init__(self, stream: ResidualStream, vocabulary: list[tuple[int, int]]):
        super().__init__()
        self.stream, self.vocabulary = stream, vocabulary

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
        group = self.stream.group
        x = self.stream.enter(x, info)
        if labels is None:
            return self._logits(head(x).detach())
        entropy = partial(sharded_cross_entropy, group=group, first=self.vocabulary[group.rank][0])
        return linear_cross_entropy(x.flatten(0, -2), head, labels, chunks, z_loss, lambda chunk: entropy)

    def _logits(self, own: Tensor) -> Tensor:
        """Logits [..., V] of the full vocabulary on all ranks; not differentiable."""
        sizes = [stop - start for start, stop in self.vocabulary]
        padded = F.pad(own, (0, max(sizes) - own.shape[-1])).movedim(-1, 0)
        # Gathered along dimension 0, where ranks' parts follow each other, and moved back.
        every = self.stream.group.all_gather_no_grad(padded).movedim(0, -1).split(max(sizes), dim=-1)
        return torch.cat([part[..., :size] for part, size in zip(every, sizes, strict=True)], dim=-1)


class TPRMSNorm(nn.Module):
    """RMSNorm over a dimension of which every rank has `size` elements: ranks add their squares."""

    def __init__(self, size: int, eps: float, group: RankGroup, **like: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **like))
        self.eps, self.group, self.full = eps, group, size * group.ranks

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        # Its gradient is the sum over ranks, each of which reads it.
        square = self.group.all_reduce_with_grad(wide.square().sum(-1, keepdim=True)) / self.full
        return (wide * torch.rsqrt(square + self.eps) * self.weight).to(x.dtype)


STATISTICS = "loss statistics"
"""The kind of message."""


def sharded_cross_entropy(
    logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool, group: RankGroup, first: int
) -> Tensor:
    """Cross-entropy through a head whose vocabulary is split over the group: no rank has all logits of a token.

    logits [t, rows of this rank], which begin at the token `first` -> fp32 [2, t]: loss and nll of each row.

    As in `models/native/loss.py`, in chunks of tokens. Of each token a rank sends three numbers: the maximum of its
    logits, the sum of exponentials below it, and the label's logit, if it is among them. From those of all ranks
    everyone computes the same logsumexp and loss. In PyTorch's operations on all devices.

    with_grad: the logits are overwritten by their gradient."""
    x = logits.float()
    trained, target = labels != IGNORED, labels - first  # [t], [t]: the label's column on this rank
    own = trained & (target >= 0) & (target < x.shape[1])
    target = torch.where(own, target, 0).unsqueeze(-1)
    label_logit = torch.where(own, x.gather(-1, target).squeeze(-1), 0.0)  # [t]; 0 on all ranks but one
    peak = x.amax(dim=-1)
    below = (x - peak.unsqueeze(-1)).exp_().sum(dim=-1)  # [t], at least 1: no overflow, no logarithm of 0
    every = group.all_gather_no_grad(torch.stack([peak, below, label_logit])[None], STATISTICS)  # [ranks, 3, t]
    top = every[:, 0].amax(dim=0)
    log_total = top + (every[:, 1] * (every[:, 0] - top).exp()).sum(dim=0).log()  # logsumexp over the whole vocabulary
    nll = torch.where(trained, log_total - every[:, 2].sum(dim=0), 0.0)
    loss = nll + torch.where(trained, z_loss * log_total.square(), 0.0)
    if with_grad:
        x = x.sub_(log_total.unsqueeze(-1)).exp_().mul_((1.0 + 2.0 * z_loss * log_total).unsqueeze(-1))
        # softmax - onehot; other ranks add -0 at place 0.
        x.scatter_add_(-1, target, -own.float().unsqueeze(-1))
        logits.copy_(x.masked_fill_(~trained.unsqueeze(-1), 0.0))
    return torch.stack([loss, nll])

"""The router of a mixture of experts: which experts a token goes to, and with what weights; all in fp32.

    logits = x · weightᵀ                          [T, E]
    scores = softmax(logits) or sigmoid(logits)
    experts = the `per_token` best of scores, or of scores + bias, within the best groups; ties: the lower number
    weights = scores of those, normalized and scaled as the config says

No token is dropped. What trains a router besides the loss:
- a load-balancing loss (Switch Transformer, arXiv:2101.03961), E · sum over experts of (routes / T) · (mean
  probability), which is `per_token` for a balanced load. Probabilities: the scores, divided by their sum;
- a z-loss, the mean of logsumexp(logits)² (ST-MoE, arXiv:2202.08906);
- without a loss (arXiv:2408.15664): the bias of overloaded experts is lowered after each step, that of the others
  raised (`expert_load.py`). Only selection reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtrain.kernels.gemm.float_mm import fp32_mm
from qtrain.kernels.grouped.topk import topk
from qtrain.models.config.moe import MoEConfig


class Routing(NamedTuple):
    """Where the tokens go."""

    experts: Tensor
    """int64 [T, k], the best one first."""
    weights: Tensor
    """fp32 [T, k]."""
    logits: Tensor
    """fp32 [T, E]."""
    probabilities: Tensor
    """fp32 [T, E], of all experts; a token's sum is 1."""

    def first(self, tokens: int) -> "Routing":
        return Routing(*(field[:tokens] for field in self))


class TokenSum(NamedTuple):
    """How sums over a micro-batch are made whose tokens are sharded over processes."""

    reduce: Callable[[Tensor], Tensor]
    """The sum over the processes; its gradient is that of each process's term."""
    tokens: int
    """Of all processes."""


@dataclass
class RouterLosses:
    """What the routers' losses, as means over the layers, are multiplied with; read at every call. One with a weight of
    0 is not computed."""

    balance: float = 0.0
    z: float = 0.0

    def of(self, routing: Routing, load: Tensor, over: TokenSum | None = None) -> Tensor:
        """The load-balancing loss and the z-loss of a router, fp32 [2], or 0. load: as for `balance_loss`. over: the
        tokens that both are of; None: `routing` has them all."""
        if not self.balance and not self.z:
            return routing.logits.new_zeros(2)
        zero = routing.logits.new_zeros(())
        balance = balance_loss(routing, load, over) if self.balance else zero
        return torch.stack([balance, z_loss(routing.logits, over) if self.z else zero])


class Router(nn.Module):
    """x [T, C] -> Routing. Its weight is no nn.Linear's: schemes leave it alone."""

    def __init__(self, mixture: MoEConfig, hidden_size: int):
        super().__init__()
        self.moe = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, hidden_size))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(mixture.experts) if mixture.selection_bias else None)

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """As of any module, but the bias stays fp32 in a model of another dtype: its updates are small."""
        before = self.bias
        super()._apply(fn, recurse)
        after = self.bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.bias = before.to(after.device)
        return self

    def forward(self, x: Tensor) -> Routing:
        mixture = self.moe
        logits = _RouterLogits.apply(x, self.weight)
        if mixture.scores == "softmax":
            scores = probabilities = logits.softmax(dim=-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(dim=-1, keepdim=True)
        experts = self.select(scores.detach())
        # Without the bias, which only selection reads.
        weights = scores.gather(1, experts)
        if mixture.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return Routing(experts, weights * mixture.scaling, logits, probabilities)

    @torch.no_grad()
    def select(self, scores: Tensor) -> Tensor:
        """The experts int64 [T, k] of scores [T, E], the best one first; of equal ones the lower number."""
        mixture = self.moe
        if self.bias is not None:
            scores = scores + self.bias
        if mixture.groups > 1:
            in_groups = scores.unflatten(1, (mixture.groups, -1))  # [T, groups, E / groups]
            # DeepSeek-V3 adds a group's two best experts, V2 takes its best one.
            group_scores = in_groups.topk(2 if mixture.selection_bias else 1, dim=-1).values.sum(dim=-1)
            chosen = topk(group_scores, mixture.groups_per_token)
            kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
            # -inf, not 0: scores with a bias can be negative.
            scores = in_groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        return topk(scores, mixture.per_token)


_TINY = 1e-20
"""What DeepSeek-V3 adds to a sum of weights that may be zero; the sum of a softmax's best is not changed by it."""


def balance_loss(routing: Routing, load: Tensor, over: TokenSum | None = None) -> Tensor:
    """The load-balancing loss, an fp32 scalar. load: int64 [E], routes of each expert."""
    own, experts = routing.probabilities.shape
    tokens = own if over is None else over.tokens
    return experts * (load.float() / tokens * _mean(routing.probabilities, over)).sum()


def z_loss(logits: Tensor, over: TokenSum | None = None) -> Tensor:
    """The mean of logsumexp², an fp32 scalar."""
    return _mean(logits.logsumexp(dim=-1).square(), over)


def _mean(values: Tensor, over: TokenSum | None) -> Tensor:
    """Of values [T, ...] over the tokens. All processes compute the same loss: its gradient is that of each term."""
    return values.mean(dim=0) if over is None else over.reduce(values.sum(dim=0)) / over.tokens


class _RouterLogits(torch.autograd.Function):
    """x [T, C] · weight [E, C]ᵀ in fp32 -> fp32 [T, E]. Saves x in its own dtype, as the layer's norm wrote it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # only the weight's gradient reads x
        ctx.dtype = x.dtype
        return fp32_mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        dx = fp32_mm(gradient, weight, ctx.dtype) if needs_x else None
        dweight = fp32_mm(gradient.t(), x, weight.dtype) if needs_weight else None
        return dx, dweight

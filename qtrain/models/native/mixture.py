"""A mixture of experts in place of a layer's MLP.

    y = sum over the token's experts of weight · expert(x) + gate · shared(x)

The experts' matrices are two parameters (`quant/grouped_linear.py`), and their products one call for all experts
(`quant/experts.py`). Experts that every token uses are a plain MLP; only Qwen2-MoE has the gate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.comm.tensor_group import TensorGroup
from qtrain.kernels.grouped.row_groups import routes_per_group
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.lora_experts import LoraExperts
from qtrain.models.native.mlp import MLP
from qtrain.models.native.router import Router, RouterLosses, Routing, TokenRanks
from qtrain.models.native.tensor_parallel import TensorParallel, Tokens
from qtrain.quant.adapted_experts import AdaptedExperts, adapted_experts_mlp
from qtrain.quant.experts import experts_mlp
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.parallel_experts import ExpertRanks

Routed = tuple[Tensor, Tensor, Tensor]
"""Output [B, S, C]; routes of each expert, int64 [E]; the router's losses, fp32 [2] (`RouterLosses.of`)."""


class Experts(nn.Module):
    """The experts that a router chooses among, or those of them that this rank of `group` holds. Of each, `gate_up`
    holds the rows of gate, then up."""

    def __init__(self, experts: int, hidden_size: int, width: int, group: TensorGroup | None = None):
        super().__init__()
        own = experts // (group.ranks if group else 1)
        self.gate_up = GroupedLinear(own, hidden_size, 2 * width, group)
        self.down_proj = GroupedLinear(own, width, hidden_size, group)
        self.ranks = None if group is None else ExpertRanks(group)
        # `optim.parameter_groups` reads it: of all experts, as it is on any number of ranks.
        self.fused_rows = {"gate_up": [width, width] * experts, "down_proj": [hidden_size] * experts}

    def keep_in_order(self) -> dict[int, Tensor]:
        """From now on compute as a process with all experts would, bit for bit, and keep the gradients of each rank's
        tokens apart. Returns by id of a weight what receives them in its place, [ranks, *shape], of no memory."""
        weights, ranks = (self.gate_up.weight, self.down_proj.weight), self.ranks.group.ranks
        gate_up, down = (w.new_zeros(()).expand(ranks, *w.shape).requires_grad_() for w in weights)
        self.ranks = self.ranks._replace(terms=(gate_up, down))
        return {id(w): terms for w, terms in zip(weights, self.ranks.terms, strict=True)}

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, C], experts int64 [T, k], weights fp32 [T, k] -> [T, C]."""
        linears = self.gate_up, self.down_proj
        if any(isinstance(linear, LoraExperts) for linear in linears):
            gate_up, down = (m.arguments() if isinstance(m, LoraExperts) else AdaptedExperts(m) for m in linears)
            return adapted_experts_mlp(gate_up, down, x, experts, weights)
        return experts_mlp(*linears, x, experts, weights, self.ranks)


class MixtureMLP(nn.Module):
    """[B, S, C] -> Routed, or this rank's tokens of it. losses: shared with the other layers. group: the ranks that
    divide the experts; None: this one has all. tensor: they are those that divide the tokens."""

    def __init__(
        self,
        config: ModelConfig,
        losses: RouterLosses,
        group: TensorGroup | None = None,
        tensor: TensorParallel | None = None,
    ):
        super().__init__()
        mixture, hidden = config.mixture, config.hidden_size
        self.losses, self.tensor = losses, tensor
        self.router = Router(mixture, hidden)
        self.experts = Experts(mixture.experts, hidden, mixture.width, group)
        self.shared = MLP(config, width=mixture.shared_width) if mixture.shared_width else None
        # Not an nn.Linear: schemes leave its single row alone.
        self.shared_gate = nn.Parameter(torch.empty(1, hidden)) if mixture.shared_gate else None

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Routed:
        """tokens: of the stream that ranks have divided, x [T / ranks, C]."""
        rows = x.flatten(0, -2)  # [T, C]
        routing = self.router(rows)
        y = self.experts(rows, routing.experts, routing.weights)
        if self.shared is not None:
            shared = self.shared(rows)
            if self.shared_gate is not None:
                shared = F.linear(rows, self.shared_gate).sigmoid() * shared
            y = y + shared
        return y.view_as(x), *self._statistics(routing, tokens)

    def _statistics(self, routing: Routing, tokens: Tokens | None) -> tuple[Tensor, Tensor]:
        """Load and losses, of all ranks' tokens where they are divided."""
        experts = self.router.mixture.experts
        if self.tensor is None or tokens is None:  # generation: all ranks route the same tokens
            load = routes_per_group(routing.experts, experts)
            return load, self.losses.of(routing, load)
        routing = routing.first(self.tensor.own_tokens(len(routing.experts), tokens))
        load = self.tensor.group.summed(routes_per_group(routing.experts, experts))
        return load, self.losses.of(routing, load, TokenRanks(self.tensor.group, tokens[0] * tokens[1]))

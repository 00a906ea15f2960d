"""A mixture of experts in place of a layer's MLP.

    y = sum over the token's experts of weight · expert(x) + gate · shared(x)

The experts' matrices are two parameters (`quant/grouped_linear.py`), and their products one call for all experts
(`quant/experts.py`). Experts that every token uses are a plain MLP; only Qwen2-MoE has the gate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.kernels.grouped.token_permutation import tokens_per_expert
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import SequenceInfo
from qtrain.models.native.lora_experts import LoraExperts
from qtrain.models.native.mlp import MLP
from qtrain.models.native.router import Router, RouterLosses, Routing
from qtrain.quant import KEEP_ALL
from qtrain.quant.adapted_experts import AdaptedExperts, adapted_experts_mlp
from qtrain.quant.experts import experts_mlp
from qtrain.quant.grouped_linear import GroupedLinear

Routed = tuple[Tensor, ...]
"""Three: output [B, S, C]; routes of each expert, int64 [E]; the router's losses, fp32 [2] (`RouterLosses.of`)."""


class Experts(nn.Module):
    """The experts that a router chooses among. Of each, `gate_up` holds the rows of gate, then up. `memory`: as of an
    `MLP`."""

    memory = KEEP_ALL

    def __init__(self, experts: int, hidden_size: int, width: int):
        super().__init__()
        self.gate_up = GroupedLinear(experts, hidden_size, 2 * width)
        self.down_proj = GroupedLinear(experts, width, hidden_size)
        # `parameter_groups` reads it: of all experts, also where a process has some of them.
        self.projections = {"gate_up": [width, width] * experts, "down_proj": [hidden_size] * experts}

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, C], experts int64 [T, k], weights fp32 [T, k] -> [T, C]."""
        linears = self.gate_up, self.down_proj
        if any(isinstance(linear, LoraExperts) for linear in linears):
            gate_up, down = (m.arguments() if isinstance(m, LoraExperts) else AdaptedExperts(m) for m in linears)
            return self.compute_adapted(gate_up, down, x, experts, weights)
        return self.compute(x, experts, weights)

    def compute(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`forward` without adapters."""
        return experts_mlp(self.gate_up, self.down_proj, x, experts, weights, self.memory)

    def compute_adapted(
        self, gate_up: AdaptedExperts, down: AdaptedExperts, x: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        """`forward` with adapters on one of the linears, or both."""
        return adapted_experts_mlp(gate_up, down, x, experts, weights, self.memory)


class MoE(nn.Module):
    """[B, S, C] -> Routed. losses: shared with the other layers."""

    def __init__(self, config: ModelConfig, losses: RouterLosses):
        super().__init__()
        mixture, hidden = config.mixture, config.hidden_size
        self.losses = losses
        self.router = Router(mixture, hidden)
        self.experts = Experts(mixture.experts, hidden, mixture.width)
        self.shared = MLP(config, mixture.shared_width) if mixture.shared_width else None
        # Not an nn.Linear: schemes leave its single row alone.
        self.shared_gate = nn.Parameter(torch.empty(1, hidden)) if mixture.shared_gate else None

    def forward(self, x: Tensor, info: SequenceInfo) -> Routed:
        rows = x.flatten(0, -2)  # [T, C]
        routing = self.router(rows)
        y = self.experts(rows, routing.experts, routing.weights)
        if self.shared is not None:
            shared = self.shared(rows)
            if self.shared_gate is not None:
                shared = F.linear(rows, self.shared_gate).sigmoid() * shared  # [T, 1] * [T, C]
            y = y + shared
        return y.view_as(x), *self.statistics(routing, info)

    def statistics(self, routing: Routing, info: SequenceInfo) -> tuple[Tensor, Tensor]:
        """Load and losses."""
        load = tokens_per_expert(routing.experts, self.router.moe.experts)
        return load, self.losses.of(routing, load)

"""LoRA on the experts that a router chooses among: a pair A [r, K], B [N, r] for each of the E experts of a linear.

The pairs are those of PEFT's `target_parameters` experts.gate_up_proj and experts.down_proj: gate and up, one matrix in
transformers, share their A. Products are in `quant/adapted_experts.py`.
"""

import torch
from torch import Tensor, nn

from qtrain.models.config.hf_layout import Projection
from qtrain.quant.adapted_experts import AdaptedExperts
from qtrain.quant.export import exported_weight
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.linear import LowBitLinear

EXPERT_TARGETS = {"gate_up": "experts.gate_up_proj", "down_proj": "experts.down_proj"}
"""Linear of the experts -> its name in `targets` of --lora, and in PEFT's `target_parameters`."""


class LoraExperts(nn.Module):
    """A linear of E experts with adapters, which `Experts` computes. `weight` is the base's.

    groups: E, those that this process holds; experts: of the model. hf_name: of the parameter in transformers,
    model.layers.0.mlp.experts.gate_up_proj. adapted: every projection of each of the E experts under its name in a
    checkpoint.
    """

    def __init__(
        self,
        base: GroupedLinear | LowBitLinear,
        groups: int,
        experts: int,
        hf_name: str,
        adapted: list[Projection],
        rank: int,
        scale: float,
        dropout: float,
    ):
        super().__init__()
        self.base, self.groups, self.hf_name, self.adapted = base, groups, hf_name, adapted
        self.rank, self.scale, self.dropout = rank, scale, dropout
        self.in_features, self.out_features = base.in_features, base.out_features
        rows = base.out_features // groups
        self.lora_a = _matrices(groups, base.in_features, rank, base.weight.device)
        self.lora_b = _matrices(groups, rank, rows, base.weight.device)
        # `parameter_groups` reads it: of all experts, as that of `Experts`.
        self.projections = {"lora_a": [rank] * experts, "lora_b": [rows] * experts}

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def arguments(self) -> AdaptedExperts:
        """What `adapted_experts_mlp` needs."""
        dropout = self.dropout if self.training else 0.0
        return AdaptedExperts(self.base, self.lora_a.weight, self.lora_b.weight, self.scale, dropout)

    @torch.no_grad()
    def add_adapter(self, index: int, rows: Tensor) -> Tensor:
        """The fp32 weight `rows` [n, K] of the projection `index`, with its expert's adapter."""
        projection = self.adapted[index]
        # Each expert has out_features / E of the rows, one expert after the other.
        expert = projection.start * self.groups // self.out_features
        a = self.lora_a.weight.unflatten(0, (self.groups, self.rank))[expert]  # [r, K]
        adapter = self.lora_b.weight[projection.start : projection.stop] @ a
        return rows + self.scale * adapter.to(rows.device)  # host memory, of a base that is offloaded

    @torch.no_grad()
    def merged(self) -> GroupedLinear:
        """The equivalent experts without adapters, in the weight's dtype."""
        weight = exported_weight(self.base).clone()
        for i, projection in enumerate(self.adapted):
            rows = weight[projection.start : projection.stop]
            rows.copy_(self.add_adapter(i, rows.float()))
        with torch.device("meta"):
            linear = GroupedLinear(self.groups, self.in_features, self.out_features // self.groups)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear


def _matrices(groups: int, in_features: int, out_features: int, device: torch.device) -> GroupedLinear:
    """fp32 zeros, trained."""
    with torch.device("meta"):
        linear = GroupedLinear(groups, in_features, out_features)
    linear.weight = nn.Parameter(torch.zeros(groups * out_features, in_features, device=device))
    return linear

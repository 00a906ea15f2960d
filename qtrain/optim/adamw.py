"""AdamW as torch has it, fused into one pass over each tensor."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from qtrain.checks import Range
from qtrain.optim.optimizer import OPTIMIZERS, OptimizerSpec


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(OptimizerSpec):
    """torch's fused AdamW; states in the weights' dtype"""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.95)
    eps: Annotated[float, Range(0)] = 1e-8

    def state_bytes(self, weight_bytes: int) -> float:
        return 2 * weight_bytes

    def build(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True)

"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, one state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from qtrain.checks import Range
from qtrain.optim.elementwise import LowBitOptimizer, LowBitSpec
from qtrain.optim.optimizer import Optimizer
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import StateOptions


class LionOptimizer(LowBitOptimizer):
    """Group option: betas, of the interpolation and of the momentum."""

    RULE = "lion"
    STATES = ("exp_avg",)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}


@OPTIMIZERS.register("lion")
@dataclass(frozen=True)
class Lion(LowBitSpec):
    """Lion, the sign of a momentum; use a third to a tenth of AdamW's lr and three to ten times its weight decay"""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.99)
    """decay rates of the interpolation whose sign is taken, and of the momentum"""

    @property
    def state_options(self) -> StateOptions:
        return StateOptions({"exp_avg": self.m}, sr=self.sr, small=self.small, offload=self.offload)

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> Optimizer:
        defaults = {"lr": lr, "betas": self.betas, "weight_decay": 0.0}
        return LionOptimizer(groups, defaults, self.state_options, seed=seed)

"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, one state."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from qtrain.core.checks import Range
from qtrain.optim.elementwise import LowBitOptimizer, LowBitSpec
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import StateOptions


class LionOptimizer(LowBitOptimizer):
    RULE = "lion"
    STATES = ("exp_avg",)


@OPTIMIZERS.register("lion")
@dataclass(frozen=True)
class Lion(LowBitSpec):
    """Lion, the sign of a momentum; use a third to a tenth of AdamW's lr and three to ten times its weight decay"""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.99)
    """decay rates of the interpolation whose sign is taken, and of the momentum"""

    optimizer: ClassVar = LionOptimizer
    group_options: ClassVar = ("betas",)

    @property
    def state_options(self) -> StateOptions:
        return StateOptions({"exp_avg": self.m}, sr=self.sr, small=self.small, offload=self.offload)

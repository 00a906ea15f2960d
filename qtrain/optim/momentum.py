"""Optimizers with one state, a momentum in any format.

Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum. SGD with classical (Polyak 1964) or
Nesterov momentum, in torch's formulation.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from qtrain.core.checks import Range
from qtrain.optim.elementwise import LowBitOptimizer
from qtrain.optim.low_bit_spec import LowBitSpec
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import StateOptions


class LionOptimizer(LowBitOptimizer):
    """Lion over states of any format."""

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
        return StateOptions({"exp_avg": self.m}, sr=self.sr, small=self.small, offload=self.offloaded)


class SGDOptimizer(LowBitOptimizer):
    """Without momentum it keeps no state. Weight decay is decoupled: it does not enter the momentum."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], options: StateOptions, *, seed: int = 0):
        self.STATES = tuple(options.formats)  # of the instance: no momentum, no state
        self.RULE = "apply" if not self.STATES else "sgd_nesterov" if defaults["nesterov"] else "sgd"
        super().__init__(groups, defaults, options, seed=seed)


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(LowBitSpec):
    """gradient descent with classical or Nesterov momentum; weight decay is decoupled"""

    momentum: Annotated[float, Range(0, 0.999999)] = 0.9
    """decay rate of the momentum; 0: none, and no state"""
    nesterov: bool = False
    """Nesterov's momentum"""

    optimizer: ClassVar = SGDOptimizer
    group_options: ClassVar = ("momentum", "nesterov")

    @property
    def state_options(self) -> StateOptions:
        formats = {"momentum_buffer": self.m} if self.momentum else {}
        return StateOptions(formats, sr=self.sr, small=self.small, offload=self.offloaded)

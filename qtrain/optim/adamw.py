"""AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with states and weights in any format.

One class, registered under a name for each usual choice of formats. Without a master copy, bf16 weights need stochastic
rounding: a typical update is smaller than half a unit in the last place, so rounding to nearest would drop it.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from qtrain.core.checks import Range
from qtrain.optim.elementwise import LowBitOptimizer
from qtrain.optim.low_bit_spec import LowBitSpec
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import FormatChoice, StateOptions


class AdamWOptimizer(LowBitOptimizer):
    """AdamW over states of any format."""

    RULE = "adamw"  # a rule of `kernels.optim.fused_update`
    STATES = ("exp_avg", "exp_avg_sq")


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(LowBitSpec):
    """AdamW with torch's formula, states in the weights' dtype; bf16 weights and states are rounded stochastically"""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.95)
    """decay rates of the first and the second moment"""
    eps: Annotated[float, Range(0)] = 1e-8
    """added to the root of the second moment"""
    v: FormatChoice = "weight"
    """format of the second moment"""
    block: Literal[0, 64, 128, 256, 512, 1024] = 0
    """elements that share a scale in 8-bit and 4-bit states; 0: the default of the format"""
    master: Literal["none", "fp32"] = "none"  # +4 bytes a parameter
    """keep an fp32 master copy of bf16 weights"""

    optimizer: ClassVar = AdamWOptimizer
    group_options: ClassVar = ("betas", "eps")

    @property
    def state_options(self) -> StateOptions:
        return StateOptions(
            {"exp_avg": self.m, "exp_avg_sq": self.v},
            block=self.block,
            master=self.master == "fp32",
            sr=self.sr,
            small=self.small,
            offload=self.offloaded,
        )


@OPTIMIZERS.register("adamw_bf16_sr")
@dataclass(frozen=True)
class AdamWBf16SR(AdamW):
    """AdamW with bf16 states and bf16 weights without a master copy, all rounded stochastically"""

    m: FormatChoice = "bf16"
    v: FormatChoice = "bf16"


@OPTIMIZERS.register("adamw_8bit")
@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with companded 8-bit states, one scale per 256 elements; bf16 weights are rounded stochastically"""

    m: FormatChoice = "int8"
    v: FormatChoice = "int8"


@OPTIMIZERS.register("adamw_fp8")
@dataclass(frozen=True)
class AdamWFp8(AdamW):
    """AdamW with e4m3 states, one scale per 128 elements, v range-expanded; bf16 weights are rounded stochastically"""

    m: FormatChoice = "fp8"
    v: FormatChoice = "fp8"


@OPTIMIZERS.register("adamw_4bit")
@dataclass(frozen=True)
class AdamW4bit(AdamW):
    """AdamW with companded 4-bit states, one scale per 128 elements; bf16 weights are rounded stochastically"""

    m: FormatChoice = "int4"
    v: FormatChoice = "int4"

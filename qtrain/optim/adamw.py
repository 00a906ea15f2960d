"""AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with its two states, and the weights, in any format.

One class, and a name for each usual choice of its options. Without a master copy, a bf16 weight has to be rounded
stochastically: the usual update is smaller than half of a weight's last bit, and rounded to nearest it is lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from qtrain.checks import Range
from qtrain.optim.base import LowBitOptimizer, LowBitSpec
from qtrain.optim.optimizer import OPTIMIZERS
from qtrain.optim.state_layout import FormatChoice, StateOptions


class AdamWOptimizer(LowBitOptimizer):
    """AdamW over torch parameter groups; `betas` and `eps` are group options."""

    RULE = "adamw"
    STATES = ("exp_avg", "exp_avg_sq")

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
        }


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(LowBitSpec):
    """AdamW as torch's, states in the weights' dtype; bf16 weights and states are rounded stochastically"""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.95)
    eps: Annotated[float, Range(0)] = 1e-8
    m: FormatChoice = "weight"
    v: FormatChoice = "weight"
    block: Literal[0, 64, 128, 256, 512, 1024] = 0
    master: Literal["none", "fp32"] = "none"
    sr: bool = True
    small: Annotated[int, Range(0)] = 4096
    offload: bool = False

    @property
    def state_options(self) -> StateOptions:
        return StateOptions(
            {"exp_avg": self.m, "exp_avg_sq": self.v},
            block=self.block,
            master=self.master == "fp32",
            sr=self.sr,
            small=self.small,
            offload=self.offload,
        )

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> torch.optim.Optimizer:
        defaults = {"lr": lr, "betas": self.betas, "eps": self.eps, "weight_decay": 0.0}
        return AdamWOptimizer(groups, defaults, self.state_options, seed=seed)


@OPTIMIZERS.register("adamw_bf16_sr")
@dataclass(frozen=True)
class AdamWBf16SR(AdamW):
    """AdamW with bf16 states, bf16 weights without a master copy, all rounded stochastically"""

    m: FormatChoice = "bf16"
    v: FormatChoice = "bf16"


@OPTIMIZERS.register("adamw_8bit")
@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with 8-bit states (companded, a scale for 256), bf16 weights rounded stochastically"""

    m: FormatChoice = "int8"
    v: FormatChoice = "int8"


@OPTIMIZERS.register("adamw_fp8")
@dataclass(frozen=True)
class AdamWFp8(AdamW):
    """AdamW with e4m3 states (a scale for 128, v range-expanded), bf16 weights rounded stochastically"""

    m: FormatChoice = "fp8"
    v: FormatChoice = "fp8"


@OPTIMIZERS.register("adamw_4bit")
@dataclass(frozen=True)
class AdamW4bit(AdamW):
    """AdamW with 4-bit states (companded, a scale for 128), bf16 weights rounded stochastically"""

    m: FormatChoice = "int4"
    v: FormatChoice = "int4"

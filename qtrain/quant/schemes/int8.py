"""Dynamic INT8 mixed precision.

With rowwise scales every operand gets one a row as its GEMM reads it: a token's scale for x and dy in `output` and
`grad_input`, a channel's for both operands of `grad_weight`. So scales always leave the sum and are applied once to the
int32 total. Each GEMM can be left in the weights' dtype, as AQT allows (github.com/google/aqt). Tensorwise scales are
coarser and cost less to find.

`grad_weight` rounds stochastically unless told otherwise: it sums over all tokens, under the scale of a channel's
largest, and to nearest whatever is below half a step of that is lost for good (1.1% of a 100 M model's loss).
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.dynamic import DynamicScheme, Read
from qtrain.quant.scheme import SCHEMES, Gemm

Arithmetic = Literal["int8", "bf16"]


@SCHEMES.register("int8")
@dataclass(frozen=True)
class Int8(DynamicScheme):
    """dynamic rowwise INT8 mixed precision; each GEMM int8 or bf16, nearest or stochastic (as it comes grad_weight)"""

    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    granularity: Literal["rowwise", "tensorwise"] = "rowwise"
    stochastic_rounding: bool | tuple[Gemm, ...] | None = None  # None: grad_weight, where that is INT8

    def __post_init__(self) -> None:
        if self.stochastic_rounding is None:
            object.__setattr__(self, "stochastic_rounding", ("grad_weight",) if self.grad_weight == "int8" else False)
        super().__post_init__()

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        if getattr(self, gemm) == "bf16":
            return None
        return Read("int8", self.granularity), Read("int8", self.granularity)

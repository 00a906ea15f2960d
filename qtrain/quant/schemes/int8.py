"""Dynamic INT8 mixed precision.

With rowwise scales each operand has one scale per row as its GEMM reads it: per token for x and dy in `output` and
`grad_input`, per channel for both operands of `grad_weight`. All scales are factors of the whole sum and are applied
once to the int32 accumulator, in the epilogue. Each GEMM can stay in the weights' dtype, as in AQT
(github.com/google/aqt). Tensorwise scales are less accurate and cheaper to compute.

`grad_weight` rounds stochastically by default. It sums over all tokens under the scale of a channel's absmax; rounded
to nearest, every value below half a quantization step is lost, which costs 1.1% of a 100 M model's loss.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat

Arithmetic = Literal["int8", "bf16"]


@SCHEMES.register("int8")
@dataclass(frozen=True)
class Int8(LowBitScheme):
    """dynamic rowwise INT8 mixed precision; each GEMM int8 or bf16, nearest or stochastic (default: grad_weight)"""

    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    granularity: Literal["rowwise", "tensorwise"] = "rowwise"
    stochastic_rounding: bool | tuple[Gemm, ...] | None = None  # None: grad_weight, if that is INT8

    def __post_init__(self) -> None:
        if self.stochastic_rounding is None:
            # Frozen: the default depends on another field.
            object.__setattr__(self, "stochastic_rounding", ("grad_weight",) if self.grad_weight == "int8" else False)
        super().__post_init__()

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        return OperandFormat("int8", self.granularity), OperandFormat("int8", self.granularity)

"""Dynamic INT4: codes -7..7 with one scale per row of each operand, two codes per byte.

`output` multiplies INT4 codes. Gradients are INT8 by default: four bits cut off their long tails (compare Xi et al.,
"Training Transformers with 4-bit Integers", arXiv:2306.11987). Hopper has no INT4 tensor cores: packed codes are
unpacked to INT8, so against INT8 this saves memory rather than time. Ampere and Ada have them.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat

Arithmetic = Literal["int4", "int8", "bf16"]


@SCHEMES.register("int4")
@dataclass(frozen=True)
class Int4(LowBitScheme):
    """dynamic rowwise INT4 matmuls; each of the three GEMMs int4, int8 or bf16, gradients int8 by default"""

    output: Arithmetic = "int4"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        arithmetic = self.gemm_dtypes()[gemm]
        return OperandFormat(arithmetic, "rowwise"), OperandFormat(arithmetic, "rowwise")

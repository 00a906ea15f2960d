"""Dynamic INT4: codes -7..7 with one scale a row of each operand, two codes a byte.

`output` multiplies INT4 codes; gradients, whose long tails four bits cut off, are INT8 unless asked for (compare Xi et
al., "Training Transformers with 4-bit Integers", arXiv:2306.11987). Hopper has no INT4 tensor cores: packed codes are
unpacked into the INT8 ones, so this saves memory against INT8 rather than time.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.dynamic import DynamicScheme, Read
from qtrain.quant.scheme import SCHEMES, Gemm

Arithmetic = Literal["int4", "int8", "bf16"]


@SCHEMES.register("int4")
@dataclass(frozen=True)
class Int4(DynamicScheme):
    """dynamic rowwise INT4 matmuls; each of the three GEMMs int4, int8 or bf16, gradients int8 by default"""

    output: Arithmetic = "int4"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        arithmetic = getattr(self, gemm)
        if arithmetic == "bf16":
            return None
        return Read(arithmetic, "rowwise"), Read(arithmetic, "rowwise")

"""torchao's recipe "rowwise": one scale per row of each operand, as its GEMM reads it.

    y = (qx · qwᵀ) * sx[:, None] * sw[None, :], with q = e4m3(t / s) and s = absmax of the row / 448

x, w and dy are each scaled twice, along their rows for one GEMM and along their columns for the other. Scales are
powers of two by default, as in torchao: dividing by one changes no mantissa.
"""

from dataclasses import dataclass

from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.fp8 import Fp8Epilogue
from qtrain.quant.tensor_roles import Gemm


@SCHEMES.register("fp8_rowwise")
@dataclass(frozen=True)
class Fp8Rowwise(Fp8Epilogue):
    """dynamic FP8 with one scale per row of each operand; each of the three GEMMs fp8 or bf16"""

    power_of_two: bool = True

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        return "rowwise", "rowwise"

"""torchao's recipe "rowwise_with_gw_hp": the weight's gradient stays in high precision.

x and dy are scaled along their rows only; w along its rows for `output` and tensorwise for `grad_input`. So no tensor
of a micro-batch needs the absmax of its columns or transposed codes, and `grad_weight`, which sums over all tokens,
multiplies the tensors themselves.
"""

from dataclasses import dataclass

from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.fp8 import Arithmetic, Fp8Epilogue
from qtrain.quant.tensor_roles import Gemm


@SCHEMES.register("fp8_rowwise_gw_hp")
@dataclass(frozen=True)
class Fp8RowwiseGwHp(Fp8Epilogue):
    """dynamic FP8 with rowwise scales, weight gradients in bf16 (torchao's rowwise_with_gw_hp)"""

    grad_weight: Arithmetic = "bf16"

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        return "rowwise", "tensorwise" if gemm == "grad_input" else "rowwise"

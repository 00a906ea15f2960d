"""DeepSeek-V3's fine-grained FP8 (arXiv:2412.19437, section 3.3): one scale for every 128 elements along the sum.

Activations and gradients have one scale per 1x128 of a row, weights one per 128x128; both operands of `grad_weight` are
scaled 1x128 along the tokens, after transposition. An outlier degrades the 128 values around it, not its row. The
partial product of each K block is scaled and accumulated in fp32. e4m3 everywhere.
"""

from dataclasses import dataclass

from qtrain.quant.gemm_table import Gemm
from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.fp8 import Fp8


@SCHEMES.register("fp8_blockwise")
@dataclass(frozen=True)
class Fp8Blockwise(Fp8):
    """DeepSeek-V3's FP8: 1x128 activations and gradients, 128x128 weights; each of the three GEMMs fp8 or bf16"""

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        return "1x128", "1x128" if gemm == "grad_weight" else "128x128"

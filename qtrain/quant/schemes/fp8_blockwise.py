"""DeepSeek-V3's fine-grained FP8 (arXiv:2412.19437, section 3.3): one scale for every 128 elements along the sum.

Activations and gradients have one scale per 1x128 of a row, weights one per 128x128; both operands of `grad_weight` are
scaled 1x128 along the tokens, after transposition. An outlier degrades the 128 values around it, not its row. The
partial product of each K block is scaled and accumulated in fp32. e4m3 everywhere.

A product of two 1x128 operands multiplies each partial sum by a scale per row and one per column. With `grad_weight_x`
"128x128" a block of x has one scale there, as a weight has, and the columns of a partial sum share it.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.core.errors import UserError
from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.fp8 import Fp8
from qtrain.quant.tensor_roles import Gemm


@SCHEMES.register("fp8_blockwise")
@dataclass(frozen=True)
class Fp8Blockwise(Fp8):
    """DeepSeek-V3's FP8: 1x128 activations and gradients, 128x128 weights; each of the three GEMMs fp8 or bf16"""

    grad_weight_x: Literal["1x128", "128x128"] = "1x128"
    """blocks of x in grad_weight: 1x128 along the tokens, as in DeepSeek-V3, or 128x128"""

    def __post_init__(self) -> None:
        """UserError for blocks of x that no GEMM reads."""
        super().__post_init__()
        if self.grad_weight_x != "1x128" and self.grad_weight == "bf16":
            raise UserError(
                f"--quantize_kwargs.grad_weight_x: {self.grad_weight_x!r} is not allowed with grad_weight in bf16, "
                "which reads x itself; leave it out, or set grad_weight to 'fp8'."
            )

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        return "1x128", self.grad_weight_x if gemm == "grad_weight" else "128x128"

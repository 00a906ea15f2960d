"""BitNet b1.58: ternary weights times INT8 activations, trained through latent weights in high precision.

    w -> round(clamp(w / mean|w|)) in {-1, 0, 1}, one scale a linear;  x -> INT8, one scale a token

Rounding is passed straight through: the gradient of a latent weight is that of its rounded value, dyᵀ·x with x as it
was rounded, and dx = dy·w with the ternary w. `backward` says whether these two run in the model's dtype, over operands
dequantized from the codes, or in INT8, where the ternary codes need no further rounding.

The method norms the input of every linear. Those of qkv and gate_up are normed already; with `sub_norm` a native
decoder gets the two that it lacks, in front of the attention's output projection and of the MLP's down projection. That
is the architecture that transformers calls `bitnet`, and as such it is exported, with the values of the ternary
weights. Other models keep their own architecture. q, k and v are one linear here, and share a scale; so do gate and up.

Source: Ma et al. 2024, "The Era of 1-bit LLMs", arXiv:2402.17764; sub norms: BitNet b1.58 2B4T, arXiv:2504.12285.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.errors import UserError
from qtrain.kernels.quantize.operators import dequantize, quantize, unpack_ternary
from qtrain.quant.dynamic import DynamicScheme, Read, plain_product
from qtrain.quant.scheme import SCHEMES, Gemm, NeedsOperand, Operand


@SCHEMES.register("bitnet")
@dataclass(frozen=True)
class BitNet(DynamicScheme):
    """BitNet b1.58: ternary weights from latent ones, INT8 activations; backward in bf16 or INT8"""

    backward: Literal["bf16", "int8"] = "bf16"
    sub_norm: bool = True
    stochastic_rounding: bool = False

    latent = True

    def __post_init__(self) -> None:
        if self.stochastic_rounding and self.backward == "bf16":
            raise UserError(
                "--quantize_kwargs.stochastic_rounding: only INT8 gradients are rounded stochastically; "
                'add "backward":"int8", or leave it out.'
            )

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": "int8", "grad_input": self.backward, "grad_weight": self.backward}

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        rowwise, tensorwise = Read("int8", "rowwise"), Read("int8", "tensorwise")
        if gemm != "output" and self.backward == "bf16":
            return None
        return rowwise, rowwise if gemm == "grad_weight" else tensorwise

    def kept_input_bytes(self, element: int) -> float:
        return 1

    def exported_weight(self, w: Tensor) -> Tensor:
        codes, scale = _ternary(w.detach())
        return dequantize(codes, scale, "int8", "tensorwise", w.shape, w.dtype)

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        codes, scale = _ternary(w)
        return (codes, scale), (codes.t().contiguous() if self.backward == "int8" else codes, scale)

    def input_operands(
        self, x: Tensor, key: Tensor | None, wanted: NeedsOperand = (True, True), amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        if self.backward == "int8":
            return super().input_operands(x, None, wanted, amax)
        operand = quantize(x, "int8", "rowwise")
        return operand, operand

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if self.reads(gemm) is not None:
            return super().multiply(gemm, a, b, dtype, bias)
        (dy,), (codes, scale) = a, b
        granularity = "tensorwise" if gemm == "grad_input" else "rowwise"
        return plain_product(gemm, dy, dequantize(codes, scale, "int8", granularity, codes.shape, dy.dtype), bias)


def _ternary(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [N, K] -> codes int8 [N, K] in {-1, 0, 1}, scale fp32 [1]: not packed, for INT8 tensor cores multiply them."""
    packed, scale = quantize(w, "ternary", "tensorwise")
    return unpack_ternary(packed, w.shape[1]), scale

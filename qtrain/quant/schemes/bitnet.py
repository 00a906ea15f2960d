"""BitNet b1.58: ternary weights times INT8 activations, trained through latent weights in high precision.

    w -> round(clamp(w / mean|w|)) in {-1, 0, 1}, one scale per linear;  x -> INT8, one scale per token

The straight-through estimator: the gradient of a latent weight is that of its rounded value, dyᵀ·x with the rounded x,
and dx = dy·w with the ternary w. `backward` runs these two GEMMs in the model's dtype over dequantized codes, or in
INT8, where the ternary codes need no further rounding.

The method normalizes the input of every linear. Those of qkv and gate_up are normalized already; with `sub_norm` a
native decoder gets the two norms that it lacks, before the attention's output projection and before the MLP's down
projection. That is the architecture that transformers calls `bitnet`, and it is exported as such, with the values of
the ternary weights. Other models keep their own architecture. q, k and v are one linear here and share a scale; so do
gate and up.

Source: Ma et al. 2024, "The Era of 1-bit LLMs", arXiv:2402.17764; sub norms: BitNet b1.58 2B4T, arXiv:2504.12285.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.core.errors import UserError
from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat


@SCHEMES.register("bitnet")
@dataclass(frozen=True)
class BitNet(LowBitScheme):
    """BitNet b1.58: ternary weights from latent ones, INT8 activations; backward in bf16 or INT8"""

    backward: Literal["bf16", "int8"] = "bf16"
    sub_norm: bool = True
    stochastic_rounding: bool = False

    latent = True
    packed_weight = OperandFormat("ternary", "tensorwise")

    def __post_init__(self) -> None:
        if self.stochastic_rounding and self.backward == "bf16":
            raise UserError(
                "--quantize_kwargs.stochastic_rounding: only INT8 gradients are rounded stochastically; "
                'add "backward":"int8", or leave it out.'
            )

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": "int8", "grad_input": self.backward, "grad_weight": self.backward}

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        second = "rowwise" if gemm == "grad_weight" else "tensorwise"  # x in grad_weight, else the weight
        return OperandFormat("int8", "rowwise"), OperandFormat("int8", second)

    def operand_formats(self, gemm: Gemm) -> tuple[OperandFormat | None, OperandFormat | None]:
        first, second = self.low_bit_formats(gemm)
        if gemm == "output" or self.backward == "int8":
            return first, second
        return None, second._replace(sum_dim=0)  # dy in bf16, times the codes that `output` reads, dequantized

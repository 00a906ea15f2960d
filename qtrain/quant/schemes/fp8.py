"""What the FP8 schemes share: their options, and the formats that their GEMMs read.

x and w are e4m3 (3 mantissa bits); dy is e4m3 too, or e5m2, which has one more exponent bit and half the precision
(Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433).
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.core.errors import UserError
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat

Arithmetic = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class Fp8(LowBitScheme):
    """The options of every FP8 scheme; a subclass gives the granularity of each operand."""

    output: Arithmetic = "fp8"
    grad_input: Arithmetic = "fp8"
    grad_weight: Arithmetic = "fp8"
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"
    power_of_two: bool = False
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def __post_init__(self) -> None:
        """UserError for a gradient format that no GEMM reads."""
        super().__post_init__()
        if self.grad_format != "e4m3" and self.grad_input == self.grad_weight == "bf16":
            raise UserError(
                f"--quantize_kwargs.grad_format: {self.grad_format!r} is not allowed with grad_input and grad_weight "
                "in bf16, which read no FP8 gradient; leave it out, or set one of them to 'fp8'."
            )

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        """Granularity of the two operands of `gemm`."""
        raise NotImplementedError

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        a, b = self.granularities(gemm)
        # dy is the first operand of both gradients.
        return OperandFormat("e4m3" if gemm == "output" else self.grad_format, a), OperandFormat("e4m3", b)


@dataclass(frozen=True)
class Fp8Epilogue(Fp8):
    """FP8 schemes whose scales are applied in the epilogue, so that the tensor cores accumulate the whole sum.

    `fast_accum`: in their own accumulators, which hold fewer bits than fp32; otherwise partial sums of 128 products are
    added in fp32. `grad_weight`, a sum over all tokens, is the longest and loses the most.
    """

    fast_accum: bool | tuple[Gemm, ...] = ("output", "grad_input")

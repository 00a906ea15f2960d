"""What the FP8 schemes share: their options, and which formats their GEMMs read.

x and w are e4m3 (3 bits of mantissa); dy too, or e5m2, whose range of exponents is twice as wide and whose steps are
twice as coarse (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433).
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.errors import UserError
from qtrain.quant.dynamic import DynamicScheme, Read
from qtrain.quant.scheme import Gemm

Arithmetic = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class Fp8(DynamicScheme):
    """The options of every FP8 scheme; a subclass says the granularity of each operand."""

    output: Arithmetic = "fp8"
    grad_input: Arithmetic = "fp8"
    grad_weight: Arithmetic = "fp8"
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"
    power_of_two: bool = False
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def __post_init__(self) -> None:
        """UserError for options that nothing would read."""
        super().__post_init__()
        if self.grad_format != "e4m3" and self.grad_input == self.grad_weight == "bf16":
            raise UserError(
                f"--quantize_kwargs.grad_format: {self.grad_format!r} is not allowed with grad_input and grad_weight "
                "in bf16, which read no FP8 gradient; leave it out, or set one of them to 'fp8'."
            )

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        """Granularity of the two operands of `gemm`."""
        raise NotImplementedError

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        if getattr(self, gemm) == "bf16":
            return None
        a, b = self.granularities(gemm)
        return Read("e4m3" if gemm == "output" else self.grad_format, a), Read("e4m3", b)


@dataclass(frozen=True)
class Fp8Epilogue(Fp8):
    """Those whose scales leave the sum, so that the tensor cores add up all of it. `fast_accum`: in their own
    accumulators, which hold fewer bits than fp32; else parts of 128 are added in fp32. A weight's gradient, a sum over
    all tokens, is the longest and loses the most."""

    fast_accum: bool | tuple[Gemm, ...] = ("output", "grad_input")

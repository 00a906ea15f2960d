"""NVFP4: e2m1 codes with an e4m3 scale per 16 elements along the sum and one fp32 scale per tensor.

    y = (qx · qwᵀ) * tx * tw, where q = e2m1(t / (s * t_scale)) * s and s = e4m3(absmax of the 16 / 6 / t_scale)

All operands of all three GEMMs are 4-bit. Gradients are rounded stochastically: to nearest, four bits bias them. With
`hadamard`, both operands of `grad_weight` are rotated along the tokens, 16 at a time, so that outliers spread over
their group; the product is unchanged. Emulated by dequantizing to bf16, which is exact, and multiplying: the numerics
of NVFP4, not its speed, which needs Blackwell's FP4 tensor cores.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149; it also keeps some layers in bf16
(here `--quantize_min_size` and the GEMMs' own options) and scales weights in blocks of 16x16.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from qtrain.core.errors import UserError
from qtrain.core.hardware.capabilities import lacks_fp8
from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat

Arithmetic = Literal["nvfp4", "bf16"]
NVFP4 = OperandFormat("e2m1", "1x16", torch.float8_e4m3fn)


@SCHEMES.register("nvfp4")
@dataclass(frozen=True)
class NvFp4(LowBitScheme):
    """NVFP4 (e2m1, an e4m3 scale per 16 elements and a tensor scale), stochastic gradients; emulated in bf16"""

    output: Arithmetic = "nvfp4"
    grad_input: Arithmetic = "nvfp4"
    grad_weight: Arithmetic = "nvfp4"
    stochastic_rounding: bool = True
    hadamard: bool | None = None  # None: if grad_weight is NVFP4

    rounded_tensors = ("dy",)

    def __post_init__(self) -> None:
        """UserError for a rotation that no GEMM reads."""
        if self.hadamard is None:
            object.__setattr__(self, "hadamard", self.grad_weight == "nvfp4")
        if self.hadamard and self.grad_weight == "bf16":
            raise UserError(
                "--quantize_kwargs.hadamard: only an NVFP4 grad_weight reads rotated operands; leave it out, or leave "
                "grad_weight in nvfp4."
            )

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        return lacks_fp8(device)  # e4m3 block scales; emulated products take any size

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        # Both operands of a product are rotated, or neither: only then the rotations cancel.
        fmt = NVFP4._replace(hadamard=bool(self.hadamard) and gemm == "grad_weight")
        return fmt, fmt

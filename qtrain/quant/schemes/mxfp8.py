"""OCP microscaling, MXFP8: FP8 elements, each 32 along the sum with a power-of-two scale of one byte.

    q = e4m3(t / s), s = 2 ** (exponent of the group's absmax - 8)

(OCP Microscaling Formats v1.0; training with it: Rouhani et al., arXiv:2310.10537.) Native on Blackwell; emulated
elsewhere by dequantizing to bf16, which is exact, and multiplying: the numerics of MX without its speed. The plan says
which.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from qtrain.core.hardware.capabilities import lacks_fp8
from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat

Arithmetic = Literal["mxfp8", "bf16"]
E8M0 = torch.float8_e8m0fnu


@SCHEMES.register("mxfp8")
@dataclass(frozen=True)
class MxFp8(LowBitScheme):
    """OCP MXFP8, a power-of-two scale per 32 elements; native on Blackwell, emulated in bf16 elsewhere"""

    output: Arithmetic = "mxfp8"
    grad_input: Arithmetic = "mxfp8"
    grad_weight: Arithmetic = "mxfp8"
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        return lacks_fp8(device)  # e4m3 codes; native or emulated, products take any size

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        first = "e4m3" if gemm == "output" else self.grad_format
        return OperandFormat(first, "1x32", E8M0), OperandFormat("e4m3", "1x32", E8M0)

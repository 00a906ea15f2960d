"""OCP microscaling, MXFP8: FP8 elements, each 32 along the sum with a power-of-two scale of one byte.

    q = e4m3(t / s), s = 2 ** (exponent of the group's absmax - 8)

(OCP Microscaling Formats v1.0; training with it: Rouhani et al., arXiv:2310.10537.) Multiplied as they are on
Blackwell; emulated elsewhere, by dequantizing to bf16, which is exact, and multiplying: the numerics of MX without its
speed. The plan says which.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.kernels.gemm.mx_mm import mx_mm
from qtrain.kernels.quantize.mx import quantize_mx
from qtrain.quant.dynamic import DynamicScheme, Read, fp8_refusal, plain_product
from qtrain.quant.scheme import SCHEMES, Gemm, Operand

Arithmetic = Literal["mxfp8", "bf16"]


@SCHEMES.register("mxfp8")
@dataclass(frozen=True)
class MxFp8(DynamicScheme):
    """OCP MXFP8, a power-of-two scale for each 32 elements; native on Blackwell, emulated in bf16 elsewhere"""

    output: Arithmetic = "mxfp8"
    grad_input: Arithmetic = "mxfp8"
    grad_weight: Arithmetic = "mxfp8"
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        return fp8_refusal(device)

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        if getattr(self, gemm) == "bf16":
            return None
        return (
            Read("e4m3" if gemm == "output" else self.grad_format, "1x32", scale_bytes=1),
            Read("e4m3", "1x32", scale_bytes=1),
        )

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if self.reads(gemm) is None:
            return plain_product(gemm, a[0], b[0], bias)
        return mx_mm(a[0], b[0], a[1], b[1], dtype, bias)

    def _quantize(self, t: Tensor, read: Read, key: Tensor | None, role: int) -> Operand:
        return quantize_mx(t, read.fmt)

    def _quantize_transposed(self, t: Tensor, read: Read, key: Tensor | None, role: int) -> Operand:
        return quantize_mx(t.t().contiguous(), read.fmt)

    def _quantize_dual(
        self, t: Tensor, rows: Read, columns: Read, row_key: Tensor | None, column_key: Tensor | None, role: int
    ) -> tuple[Operand, Operand]:
        return self._quantize(t, rows, row_key, role), self._quantize_transposed(t, columns, column_key, role)

"""torchao's recipe "tensorwise": one scale a tensor, which cuBLAS and our kernels multiply fastest.

y = (qx · qwᵀ) * sx * sw, with q = e4m3(t / s) and s = absmax of the whole tensor / 448
"""

from dataclasses import dataclass

from qtrain.quant.fp8 import Fp8
from qtrain.quant.scheme import SCHEMES, Gemm
from qtrain.quant.tensorwise import TensorwiseScheme


@SCHEMES.register("fp8_tensorwise")
@dataclass(frozen=True)
class Fp8Tensorwise(TensorwiseScheme, Fp8):
    """FP8 with one scale a tensor, dynamic or delayed; each of the three GEMMs fp8 or bf16"""

    @property
    def amax_formats(self) -> tuple[str, str]:
        return "e4m3", self.grad_format

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        return "tensorwise", "tensorwise"

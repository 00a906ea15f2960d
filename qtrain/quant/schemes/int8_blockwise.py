"""INT8 with one scale per block, after Jetfire (Xi et al., arXiv:2403.12422).

Both operands of every GEMM have blocks of one shape; the int32 product of two blocks is scaled and accumulated in fp32.
Square blocks have the same codes in both layouts; Jetfire's are 32x32. With 128x128 the tensor cores sum four times as
many products between scalings; 1x128 confines an outlier to its own row.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.schemes.int8 import Arithmetic
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat


@SCHEMES.register("int8_blockwise")
@dataclass(frozen=True)
class Int8Blockwise(LowBitScheme):
    """INT8 with a scale per block (Jetfire's 32x32, 128x128 or 1x128); each of the three GEMMs int8 or bf16"""

    block: Literal["32x32", "128x128", "1x128"] = "32x32"
    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        return OperandFormat("int8", self.block), OperandFormat("int8", self.block)

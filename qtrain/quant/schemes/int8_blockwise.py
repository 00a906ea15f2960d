"""INT8 with a scale a block, after Jetfire (Xi et al., arXiv:2403.12422).

Both operands of every GEMM are cut into blocks of one shape, each with its own scale; the int32 product of two blocks
is scaled and added up in fp32. Square blocks have the same codes in both layouts; Jetfire's are 32x32. 128x128 leaves
the tensor cores four times as long a sum between scalings; 1x128 keeps an outlier to its own row.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.dynamic import DynamicScheme, Read
from qtrain.quant.scheme import SCHEMES, Gemm
from qtrain.quant.schemes.int8 import Arithmetic


@SCHEMES.register("int8_blockwise")
@dataclass(frozen=True)
class Int8Blockwise(DynamicScheme):
    """INT8 with a scale a block (Jetfire's 32x32, 128x128 or 1x128); each of the three GEMMs int8 or bf16"""

    block: Literal["32x32", "128x128", "1x128"] = "32x32"
    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        if getattr(self, gemm) == "bf16":
            return None
        return Read("int8", self.block), Read("int8", self.block)

"""SwitchBack (Wortsman et al., arXiv:2304.13013): INT8 where the sum is short, 16 bits where it is long.

    y  = (qx · qwᵀ) * sx[:, None] * sw      x rowwise (per token), w tensorwise
    dx = (qdy · qw) * sdy[:, None] * sw     dy rowwise, w tensorwise: the same codes, transposed
    dw = dyᵀ · x                            in the weights' dtype: it sums over all tokens of the batch

`weight_granularity` "rowwise" is the paper's SwitchBackQ: w scaled along its rows for y, along its columns for dx.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.schemes.int8 import Arithmetic
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat


@SCHEMES.register("switchback")
@dataclass(frozen=True)
class SwitchBack(LowBitScheme):
    """SwitchBack: INT8 with rowwise activations and a tensorwise weight, weight gradients in bf16"""

    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "bf16"
    weight_granularity: Literal["tensorwise", "rowwise"] = "tensorwise"
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        second = "rowwise" if gemm == "grad_weight" else self.weight_granularity
        return OperandFormat("int8", "rowwise"), OperandFormat("int8", second)

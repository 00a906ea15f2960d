"""SwitchBack (Wortsman et al., arXiv:2304.13013): INT8 where the sum is short, 16 bits where it is long.

    y  = (qx · qwᵀ) * sx[:, None] * sw      x by rows (tokens), w as a whole
    dx = (qdy · qw) * sdy[:, None] * sw     dy by rows, w as a whole: the same codes, transposed
    dw = dyᵀ · x                            in the weights' dtype: it sums over all tokens of the batch

`weight_granularity` "rowwise" is the paper's SwitchBackQ: w scaled by its rows for y, by its columns for dx.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.dynamic import DynamicScheme, Read
from qtrain.quant.scheme import SCHEMES, Gemm
from qtrain.quant.schemes.int8 import Arithmetic


@SCHEMES.register("switchback")
@dataclass(frozen=True)
class SwitchBack(DynamicScheme):
    """SwitchBack: INT8 with rowwise activations and a tensorwise weight, weight gradients in bf16"""

    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "bf16"
    weight_granularity: Literal["tensorwise", "rowwise"] = "tensorwise"
    stochastic_rounding: bool | tuple[Gemm, ...] = False

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        if getattr(self, gemm) == "bf16":
            return None
        return Read("int8", "rowwise"), Read("int8", "rowwise" if gemm == "grad_weight" else self.weight_granularity)

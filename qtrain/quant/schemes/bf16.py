"""The scheme that quantizes nothing."""

from dataclasses import dataclass

from qtrain.quant.scheme import SCHEMES, Scheme
from qtrain.quant.tensor_roles import Gemm


@SCHEMES.register("bf16")
@dataclass(frozen=True)
class Bf16(Scheme):
    """none: every linear runs in the weights' own dtype (bf16 by default on a GPU)"""

    leaves_all = True

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": "bf16", "grad_input": "bf16", "grad_weight": "bf16"}

"""torchao's recipe "tensorwise": one scale per tensor, the cheapest to multiply.

    y = (qx · qwᵀ) * sx * sw, with q = e4m3(t / s) and s = absmax of the whole tensor / 448

Both layouts of a tensor have the same codes and scale. Dynamic scaling computes the absmax in a pass over the tensor
before it is quantized. Delayed scaling takes the scale from the last `history` steps (`delayed_scaling.py`): the tensor
is read once, and values beyond the scale saturate. Only FP8 has it: its smallest code is far below the scale, while
INT8's codes are all zero once gradients have shrunk (measured: INT8 did not learn with it).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.fp8 import Fp8Epilogue
from qtrain.quant.tensor_roles import Gemm

HISTORY = 16


@SCHEMES.register("fp8_tensorwise")
@dataclass(frozen=True)
class Fp8Tensorwise(Fp8Epilogue):
    """FP8 with one scale per tensor, dynamic or delayed; each of the three GEMMs fp8 or bf16"""

    scaling: Literal["dynamic", "delayed"] = "dynamic"
    history: Annotated[int, Range(1, 1024)] = HISTORY

    def __post_init__(self) -> None:
        """UserError for a history under dynamic scaling."""
        super().__post_init__()
        if self.scaling == "dynamic" and self.history != HISTORY:
            raise UserError(
                f"--quantize_kwargs.history: {self.history} is not allowed with dynamic scaling, which remembers "
                'nothing; leave it out, or set "scaling" to "delayed".'
            )

    @property
    def amax_history(self) -> int:
        return self.history if self.scaling == "delayed" else 0

    @property
    def amax_formats(self) -> tuple[str, str]:
        return "e4m3", self.grad_format

    def granularities(self, gemm: Gemm) -> tuple[str, str]:
        return "tensorwise", "tensorwise"

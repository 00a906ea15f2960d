"""torchao's recipe "tensorwise": one scale a tensor, which cuBLAS and our kernels multiply fastest.

y = (qx · qwᵀ) * sx * sw, with q = e4m3(t / s) and s = absmax of the whole tensor / 448

Both layouts of a tensor have the same codes and scale. With dynamic scaling the scale is that of the tensor's own
absmax, which takes a pass over it before it is quantized. With delayed it comes from the last `history` steps
(`delayed.py`), the tensor is read once, and what has grown beyond it saturates. That is FP8's alone: its codes reach
far below the scale, where INT8's are all zero once gradients have shrunk; INT8 did not learn so.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from qtrain.checks import Range
from qtrain.errors import UserError
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.quantize.delayed_scale import delayed_scale, swiglu_delayed_scale
from qtrain.kernels.quantize.operators import absmax, quantize, quantize_dual_given_scale, quantize_transposed
from qtrain.kernels.swiglu.quantize import quantize_swiglu_given_scale
from qtrain.quant.dynamic import drawn
from qtrain.quant.scheme import SCHEMES, Gemm, NeedsOperand, Operand
from qtrain.quant.schemes.fp8 import Fp8Epilogue

HISTORY = 16


@SCHEMES.register("fp8_tensorwise")
@dataclass(frozen=True)
class Fp8Tensorwise(Fp8Epilogue):
    """FP8 with one scale a tensor, dynamic or delayed; each of the three GEMMs fp8 or bf16"""

    scaling: Literal["dynamic", "delayed"] = "dynamic"
    history: Annotated[int, Range(1, 1024)] = HISTORY

    def __post_init__(self) -> None:
        """UserError for a history that nothing reads."""
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

    def _operands(
        self, t: Tensor, name: str, key: Tensor | None, wanted: NeedsOperand, plain: Operand, amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        rows, columns = self._reads_of(name, wanted)
        if not amax or not (rows or columns):
            return super()._operands(t, name, key, wanted, plain)
        fmt, role = (rows or columns).fmt, ROUNDED_TENSORS.index(name)
        row_key, column_key = self._keys_of(name, key)
        scale = delayed_scale(t, amax[0], fmt, self.power_of_two)
        row_codes = column_codes = seen = None
        if rows and columns:
            rounding = drawn(row_key, column_key, role)
            row_codes, column_codes, seen = quantize_dual_given_scale(t, fmt, scale, *rounding)
        elif rows:
            row_codes, _ = quantize(t, fmt, "tensorwise", row_key, role, scale=scale)
        else:
            column_codes, _ = quantize_transposed(t, fmt, "tensorwise", column_key, role, scale=scale)
        if len(amax) == 2:
            scale = _recorded(scale, absmax(t) if seen is None else seen, amax[1])
        return (
            plain if row_codes is None else (row_codes, scale),
            plain if column_codes is None else (column_codes, scale),
        )

    def gated_operands(
        self, name: str, x: Tensor, dy: Tensor | None, key: Tensor | None, wanted: NeedsOperand, amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        read = self._read_alike(name, wanted)
        if read is None or not amax:
            return super().gated_operands(name, x, dy, key, wanted, amax)
        scale = swiglu_delayed_scale(x, dy, amax[0], read.fmt, self.power_of_two)
        rounding = drawn(*self._keys_of(name, key), ROUNDED_TENSORS.index(name))
        codes, codes_t, seen = quantize_swiglu_given_scale(x, dy, read.fmt, scale, *rounding)
        if len(amax) == 2:
            scale = _recorded(scale, seen, amax[1])
        return (codes, scale), (codes_t, scale)


def _recorded(scale: Tensor, seen: Tensor, amax: Tensor) -> Tensor:
    """`scale`, with a tensor's absmax remembered in `amax`; a NaN or an Inf there is not saturated away."""
    amax.copy_(torch.maximum(amax, seen))
    return scale + 0 * seen

"""torchao's recipe "tensorwise": one scale per tensor, the cheapest to multiply.

    y = (qx · qwᵀ) * sx * sw, with q = e4m3(t / s) and s = absmax of the whole tensor / 448

Both layouts of a tensor have the same codes and scale. Dynamic scaling computes the absmax in a pass over the tensor
before it is quantized. Delayed scaling takes the scale from the last `history` steps (`delayed_scaling.py`): the tensor
is read once, and values beyond the scale saturate. Only FP8 has it: its smallest code is far below the scale, while
INT8's codes are all zero once gradients have shrunk (measured: INT8 did not learn with it).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.kernels.quantize.absmax import absmax
from qtrain.kernels.quantize.column_groups import BlockGroups
from qtrain.kernels.quantize.delayed_scale import delayed_scale, record_amax
from qtrain.kernels.quantize.gather_rows import GatheredRows, in_memory, with_index
from qtrain.kernels.quantize.operators import quantize, quantize_dual_delayed, quantize_transposed
from qtrain.kernels.swiglu.quantize import quantize_swiglu_delayed
from qtrain.quant.gemm_table import Gemm
from qtrain.quant.quantizers import Former
from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.fp8 import Fp8Epilogue
from qtrain.quant.tensor_roles import BOTH, DelayedScale, NeedsOperand, SwiGLUOperands, TensorName
from qtrain.tensors.quantized_tensor import Operands, QuantizedTensor

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

    def _operands(
        self,
        t: Tensor | GatheredRows,
        name: TensorName,
        key: Tensor | None,
        needs: NeedsOperand = BOTH,
        delayed: DelayedScale | None = None,
        groups: BlockGroups | None = None,
        former: Former | None = None,
    ) -> Operands:
        rows, columns = self.formats_of(name, needs)
        if delayed is None or not (rows or columns):
            return super()._operands(t, name, key, needs, groups=groups, former=former)
        fmt = (rows or columns).fmt
        rounding = self.rounding(name, key)
        x, index = with_index(t if rows and columns else in_memory(t))
        codes = codes_t = amax = None
        if rows and columns:
            codes, codes_t, scale, amax = quantize_dual_delayed(
                x, fmt, delayed.scale, *rounding, self.power_of_two, *index
            )
        else:
            scale = delayed_scale(x, delayed.scale, fmt, self.power_of_two)
        if rows and not columns:
            codes, _ = quantize(x, fmt, "tensorwise", rounding.row_key, rounding.role, scale=scale)
        elif columns and not rows:
            codes_t, _ = quantize_transposed(x, fmt, "tensorwise", rounding.column_key, rounding.role, scale=scale)
        if delayed.amax is not None:
            scale = record_amax(delayed.amax, absmax(x) if amax is None else amax, scale)
        return Operands(
            x if codes is None else QuantizedTensor(codes, scale, rows),
            x if codes_t is None else QuantizedTensor(codes_t, scale, columns),
        )

    def quantize_swiglu(
        self,
        name: TensorName,
        x: Tensor,
        dy: Tensor | None,
        key: Tensor | None,
        needs: NeedsOperand,
        delayed: DelayedScale | None = None,
        groups: BlockGroups | None = None,
        row_dots: bool = False,
    ) -> SwiGLUOperands:
        rows, columns = self.formats_of(name, needs)
        if delayed is None or rows is None or rows != columns:
            return super().quantize_swiglu(name, x, dy, key, needs, delayed, groups, row_dots)
        codes, codes_t, scale, amax, dots = quantize_swiglu_delayed(
            x, dy, rows.fmt, delayed.scale, *self.rounding(name, key), self.power_of_two, row_dots
        )
        if delayed.amax is not None:
            scale = record_amax(delayed.amax, amax, scale)
        operands = Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale, columns))
        return SwiGLUOperands(operands, dots)

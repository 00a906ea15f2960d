"""Quantizing and multiplying by a scheme's declaration.

A tensor is quantized where it is produced, for both of its GEMMs at once: x and dy once per micro-batch, w once per
optimizer step, and only for the GEMMs that run. Both operands of a product are K-major, as 8-bit tensor cores require:
what a GEMM reads along a tensor's columns is quantized into transposed codes. A GEMM in high precision reads the tensor
itself. Quantizers (`quantizers.py`) and products (`gemm_table.py`, `grouped_table.py`) are looked up by format.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.kernels.quantize.absmax import absmax
from qtrain.kernels.quantize.column_groups import NO_GROUPS, BlockGroups
from qtrain.kernels.quantize.delayed_scale import delayed_scale, record_amax
from qtrain.kernels.quantize.gather_rows import GatheredRows, in_memory, with_index
from qtrain.kernels.quantize.operators import quantize_dual_delayed
from qtrain.kernels.swiglu.quantize import (
    activation_dots,
    quantize_swiglu,
    quantize_swiglu_delayed,
    supports_swiglu_dual,
    supports_swiglu_rowwise,
)
from qtrain.quant import gemm_table, grouped_table
from qtrain.quant.quantizers import quantize_columns, quantize_dual_layout, quantize_rows
from qtrain.quant.scheme import LowBitScheme, applies
from qtrain.quant.tensor_roles import (
    BOTH,
    DelayedScale,
    Gemm,
    NeedsOperand,
    RowwiseQuantization,
    SwiGLUOperands,
    TensorName,
)
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, Operands, QuantizedTensor


class OperandRequest(NamedTuple):
    """Which operands of which tensor are wanted."""

    name: TensorName
    needs: NeedsOperand = BOTH
    key: Tensor | None = None
    """int64 [3], the Philox key of stochastic rounding: seed, step, number of the linear; None: nearest even."""
    delayed: DelayedScale | None = None
    """The state of delayed scaling; None: the scale is the tensor's own."""
    groups: BlockGroups | None = None
    """The groups of the tensor's rows, each of which a product multiplies on its own (`experts.py`); scales of whole
    columns are then one per group."""


def quantize_operands(scheme: LowBitScheme, t: Tensor | GatheredRows, request: OperandRequest) -> Operands:
    """The operands of t [M, K]; t itself for a GEMM in high precision, or one that does not run."""
    rows, columns = scheme.formats_of(request.name, request.needs)
    if request.delayed is not None and (rows or columns):
        return _delayed_operands(scheme, t, rows, columns, request)
    rounding, power_of_two = scheme.rounding(request.name, request.key), scheme.power_of_two
    if rows and columns and columns.sum_dim == 1:
        return Operands(*quantize_dual_layout(t, rows, columns, rounding, power_of_two, request.groups))
    t = in_memory(t)
    if columns and columns.sum_dim == 0:  # reads the row codes
        codes = quantize_rows(t, rows or columns, rounding, power_of_two)
        return Operands(codes, codes.summed_over_rows())
    return Operands(
        quantize_rows(t, rows, rounding, power_of_two) if rows else t,
        quantize_columns(t, columns, rounding, power_of_two, request.groups) if columns else t,
    )


def _delayed_operands(
    scheme: LowBitScheme,
    t: Tensor | GatheredRows,
    rows: OperandFormat | None,
    columns: OperandFormat | None,
    request: OperandRequest,
) -> Operands:
    """With the tensorwise scale of earlier steps; the absmax of t is recorded for the next ones."""
    delayed, rounding = request.delayed, scheme.rounding(request.name, request.key)
    fmt, amax = (rows or columns).fmt, None
    if rows and columns:
        x, index = with_index(t)
        codes, codes_t, scale, amax = quantize_dual_delayed(
            x, fmt, delayed.scale, *rounding, scheme.power_of_two, *index
        )
    else:
        x = in_memory(t)
        scale = delayed_scale(x, delayed.scale, fmt, scheme.power_of_two)
        codes = quantize_rows(x, rows, rounding, False, scale).codes if rows else None
        codes_t = quantize_columns(x, columns, rounding, False, scale=scale).codes if columns else None
    if delayed.amax is not None:
        scale = record_amax(delayed.amax, absmax(x) if amax is None else amax, scale)
    return Operands(
        QuantizedTensor(codes, scale, rows) if rows else x, QuantizedTensor(codes_t, scale, columns) if columns else x
    )


def operands_under_scale(scheme: LowBitScheme, t: Tensor, request: OperandRequest, scale: Tensor) -> Operands:
    """`quantize_operands` where tensorwise scales are `scale`, fp32 [1]; finer ones are t's own."""
    rows, columns = scheme.formats_of(request.name, request.needs)
    rounding, power_of_two = scheme.rounding(request.name, request.key), scheme.power_of_two
    own_rows: Operand = t
    own_columns: Operand = t
    if rows:
        own_rows = quantize_rows(t, rows, rounding, power_of_two, _if_tensorwise(rows, scale))
    if columns and columns.sum_dim == 0:
        own_columns = own_rows.summed_over_rows()
    elif columns:
        own_columns = quantize_columns(
            t, columns, rounding, power_of_two, request.groups, _if_tensorwise(columns, scale)
        )
    return Operands(own_rows, own_columns)


def _if_tensorwise(fmt: OperandFormat, scale: Tensor) -> Tensor | None:
    return scale if fmt.granularity == "tensorwise" else None


def quantize_swiglu_operands(
    scheme: LowBitScheme, x: Tensor, dy: Tensor | None, request: OperandRequest, router_dots: bool = False
) -> SwiGLUOperands:
    """Quantize what a SwiGLU MLP computes between its GEMMs from x [M, 2I], fused where a kernel exists.

    Of "x": operands of swiglu(x) [M, I], the input of the down projection. Of "dy": operands of the gradient [M, 2I] of
    x, given the gradient dy [M, I] of swiglu(x). router_dots: whether `router_dots_ref(dy, x)` is wanted too.
    """
    rows, columns = scheme.formats_of(request.name, request.needs)
    rounding, delayed = scheme.rounding(request.name, request.key), request.delayed
    if delayed is not None and rows is not None and rows == columns:
        codes, codes_t, scale, amax, dots = quantize_swiglu_delayed(
            x, dy, rows.fmt, delayed.scale, *rounding, scheme.power_of_two, router_dots
        )
        if delayed.amax is not None:
            scale = record_amax(delayed.amax, amax, scale)
        return SwiGLUOperands(
            Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale, columns)), dots
        )
    if not writes_swiglu_codes(scheme, request.name, request.needs):
        t, dots = activation_dots(x, dy, router_dots)
        return SwiGLUOperands(quantize_operands(scheme, t, request), dots)
    codes, scale, codes_t, scale_t, dots = quantize_swiglu(
        x, dy, rows.fmt, rows.granularity, columns.granularity, *rounding, scheme.power_of_two,
        *(request.groups or NO_GROUPS), router_dots,
    )  # fmt: skip
    return SwiGLUOperands(
        Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale_t, columns)), dots
    )


def writes_swiglu_codes(scheme: LowBitScheme, name: TensorName, needs: NeedsOperand = BOTH) -> bool:
    """Whether `quantize_swiglu_operands` quantizes the tensor `name` as it computes it, for both of its GEMMs."""
    rows, columns = scheme.formats_of(name, needs)
    if rows is None or columns is None:
        return False
    if scheme.amax_history:
        return rows == columns
    one_format = columns._replace(granularity=rows.granularity) == rows
    return one_format and supports_swiglu_dual(rows.fmt, rows.granularity, columns.granularity)


def rowwise_swiglu(
    scheme: LowBitScheme, name: TensorName, key: Tensor | None = None, needs: NeedsOperand = BOTH
) -> RowwiseQuantization | None:
    """How `quantize_swiglu_operands` quantizes the tensor `name`, if both of its operands have one scale per row.

    A pair of such tensors takes fewer passes in another order (`swiglu_mlp.py`).
    """
    rows, columns = scheme.formats_of(name, needs)
    if rows is None or rows != columns or not supports_swiglu_rowwise(rows.fmt, rows.granularity):
        return None
    return RowwiseQuantization(rows.fmt, scheme.power_of_two, scheme.rounding(name, key))


def multiply(
    scheme: LowBitScheme,
    gemm: Gemm,
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    groups: TokenPermutation | None = None,
) -> Tensor:
    """The product of a GEMM in `dtype`; (a, b) are (x, w), (dy, w) or (dy, x). bias [N] is added to `output`. groups:
    of the rows of x and dy, each of which is multiplied with its own matrix of w [groups * N, K], or gives that of dw.
    """
    fast_accum = applies(scheme.fast_accum, gemm)
    if groups is None:
        return gemm_table.multiply(gemm, a, b, dtype, bias, fast_accum=fast_accum)
    return grouped_table.multiply_grouped(gemm, a, b, dtype, groups, fast_accum=fast_accum)

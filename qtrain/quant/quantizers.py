"""Quantizers by operand format: along a tensor's rows, along its columns into transposed codes, or both from one read.

Formats whose scales are fp32 share one set of operators, which fuse both layouts. Block scales in fewer bits have a
quantizer of their own in `LOW_BIT_SCALES`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.numerics.philox import Rounding
from qtrain.kernels.quantize.binary import binary_center, binary_codes, binary_scale, binary_statistic
from qtrain.kernels.quantize.column_groups import NO_GROUPS, BlockGroups
from qtrain.kernels.quantize.gather_rows import GatheredRows, in_memory, with_index
from qtrain.kernels.quantize.mx import quantize_mx
from qtrain.kernels.quantize.nvfp4 import quantize_nvfp4
from qtrain.kernels.quantize.operators import (
    quantize,
    quantize_dual,
    quantize_dual_into,
    quantize_into,
    quantize_transposed,
)
from qtrain.tensors.quantized_tensor import OperandFormat, Operands, QuantizedTensor

Pair = tuple[QuantizedTensor, QuantizedTensor]


def _quantize_mx(t: Tensor, fmt: OperandFormat, rounding: Rounding, transposed: bool) -> QuantizedTensor:
    # A group of 32 lies along the sum: of transposed codes that is along the columns of t.
    codes, scale = quantize_mx(t.t().contiguous() if transposed else t, fmt.fmt)
    return QuantizedTensor(codes, scale, fmt)


def _quantize_nvfp4(t: Tensor, fmt: OperandFormat, rounding: Rounding, transposed: bool) -> QuantizedTensor:
    # Rotated and transposed within the operator: the bits that it draws belong to the elements of t.
    key = rounding.column_key if transposed else rounding.row_key
    codes, scale, tensor_scale = quantize_nvfp4(t, key, rounding.role, transposed, fmt.hadamard)
    return QuantizedTensor(codes, scale, fmt, tensor_scale)


LOW_BIT_SCALES: dict[torch.dtype, Callable[[Tensor, OperandFormat, Rounding, bool], QuantizedTensor]] = {
    torch.float8_e8m0fnu: _quantize_mx,
    torch.float8_e4m3fn: _quantize_nvfp4,
}
"""Quantizers (t, format, rounding, transposed) -> codes by the dtype of block scales that are not fp32."""


def quantize_rows(
    t: Tensor,
    fmt: OperandFormat,
    rounding: Rounding,
    power_of_two: bool,
    scale: Tensor | None = None,
    center: Tensor | None = None,
    before: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """t [M, K] -> codes [M, K]. scale: of all of t, fp32 [1], if it is given; of binary codes together with the center,
    fp32 [1]. before: codes and scales of t's previous value, whose memory is overwritten where a kernel can; not for
    compiled code."""
    if FORMATS[fmt.fmt].signs:
        if scale is None:
            statistic = binary_statistic(t)
            scale, center = binary_scale(statistic), binary_center(statistic)
        assert center is not None, "a given scale of binary codes comes with the center"
        return QuantizedTensor(binary_codes(t, center), scale, fmt)
    if quantizer := LOW_BIT_SCALES.get(fmt.scale_dtype):
        return quantizer(t, fmt, rounding, False)
    if before is not None and scale is None:
        memory = before.codes, before.scale
        return QuantizedTensor(*quantize_into(memory, t, fmt.fmt, fmt.granularity, rounding, power_of_two), fmt)
    # A custom op may not return its input: the given scale comes back as a copy, and the original is kept.
    codes, used = quantize(t, fmt.fmt, fmt.granularity, rounding.row_key, rounding.role, power_of_two, scale)
    return QuantizedTensor(codes, used if scale is None else scale, fmt)


def quantize_columns(
    t: Tensor,
    fmt: OperandFormat,
    rounding: Rounding,
    power_of_two: bool,
    groups: BlockGroups | None = None,
    scale: Tensor | None = None,
) -> QuantizedTensor:
    """t [M, K] -> transposed codes [K, M]; stochastic rounding draws the bits that `quantize_rows` draws. groups: of
    the rows of t; a scale of a whole column is then one per (group, column). scale: given, of all of t fp32 [1] or of
    its columns [K]."""
    if quantizer := LOW_BIT_SCALES.get(fmt.scale_dtype):
        return quantizer(t, fmt, rounding, True)
    codes, used = quantize_transposed(
        t, fmt.fmt, fmt.granularity, rounding.column_key, rounding.role, power_of_two, scale, *(groups or NO_GROUPS)
    )
    return QuantizedTensor(codes, used if scale is None else scale, fmt)


class ReuseBuffers(NamedTuple):
    """What quantizing a weight may use of its previous codes."""

    operands: Operands
    """The previous codes and scales, whose memory is overwritten where a kernel can."""
    amax: Tensor | None = None
    """The absmax of the present value, if it is known: fp32 bits in int32 [1]."""


def quantize_dual_layout(
    t: Tensor | GatheredRows,
    rows: OperandFormat,
    columns: OperandFormat,
    rounding: Rounding,
    power_of_two: bool,
    groups: BlockGroups | None = None,
    reuse: ReuseBuffers | None = None,
    scale: Tensor | None = None,
) -> Pair:
    """t [M, K] -> codes [M, K] and transposed codes [K, M], from one read of t where a kernel allows; gathered rows
    are then read from the matrix that they are gathered from. groups: as for `quantize_columns`. scale: of all of t,
    fp32 [1], if it is given."""
    if rows.scale_dtype in LOW_BIT_SCALES or columns.scale_dtype in LOW_BIT_SCALES:
        t = in_memory(t)
        # Two reads: low-bit scales have no fused kernel.
        return quantize_rows(t, rows, rounding, power_of_two), quantize_columns(t, columns, rounding, power_of_two)
    # Written into the previous codes: no allocation, no copy, and the addresses that CUDA graphs know.
    if reuse is not None and rows == columns:
        before, before_t = reuse.operands
        assert isinstance(t, Tensor) and isinstance(before, QuantizedTensor) and isinstance(before_t, QuantizedTensor)
        memory = before.codes, before.scale, before_t.codes, before_t.scale
        codes, scale, codes_t, scale_t = quantize_dual_into(  # codes [M, K], codes_t [K, M]
            memory, t, rows.fmt, rows.granularity, rounding, power_of_two, *(groups or NO_GROUPS), reuse.amax
        )
        return QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale_t, columns)
    x, index = with_index(t)
    codes, used, codes_t, used_t = quantize_dual(
        x, rows.fmt, rows.granularity, columns.granularity, *rounding, power_of_two, scale, columns.fmt,
        *(groups or NO_GROUPS), *index,
    )  # fmt: skip
    used, used_t = (used, used_t) if scale is None else (scale, scale)
    return QuantizedTensor(codes, used, rows), QuantizedTensor(codes_t, used_t, columns)

"""Products of groups of rows with a matrix each, found by the formats and granularities of both operands.

    output       y  [R, N]: each group's rows of x  [R, K], times its matrix of w [groups * N, K]
    grad_input   dx [R, K]: each group's rows of dy [R, N], times its matrix, as transposed codes [K, groups * N]
    grad_weight  dw [groups * N, K]: of each group, the sum over its own rows

The rows of the table multiply K-major codes, as in `gemm_table.py`. Any other pair is dequantized and multiplied in
high precision.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.grouped.grouped_blockwise_mm import k_grouped_blockwise_mm, m_grouped_blockwise_mm
from qtrain.kernels.grouped.grouped_int4_mm import k_grouped_int4_mm, m_grouped_int4_mm
from qtrain.kernels.grouped.grouped_mm import k_grouped_mm, m_grouped_mm
from qtrain.kernels.grouped.grouped_plain_mm import k_grouped_plain_mm, m_grouped_plain_mm
from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.quant.gemm_table import FP4, FP8, INT4, INT8, by_formats
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, QuantizedTensor

Product = Callable[[QuantizedTensor, QuantizedTensor, TokenPermutation, torch.dtype, bool], Tensor]
"""(a, b, groups, dtype, fast_accum) -> the product in dtype."""


class GroupedProducts(NamedTuple):
    """The products of two operand formats."""

    rows: Product
    """`output`, `grad_input`: rows of a [R, K] times their group's matrix of b."""
    sums: Product
    """`grad_weight`: of each group, the sum over its own columns of a [N, R] and b [K, R]."""


# Scales per row and per tensor: factors of the whole sum, applied in the epilogue.
_SCALED = GroupedProducts(
    lambda a, b, g, dtype, fast: m_grouped_mm(
        a.codes, b.codes, a.scale, b.scale, g.group_of_block, g.starts, dtype, fast
    ),
    lambda a, b, g, dtype, fast: k_grouped_mm(a.codes, b.codes, a.scale, b.scale, g.starts, dtype, fast),
)
# Block scales are applied to the fp32 partial sum of each block: there is no other accumulator to choose.
_BLOCKWISE = GroupedProducts(
    lambda a, b, g, dtype, _: m_grouped_blockwise_mm(
        a.codes, b.codes, a.scale, b.scale, *_blocks(a, b), g.group_of_block, g.starts, dtype
    ),
    lambda a, b, g, dtype, _: k_grouped_blockwise_mm(
        a.codes, b.codes, a.scale, b.scale, *_blocks(a, b), g.starts, dtype
    ),
)
# Unpacked to INT8 first, whose sums are exact.
_PACKED = GroupedProducts(
    lambda a, b, g, dtype, _: m_grouped_int4_mm(a.codes, b.codes, a.scale, b.scale, g.group_of_block, g.starts, dtype),
    lambda a, b, g, dtype, _: k_grouped_int4_mm(a.codes, b.codes, a.scale, b.scale, g.starts, dtype),
)
# Dequantizing to bf16 is exact: a code times a block scale has at most 8 significant bits.
_EMULATED = GroupedProducts(
    lambda a, b, g, dtype, _: _times_tensor_scales(
        m_grouped_plain_mm(a.dequantize(dtype), b.dequantize(dtype), g.group_of_block, g.starts), a, b
    ),
    lambda a, b, g, dtype, _: _times_tensor_scales(
        k_grouped_plain_mm(a.dequantize(dtype), b.dequantize(dtype), g.starts, dtype), a, b
    ),
)


def _blocks(a: QuantizedTensor, b: QuantizedTensor) -> tuple[str, str]:
    return a.format.granularity, b.format.granularity


def _times_tensor_scales(y: Tensor, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    if a.tensor_scale is None or b.tensor_scale is None:  # MXFP8 has none; NVFP4's are one a tensor, in fp32
        return y
    return (y.float() * (a.tensor_scale * b.tensor_scale)).to(y.dtype)


_EPILOGUE, _BLOCKS = ("rowwise", "tensorwise"), ("1x128", "128x128")

_ROWS: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], GroupedProducts]] = [
    (INT8, _EPILOGUE, _EPILOGUE, _SCALED),
    (FP8, _EPILOGUE, _EPILOGUE, _SCALED),
    (INT8, _BLOCKS, _BLOCKS, _BLOCKWISE),
    (FP8, _BLOCKS, _BLOCKS, _BLOCKWISE),
    (INT8, ("32x32",), ("32x32",), _BLOCKWISE),
    (INT4, ("rowwise",), ("rowwise",), _PACKED),
    (FP8, ("1x32",), ("1x32",), _EMULATED),
    (FP4, ("1x16",), ("1x16",), _EMULATED),
]

GROUPED_PRODUCTS = by_formats(_ROWS)
"""The products of each (format of a, granularity of a, format of b, granularity of b)."""


def find_grouped(a: OperandFormat, b: OperandFormat) -> GroupedProducts:
    """The products of K-major operands in these formats."""
    return GROUPED_PRODUCTS[a.fmt, a.granularity, b.fmt, b.granularity]


def emulates_grouped(a: OperandFormat, b: OperandFormat) -> bool:
    """Whether the products of these formats are emulated on every device, as no kernel multiplies groups of them."""
    return find_grouped(a, b) is _EMULATED


def multiply_grouped(
    gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, groups: TokenPermutation, *, fast_accum: bool = True
) -> Tensor:
    """The product of `gemm` in dtype; (a, b) are (x, w), (dy, w) or (dy, x)."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        products = find_grouped(a.format, b.format)
        product = products.sums if gemm == "grad_weight" else products.rows
        return product(a, b, groups, dtype, fast_accum)
    a, b = (t.dequantize(dtype) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    if gemm == "grad_weight":
        return k_grouped_plain_mm(a.t(), b.t(), groups.starts, dtype)  # views: dy [R, N] and x [R, K], read along R
    # [E * N, K] has the matrices along its rows; its transpose, for grad_input, along its columns.
    return m_grouped_plain_mm(a, b if gemm == "output" else b.t(), groups.group_of_block, groups.starts)

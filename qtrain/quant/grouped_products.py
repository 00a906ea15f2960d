"""Products of groups of rows with a matrix each, in the formats that `gemm_table.py` has.

output       y  [R, N]: each group's rows of x  [R, K], times its matrix of w [groups * N, K]
grad_input   dx [R, K]: each group's rows of dy [R, N], times its matrix, as transposed codes [K, groups * N]
grad_weight  dw [groups * N, K]: of each group, the sum over its own rows
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
from qtrain.tensors.quantized_tensor import QuantizedTensor

Product = Callable[[QuantizedTensor, QuantizedTensor, TokenPermutation, torch.dtype, bool], Tensor]
"""(a, b, groups, dtype, fast_accum) -> the product in dtype."""


class GroupedProducts(NamedTuple):
    """The grouped products of two operand formats, of K-major codes."""

    rows: Product
    """`output`, `grad_input`: rows of a [R, K] times their group's matrix of b."""
    sums: Product
    """`grad_weight`: of each group, the sum over its own columns of a [N, R] and b [K, R]."""


# Scales per row and per tensor: factors of the whole sum, applied in the epilogue.
SCALED = GroupedProducts(
    lambda a, b, g, dtype, fast: m_grouped_mm(
        a.codes, b.codes, a.scale, b.scale, g.group_of_block, g.starts, dtype, fast
    ),
    lambda a, b, g, dtype, fast: k_grouped_mm(a.codes, b.codes, a.scale, b.scale, g.starts, dtype, fast),
)
# Block scales are applied to the fp32 partial sum of each block: there is no other accumulator to choose.
BLOCKWISE = GroupedProducts(
    lambda a, b, g, dtype, _: m_grouped_blockwise_mm(
        a.codes, b.codes, a.scale, b.scale, *_blocks(a, b), g.group_of_block, g.starts, dtype
    ),
    lambda a, b, g, dtype, _: k_grouped_blockwise_mm(
        a.codes, b.codes, a.scale, b.scale, *_blocks(a, b), g.starts, dtype
    ),
)
# Unpacked to INT8 first, whose sums are exact.
PACKED = GroupedProducts(
    lambda a, b, g, dtype, _: m_grouped_int4_mm(a.codes, b.codes, a.scale, b.scale, g.group_of_block, g.starts, dtype),
    lambda a, b, g, dtype, _: k_grouped_int4_mm(a.codes, b.codes, a.scale, b.scale, g.starts, dtype),
)
# Dequantizing to bf16 is exact: a code times a block scale has at most 8 significant bits.
EMULATED = GroupedProducts(
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

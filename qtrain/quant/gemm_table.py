"""The products of two operands, found by the formats and granularities of both, dense and of groups of rows.

A row of `PRODUCTS` multiplies K-major codes. Any other pair is dequantized and multiplied in high precision: formats
that no kernel multiplies, a plain tensor with codes of a weight, or codes that were quantized along their other
dimension. A new format is a new row.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.gemm.add_scaled_mm import add_scaled_mm
from qtrain.kernels.gemm.blockwise_mm import blockwise_mm
from qtrain.kernels.gemm.cublas_lt import cublas_lt
from qtrain.kernels.gemm.int4_mm import scaled_int4_mm
from qtrain.kernels.gemm.low_rank_mm import low_rank_mm, plain_low_rank_mm
from qtrain.kernels.gemm.persistent import transpose_8bit
from qtrain.kernels.gemm.scaled_mm import scaled_mm
from qtrain.kernels.grouped.grouped_plain_mm import k_grouped_plain_mm, m_grouped_plain_mm
from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.quantize.mx import mx_mm
from qtrain.kernels.quantize.nf4_to_8bit import nf4_to_8bit
from qtrain.kernels.quantize.other_layout import transpose_rowwise
from qtrain.quant.grouped_products import BLOCKWISE, EMULATED, PACKED, SCALED, GroupedProducts
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, QuantizedTensor
from qtrain.tensors.stored_weight import read_again

Product = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype, Tensor | None, bool], Tensor]
"""(a [M, K], b [N, K], dtype, bias [N], fast_accum) -> a · bᵀ + bias [M, N] in dtype."""

LowRank = tuple[Tensor, Tensor]
"""(left [M, r], right [N, r]) of a product left · rightᵀ [M, N] that is added to another one, in its dtype."""


def _scaled(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    return scaled_mm(a.codes, b.codes, a.scale, b.scale, dtype, bias, fast_accum)


def _blockwise(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    return blockwise_mm(a.codes, b.codes, a.scale, b.scale, a.format.granularity, b.format.granularity, dtype, bias)


def _int4(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    # Two codes a byte; an odd K is padded with a zero code, which adds nothing.
    y = scaled_int4_mm(a.codes, b.codes, a.scale, b.scale, 2 * a.codes.shape[1], dtype)
    return y if bias is None else y + bias


def _mx(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    return mx_mm(a.codes, b.codes, a.scale, b.scale, dtype, bias)


def _nvfp4(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """Emulated: a code times a block scale has 6 significant bits, so dequantizing to bf16 is exact."""
    # The tensor scales are left out of the operands: in bf16 they would cost the exactness.
    y = F.linear(a.dequantize(dtype), b.dequantize(dtype)).float() * (a.tensor_scale * b.tensor_scale)
    return (y if bias is None else y + bias).to(dtype)


def _dequantized(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """Of formats that no kernel multiplies, such as INT4 weights with INT8 activations: their values."""
    # x is dequantized again in backward: a compiler that found both equal would keep its values, not its codes.
    a = a._replace(scale=read_again(a.scale, a.codes))
    return F.linear(a.values(dtype), b.values(dtype), bias)


class Products(NamedTuple):
    """The products of two operand formats, of K-major codes."""

    dense: Product
    grouped: GroupedProducts


_FP8, _EPILOGUE, _BLOCKS = ("e4m3", "e5m2"), ("rowwise", "tensorwise"), ("1x128", "128x128")

# Formats of both operands, granularities of both. Scales per row and per tensor are factors of the whole sum and are
# applied in the epilogue; block scales are applied to the partial sum of each block of K.
_ROWS: list[tuple[tuple[str, ...], tuple[str, ...], Products]] = [
    (("int8",), _EPILOGUE, Products(_scaled, SCALED)),
    (_FP8, _EPILOGUE, Products(_scaled, SCALED)),
    (("int8",), _BLOCKS, Products(_blockwise, BLOCKWISE)),
    (_FP8, _BLOCKS, Products(_blockwise, BLOCKWISE)),
    (("int8",), ("32x32",), Products(_blockwise, BLOCKWISE)),
    (("int4",), ("rowwise",), Products(_int4, PACKED)),
    (_FP8, ("1x32",), Products(_mx, EMULATED)),
    (("e2m1",), ("1x16",), Products(_nvfp4, EMULATED)),
]

PRODUCTS = {
    key: products
    for formats, granularities, products in _ROWS
    for key in itertools.product(formats, granularities, formats, granularities)
}
"""The products of each (format of a, granularity of a, format of b, granularity of b)."""

DEQUANTIZED = Products(_dequantized, EMULATED)
"""Those of any other two formats."""


def products_of(a: OperandFormat, b: OperandFormat) -> Products:
    """Of K-major operands in these formats."""
    return PRODUCTS.get((a.fmt, a.granularity, b.fmt, b.granularity), DEQUANTIZED)


def is_dequantized(a: OperandFormat, b: OperandFormat) -> bool:
    """Whether codes in these formats are dequantized for their product. NF4 is not: 8-bit codes are made of it."""
    return b.fmt != "nf4" and products_of(a, b) is DEQUANTIZED


def emulates_grouped(a: OperandFormat, b: OperandFormat) -> bool:
    """Whether grouped products of these formats are emulated on every device, as no kernel multiplies groups of
    them."""
    return products_of(a, b).grouped is EMULATED


def multiply(
    gemm: Gemm,
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    *,
    fast_accum: bool = True,
) -> Tensor:
    """The product of `gemm` in dtype; (a, b) are (x, w), (dy, w) or (dy, x). bias [N] is added to `output`, and the
    product of low_rank to either."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if low_rank is not None and not adds_low_rank(a.format, b.format):
            y = multiply(gemm, a, b, dtype, bias, fast_accum=fast_accum)
            return torch.addmm(y, low_rank[0], low_rank[1].t())
        if b.format.fmt == "nf4":
            b = _nf4_in_8_bits(gemm, a, b)
        elif gemm == "grad_input" and b.format.sum_dim == 0:
            b = _other_layout(a, b)
        if low_rank is not None:
            return low_rank_mm(a.codes, b.codes, a.scale, b.scale, *low_rank, bias, fast_accum)
        return products_of(a.format, b.format).dense(a, b, dtype, bias, fast_accum)
    # dy in high precision, w stored in low bits.
    if gemm == "grad_input" and isinstance(b, QuantizedTensor) and isinstance(a, Tensor):
        b = _read_after(a, b)
    a, b = (t.values(dtype) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    if low_rank is not None:
        return plain_low_rank_mm(a, b if gemm == "output" else b.t(), *low_rank, bias)
    if gemm == "output":
        return F.linear(a, b, bias)  # [M, K] · [N, K]ᵀ
    return a @ b if gemm == "grad_input" else a.t() @ b  # [M, N] · [N, K], or [M, N]ᵀ · [M, K]


def adds_low_rank(a: OperandFormat | None, b: OperandFormat | None) -> bool:
    """Whether the kernel of the product of these formats adds one of low rank: that which applies scales in its
    epilogue. None: an operand in high precision."""
    if a is None or b is None:
        return False
    return b.fmt == "nf4" or products_of(a, b).dense is _scaled


def adds_product(a: OperandFormat | None, b: OperandFormat | None, *, fast_accum: bool = True) -> bool:
    """Whether `add_product` of these formats is faster than a product and a sum; None: an operand in high precision."""
    if a is None or b is None or products_of(a, b).dense is not _scaled:
        return False
    # Where FP8's sums are promoted to fp32 only cuBLAS is as fast as its product and a sum.
    return fast_accum or a.fmt == "int8" or cublas_lt() is not None


def add_product(total: Tensor, a: QuantizedTensor, b: QuantizedTensor, *, fast_accum: bool = True) -> None:
    """total [N, K] += the product of `grad_weight`, of (dy, x)."""
    add_scaled_mm(total, a.codes, b.codes, a.scale, b.scale, fast_accum)


def multiply_grouped(
    gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, groups: TokenPermutation, *, fast_accum: bool = True
) -> Tensor:
    """The product of `gemm` in dtype; (a, b) are (x, w), (dy, w) or (dy, x)."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        products = products_of(a.format, b.format).grouped
        product = products.sums if gemm == "grad_weight" else products.rows
        return product(a, b, groups, dtype, fast_accum)
    a, b = (t.values(dtype) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    if gemm == "grad_weight":
        return k_grouped_plain_mm(a.t(), b.t(), groups.starts, dtype)  # views: dy [R, N] and x [R, K], read along R
    # [E * N, K] has the matrices along its rows; its transpose, for grad_input, along its columns.
    return m_grouped_plain_mm(a, b if gemm == "output" else b.t(), groups.group_of_block, groups.starts)


def _nf4_in_8_bits(gemm: Gemm, a: QuantizedTensor, w: QuantizedTensor) -> QuantizedTensor:
    """The codes of w in a's format, K-major, of which this product alone has use: w is frozen, and stays in 4 bits."""
    columns, fmt = 2 * w.codes.shape[1], a.format.fmt
    codes, scale = nf4_to_8bit(w.codes, w.scale, columns, fmt, gemm == "grad_input", after=a.codes)
    return QuantizedTensor(codes, scale, OperandFormat(fmt, "rowwise"))


def _other_layout(dy: QuantizedTensor, w: QuantizedTensor) -> QuantizedTensor:
    """The codes of w K-major, of which this product alone has use: of blocks that are square, or the whole tensor, the
    same codes; under scales of rows those of its values, with scales of columns.

    They are made after dy: else a compiler may make them in forward and keep those of every layer, which it does where
    their scales are fewer."""
    fmt = w.format._replace(sum_dim=1)
    if fmt.granularity == "rowwise":
        codes, scale = transpose_rowwise(w.codes, w.scale, fmt.fmt, after=dy.codes)
        return QuantizedTensor(codes, scale, fmt)
    # A scale per block is transposed with its block; one for the tensor stays.
    codes = transpose_8bit(w.codes, after=dy.codes)
    return QuantizedTensor(codes, w.scale if w.scale.ndim == 1 else w.scale.t(), fmt)


def _read_after(dy: Tensor, w: QuantizedTensor) -> QuantizedTensor:
    """w, read again once dy exists: else a compiler would dequantize it once for forward and backward, and keep it.

    The tensor that dequantizing reads first is the one to copy: packed codes are unpacked before a scale is read.
    """
    if w.format.fmt != "nf4" and FORMATS[w.format.fmt].packing > 1:
        return w._replace(codes=read_again(w.codes, dy))
    return w._replace(scale=read_again(w.scale, dy))

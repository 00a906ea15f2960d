"""The products of two operands, found by the formats and granularities of both.

A row of `PRODUCTS` multiplies K-major codes. Any other pair is dequantized and multiplied in high precision: a plain
tensor with a stored weight, or codes that were quantized along their other dimension. A new format is a new row.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.gemm.blockwise_mm import blockwise_mm
from qtrain.kernels.gemm.int4_mm import scaled_int4_mm
from qtrain.kernels.gemm.persistent import transpose_8bit
from qtrain.kernels.gemm.scaled_mm import scaled_mm
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.numerics.philox import NEAREST
from qtrain.kernels.quantize.mx import mx_mm
from qtrain.kernels.quantize.nf4_to_8bit import nf4_to_8bit
from qtrain.quant.quantizers import quantize_columns
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, QuantizedTensor
from qtrain.tensors.stored_weight import read_again

T = TypeVar("T")
ProductKey = tuple[str, str, str, str]
"""(format of a, granularity of a, format of b, granularity of b)"""

Product = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype, Tensor | None, bool], Tensor]
"""(a [M, K], b [N, K], dtype, bias [N], fast_accum) -> a · bᵀ + bias [M, N] in dtype."""

INT8, INT4, FP8, FP4 = ("int8",), ("int4",), ("e4m3", "e5m2"), ("e2m1",)


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
    return y if bias is None else y.add_(bias)


def _mx(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    return mx_mm(a.codes, b.codes, a.scale, b.scale, dtype, bias)


def _nvfp4(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """Emulated: a code times a block scale has 6 significant bits, so dequantizing to bf16 is exact."""
    # The tensor scales are left out of the operands: in bf16 they would cost the exactness.
    y = F.linear(a.dequantize(dtype), b.dequantize(dtype)).float() * (a.tensor_scale * b.tensor_scale)
    return (y if bias is None else y + bias).to(dtype)


# Formats of both operands, granularities of a and of b, product. Scales per row and per tensor are factors of the whole
# sum and are applied in the epilogue; block scales are applied to the partial sum of each block of K.
_ROWS: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], Product]] = [
    (INT8, ("rowwise", "tensorwise"), ("rowwise", "tensorwise"), _scaled),
    (FP8, ("rowwise", "tensorwise"), ("rowwise", "tensorwise"), _scaled),
    (INT8, ("1x128", "128x128"), ("1x128", "128x128"), _blockwise),
    (FP8, ("1x128", "128x128"), ("1x128", "128x128"), _blockwise),
    (INT8, ("32x32",), ("32x32",), _blockwise),
    (INT4, ("rowwise",), ("rowwise",), _int4),
    (FP8, ("1x32",), ("1x32",), _mx),
    (FP4, ("1x16",), ("1x16",), _nvfp4),
]


def by_formats(rows: Iterable[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], T]]) -> dict[ProductKey, T]:
    """Rows (formats of both operands, granularities of a, of b, entry) -> the entry of each combination."""
    return {
        pair: entry
        for formats, granularities_a, granularities_b, entry in rows
        for pair in itertools.product(formats, granularities_a, formats, granularities_b)
    }


PRODUCTS = by_formats(_ROWS)
"""The product of each (format of a, granularity of a, format of b, granularity of b)."""


def multiply(
    gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None, *, fast_accum: bool = True
) -> Tensor:
    """The product of `gemm` in dtype; (a, b) are (x, w), (dy, w) or (dy, x). bias [N] is added to `output`."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if b.format.fmt == "nf4":
            b = _nf4_in_8_bits(gemm, a, b)
        elif gemm == "grad_input" and b.format.sum_dim == 0:
            b = _other_layout(b)
        key = a.format.fmt, a.format.granularity, b.format.fmt, b.format.granularity
        return PRODUCTS[key](a, b, dtype, bias, fast_accum)
    # dy in high precision, w stored in low bits.
    if gemm == "grad_input" and isinstance(b, QuantizedTensor):
        b = _read_after(a, b)
    a, b = (t.dequantize(dtype) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    if gemm == "output":
        return F.linear(a, b, bias)  # [M, K] · [N, K]ᵀ
    return a @ b if gemm == "grad_input" else a.t() @ b  # [M, N] · [N, K], or [M, N]ᵀ · [M, K]


def _nf4_in_8_bits(gemm: Gemm, a: QuantizedTensor, w: QuantizedTensor) -> QuantizedTensor:
    """The codes of w in a's format, K-major, of which this product alone has use: w is frozen, and stays in 4 bits."""
    codes, scale = nf4_to_8bit(w.codes, w.scale, 2 * w.codes.shape[1], a.format.fmt, gemm == "grad_input")
    return QuantizedTensor(codes, scale, OperandFormat(a.format.fmt, "rowwise"))


def _other_layout(w: QuantizedTensor) -> QuantizedTensor:
    """The codes of w K-major, of which this product alone has use: of blocks that are square, or the whole tensor, the
    same codes; under scales of rows those of its values, with scales of columns."""
    fmt = w.format._replace(sum_dim=1)
    if fmt.granularity == "rowwise":
        return quantize_columns(w.dequantize(torch.float32), fmt, NEAREST, False)
    return QuantizedTensor(transpose_8bit(w.codes), w.scale if w.scale.ndim == 1 else w.scale.t(), fmt)


def _read_after(dy: Tensor, w: QuantizedTensor) -> QuantizedTensor:
    """w, read again once dy exists: else a compiler would dequantize it once for forward and backward, and keep it.

    The tensor that dequantizing reads first is the one to copy: packed codes are unpacked before a scale is read.
    """
    if w.format.fmt != "nf4" and FORMATS[w.format.fmt].packing > 1:
        return w._replace(codes=read_again(w.codes, dy))
    return w._replace(scale=read_again(w.scale, dy))

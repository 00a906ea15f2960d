"""8-bit codes of a frozen weight with a scale per row -> transposed codes with a scale per column.

`output` reads codes [N, K] of a weight, `grad_input` transposed codes [K, N], which have scales along the other
dimension. With one layout in memory (--weight_codes one) the other is made where the product reads it, and freed after
it. Two passes read the codes, one for the absmax of each column and one to quantize: 3 bytes an element. By way of the
dequantized weight, in fp32, it would be 14.

The values are those of the codes in fp32, so the new codes are those that `quantize_transposed` makes of them.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.encode import (
    abs_bits,
    encode,
    encoding,
    inv_scale_of,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.quantize.reference import quantize_transposed_ref

TILE, TILES_PER_CTA = 64, 8
"""Rows and columns of a tile; and tiles below each other whose column maxima a CTA joins before its atomics."""


def transpose_rowwise_ref(codes: Tensor, scale: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """codes [N, K] in `fmt` (int8, e4m3, e5m2), scale fp32 [N] -> codes [K, N], scale fp32 [K]."""
    return quantize_transposed_ref(codes.float() * scale[:, None], fmt, "rowwise")


@triton.jit
def _values(codes_ptr, scale_ptr, row, column, n, k, CODE: tl.constexpr):
    """fp32 [rows, columns]; 0 outside."""
    inside = (row < n)[:, None] & (column < k)[None, :]
    codes = tl.load(codes_ptr + row.to(tl.int64)[:, None] * k + column[None, :], inside, 0)
    scale = tl.load(scale_ptr + row, row < n, 0.0)[:, None]
    if CODE.fmt.is_float:
        # Exponent and mantissa where those of fp32 are, and their bias corrected: exact, of subnormal numbers too.
        bits = codes.to(tl.int32)
        SHIFT: tl.constexpr = 23 - CODE.fmt.mantissa_bits
        BIAS: tl.constexpr = 2.0 ** (127 - CODE.fmt.exponent_bias)
        values = (((bits & 0x7F) << SHIFT) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * BIAS
    else:
        values = codes.to(tl.float32)
    return values * scale


@triton.jit
def _rowwise_column_absmax_kernel(
    # int8 [n, k], fp32 [n]; int32 [k], zero before: bits of the absmaxes.
    codes_ptr, scale_ptr, amax_ptr, n, k, CODE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, TILE)
    column, first = tl.program_id(0) % across * TILE + tl.arange(0, TILE), tl.program_id(0) // across * (TILE * TILES)
    amax = tl.zeros((TILE,), tl.int32)
    for tile in tl.static_range(TILES):
        row = first + tile * TILE + tl.arange(0, TILE)
        amax = tl.maximum(amax, tl.max(abs_bits(_values(codes_ptr, scale_ptr, row, column, n, k, CODE)), 0))
    tl.atomic_max(amax_ptr + column, amax, column < k, sem="relaxed")


@triton.jit
def _transpose_rowwise_kernel(
    # As above; int8 [k, n], fp32 [k].
    codes_ptr, scale_ptr, amax_ptr, out_ptr, out_scale_ptr, n, k, CODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, TILE)
    tile = tl.program_id(0) // across
    row, column = tile * TILE + tl.arange(0, TILE), tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    values = _values(codes_ptr, scale_ptr, row, column, n, k, CODE)
    amax = tl.load(amax_ptr + column, column < k, 0)
    nonfinite, scale = tl.max(amax, 0) >= 0x7F800000, scale_from_amax(amax, CODE)
    inv_scale, values = inv_scale_of(scale, nonfinite), zero_nonfinite(values, nonfinite)
    tl.store(out_scale_ptr + column, scale, (column < k) & (tile == 0))
    codes = encode(values, inv_scale[None, :], 0, False, False, CODE)
    # Threads along n store adjacent bytes.
    out = out_ptr + column.to(tl.int64)[:, None] * n + row[None, :]
    tl.store(out, tl.trans(codes), (column < k)[:, None] & (row < n)[None, :])


def launch_transpose_rowwise(codes: Tensor, scale: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """The kernels for `transpose_rowwise_ref`; codes contiguous and not empty."""
    (n, k), code = codes.shape, encoding(fmt, codes.device)
    out, out_scale = torch.empty(k, n, dtype=codes.dtype, device=codes.device), scale.new_empty(k)
    amax, across = torch.zeros(k, dtype=torch.int32, device=codes.device), triton.cdiv(k, TILE)
    codes = codes.view(torch.int8)
    _rowwise_column_absmax_kernel[(across * triton.cdiv(n, TILE * TILES_PER_CTA),)](
        codes, scale, amax, n, k, CODE=code, TILE=TILE, TILES=TILES_PER_CTA, num_warps=4
    )
    _transpose_rowwise_kernel[(across * triton.cdiv(n, TILE),)](
        codes, scale, amax, out.view(torch.int8), out_scale, n, k, CODE=code, TILE=TILE, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out, out_scale


def _fake(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes.new_empty(codes.shape[1], codes.shape[0]), scale.new_empty(codes.shape[1])


@operator("transpose_rowwise", fake=_fake)
def transpose_rowwise(codes: Tensor, scale: Tensor, fmt: str, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `transpose_rowwise_ref`. after: not read, see `gemm_table._other_layout`."""
    if not (codes.is_cuda and codes.numel()):
        return transpose_rowwise_ref(codes, scale, fmt)
    return launch_transpose_rowwise(codes.contiguous(), scale, fmt)

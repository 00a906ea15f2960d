"""NF4 codes of a frozen weight -> 8-bit codes with a scale per row of the operand, for 8-bit tensor cores.

Both products of a frozen linear sum along another dimension of the weight W [N, K]: `output` reads codes [N, K] with a
scale per row, `grad_input` transposed codes [K, N] with a scale per column of W. They are made where a product reads
them and freed after it: 1 byte per element of one matrix, where the dequantized weight takes 2, and is read again to be
quantized.

The values are those of `dequantize_nf4` in fp32, so a code is rounded once. A block of 64 holds its absmax exactly
(NF4 has -1 and 1), so the absmax of a row is the largest of its scales; that of a column takes a pass over the codes,
0.56 bytes per element.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.encode import abs_bits, encode, encoding, inv_scale_of, scale_from_amax, zero_nonfinite
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.quantize.nf4 import dequantize_nf4_ref, nf4_table
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref, scale_from_amax_ref

ROWS, BLOCKS_PER_CTA = 64, 8
"""Of a tile: rows of 64 elements; and tiles below each other whose column maxima a CTA joins before its atomics."""


def nf4_to_8bit_ref(codes: Tensor, scale: Tensor, columns: int, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """codes uint8 [N, ceil(K / 2)], scale fp32 [N, ceil(K / 64)] -> codes in `fmt` (int8, e4m3, e5m2) [N, K = columns]
    and scale fp32 [N]; transposed: [K, N] and [K]."""
    values = dequantize_nf4_ref(codes, scale, nf4_table(codes.device), columns, torch.float32)
    if transposed:
        return quantize_transposed_ref(values, fmt, "rowwise")
    new_scale = scale_from_amax_ref(scale.amax(1), fmt, "rowwise", values.shape)
    return quantize_ref(values.nan_to_num(0.0, 0.0, 0.0), fmt, "rowwise", scale=new_scale)  # Inf: codes of zero


@triton.jit
def _values(codes_ptr, scale_ptr, table_ptr, row, block, n, width, blocks):
    """fp32 [rows, 64]: the values of block `block` of each of these rows."""
    byte = block * 32 + tl.arange(0, 32)[None, :]
    at = row.to(tl.int64)[:, None]
    codes = tl.load(codes_ptr + at * width + byte, (row < n)[:, None] & (byte < width), 0).to(tl.int32)
    scale = tl.load(scale_ptr + row.to(tl.int64) * blocks + block, row < n, 0.0)[:, None]
    # The low nibble is the first of two neighbors.
    return tl.interleave(tl.load(table_ptr + (codes & 15)) * scale, tl.load(table_ptr + (codes >> 4)) * scale)


@triton.jit
def _column_absmax_kernel(
    # uint8 [n, width], fp32 [n, blocks], fp32 [16]; int32 [k], zero before: bits of the absmaxes.
    codes_ptr, scale_ptr, table_ptr, amax_ptr, n, k, width, blocks, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    block, first = tl.program_id(0) % blocks, tl.program_id(0) // blocks * (ROWS * TILES)
    column = block * 64 + tl.arange(0, 64)
    amax = tl.zeros((64,), tl.int32)
    for tile in tl.static_range(TILES):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        values = _values(codes_ptr, scale_ptr, table_ptr, row, block, n, width, blocks)
        # Rows beyond n would be 0 * table: masked, for a NaN of theirs is none of the column's.
        amax = tl.maximum(amax, tl.max(tl.where((row < n)[:, None], abs_bits(values), 0), 0))
    tl.atomic_max(amax_ptr + column, amax, column < k, sem="relaxed")


@triton.jit
def _encode_kernel(
    # As above; amax int32: of rows [n] or of columns [k].
    codes_ptr, scale_ptr, table_ptr, amax_ptr,
    # int8 [n, k] or [k, n]; fp32 [n] or [k].
    out_ptr, out_scale_ptr, n, k, width, blocks,
    CODE: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows and one block of 64 columns."""
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    row, column = tile * ROWS + tl.arange(0, ROWS), block * 64 + tl.arange(0, 64)
    values = _values(codes_ptr, scale_ptr, table_ptr, row, block, n, width, blocks)
    if TRANSPOSED:
        amax = tl.load(amax_ptr + column, column < k, 0)
    else:
        amax = tl.load(amax_ptr + row, row < n, 0)
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    scale = scale_from_amax(amax, CODE)
    inv_scale = inv_scale_of(scale, nonfinite)
    values = zero_nonfinite(values, nonfinite)
    inside = (row < n)[:, None] & (column < k)[None, :]
    if TRANSPOSED:
        tl.store(out_scale_ptr + column, scale, (column < k) & (tile == 0))
        codes = encode(values, inv_scale[None, :], 0, False, False, CODE)
        # Threads along n store adjacent bytes.
        out = out_ptr + column.to(tl.int64)[:, None] * n + row[None, :]
        tl.store(out, tl.trans(codes), tl.trans(inside))
    else:
        tl.store(out_scale_ptr + row, scale, (row < n) & (block == 0))
        codes = encode(values, inv_scale[:, None], 0, False, False, CODE)
        tl.store(out_ptr + row.to(tl.int64)[:, None] * k + column[None, :], codes, inside)


def launch_nf4_to_8bit(codes: Tensor, scale: Tensor, columns: int, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    """The kernels for `nf4_to_8bit_ref`; codes and scale contiguous."""
    (n, width), blocks, k = codes.shape, scale.shape[1], columns
    table, lines = nf4_table(codes.device), k if transposed else n
    out = codes.new_empty((k, n) if transposed else (n, k), dtype=FORMATS[fmt].dtype)
    out_scale = scale.new_empty(lines)
    if not out.numel():
        return out, out_scale.fill_(1e-12)  # SCALE_EPS, the scale of rows without elements
    if transposed:
        amax = torch.zeros(k, dtype=torch.int32, device=codes.device)
        _column_absmax_kernel[(blocks * triton.cdiv(n, ROWS * BLOCKS_PER_CTA),)](
            codes, scale, table, amax, n, k, width, blocks, ROWS=ROWS, TILES=BLOCKS_PER_CTA, num_warps=4
        )
    else:
        amax = scale.amax(1).view(torch.int32)  # scales are not negative: their bits are those of |x|
    _encode_kernel[(blocks * triton.cdiv(n, ROWS),)](
        codes, scale, table, amax, out.view(torch.int8), out_scale, n, k, width, blocks,
        CODE=encoding(fmt, codes.device), TRANSPOSED=transposed, ROWS=ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, out_scale


def _fake(codes: Tensor, columns: int, fmt: str, transposed: bool) -> tuple[Tensor, Tensor]:
    rows = codes.shape[0]
    shape = (columns, rows) if transposed else (rows, columns)
    return codes.new_empty(shape, dtype=FORMATS[fmt].dtype), codes.new_empty(shape[0], dtype=torch.float32)


@operator("nf4_to_8bit", fake=_fake)
def nf4_to_8bit(
    codes: Tensor, scale: Tensor, columns: int, fmt: str, transposed: bool, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `nf4_to_8bit_ref`. after: not read, see `gemm_table._other_layout`."""
    if not codes.is_cuda:
        return nf4_to_8bit_ref(codes, scale, columns, fmt, transposed)
    return launch_nf4_to_8bit(codes.contiguous(), scale.contiguous(), columns, fmt, transposed)

"""Rows gathered from a matrix x, each times a factor: the operator, and what quantizers need to read them from x.

    gathered [R, C]:  row r is x[token_of_row[r]] * weight_of_row[r], or zero where the token is -1

The product is fp32 and rounded once to x's dtype. Codes of gathered rows are computed from x as it is read where a
kernel can (`dual_bf16x2.py`): then the gathered matrix is never in memory. Of codes that are gathered themselves
`gather_dual` makes both layouts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.bf16x2 import bf16_bits, multiply_bf16x2

MAX_BLOCK = 2048
"""Columns per CTA: of bf16, two loads of 16 bytes per thread."""


class RowIndex(NamedTuple):
    """The rows [R] that are gathered from x [T, C], each row of x at least once; without tokens: x itself."""

    token_of_row: Tensor | None = None
    """int32 [R], the row of x; -1: zeros."""
    weight_of_row: Tensor | None = None
    """fp32 [R], the factor of each; None: 1."""

    def shape(self, x: Tensor) -> tuple[int, int]:
        """(R, C)."""
        return (x if self.token_of_row is None else self.token_of_row).shape[0], x.shape[1]

    @property
    def values(self) -> "RowIndex":
        """An index of fewer rows that has the same values."""
        # For an absmax: repeating rows, and rows of zeros, change none.
        return self if self.weight_of_row is not None else EVERY_ROW

    def gathered(self, x: Tensor) -> Tensor:
        """The gathered matrix [R, C] in memory."""
        return x if self.token_of_row is None else gather_rows(x, self.token_of_row, self.weight_of_row)


EVERY_ROW = RowIndex()


class GatheredRows(NamedTuple):
    """A gathered matrix that need not be in memory."""

    x: Tensor
    index: RowIndex

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.index.shape(self.x)


def in_memory(t: Tensor | GatheredRows) -> Tensor:
    """t as a matrix [R, C] in memory."""
    return t.index.gathered(t.x) if isinstance(t, GatheredRows) else t


def with_index(t: Tensor | GatheredRows) -> GatheredRows:
    """t as a matrix in memory and the index of its rows there."""
    return t if isinstance(t, GatheredRows) else GatheredRows(t, EVERY_ROW)


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def load_token(x_ptr, token, column, stride, inside):
    """x at rows `token`, zeros for -1, and columns `column`; rows of x are `stride` apart. All broadcast."""
    return tl.load(x_ptr + token.to(tl.int64) * stride + column, (token >= 0) & inside, 0)


@triton.jit
def load_weight(weight_ptr, row, token):
    """The weights of rows; 0 where the token is -1, whose product must be +0."""
    return tl.load(weight_ptr + row, token >= 0, 0.0)


@triton.jit
def times_weight(x, weight, PTX: tl.constexpr):
    """Words of two bf16, bf16 (-> fp32 that is exact in bf16) or fp32, times fp32 weights, rounded once."""
    # bf16 products are rounded in integer arithmetic: a conversion to bf16 and back would cost two instructions more.
    if x.dtype == tl.int32:
        return multiply_bf16x2(x, weight, PTX)
    elif x.dtype == tl.bfloat16:
        return (bf16_bits(x.to(tl.float32) * weight) & -65536).to(tl.float32, bitcast=True)
    else:
        return x * weight


@triton.jit
def load_rows(
    x_ptr, index_ptrs, row, column, stride, inside_row, inside_column, PTX: tl.constexpr, OUTSIDE: tl.constexpr = 0
):
    """Elements, or words of two bf16, of rows `row` [R] and columns `column` [C]; OUTSIDE where not inside. index_ptrs:
    a `RowIndex`, by which rows are gathered if it has tokens; 0 outside then."""
    token_ptr, weight_ptr = index_ptrs
    inside_column = inside_column[None, :]
    if token_ptr is None:
        inside = inside_row[:, None] & inside_column
        return tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], inside, OUTSIDE)
    else:
        token = tl.load(token_ptr + row, inside_row, -1)
        x = load_token(x_ptr, token[:, None], column[None, :], stride, inside_column)
        if weight_ptr is not None:
            x = times_weight(x, load_weight(weight_ptr, row, token)[:, None], PTX)
        return x


# ---- the operator ----------------------------------------------------------------------------------------------------


def gather_rows_ref(x: Tensor, token_of_row: Tensor, weight_of_row: Tensor | None = None) -> Tensor:
    """x [T, C], token_of_row int32 [R], weight_of_row fp32 [R] -> [R, C] in x's dtype; zeros where the token is -1."""
    held = (token_of_row >= 0)[:, None]  # [R, 1]; the rest are rows of padding
    if not x.shape[0]:
        return x.new_zeros(token_of_row.shape[0], x.shape[1])
    rows = x[token_of_row.clamp(min=0).long()]  # [R, C]
    if weight_of_row is not None:
        rows = (rows.float() * weight_of_row[:, None]).to(x.dtype)
    # Not a product with 0: a NaN in row 0, which padding reads, must not show.
    return torch.where(held, rows, torch.zeros((), dtype=x.dtype, device=x.device))


@triton.jit
def _gather_rows_kernel(x_ptr, out_ptr, token_ptr, weight_ptr, columns, BLOCK: tl.constexpr):
    # x [T, columns], out [R, columns], any dtype; token int32 [R]; weight fp32 [R], or None. A row, or BLOCK of its
    # columns, per CTA: token and weight are scalars.
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * columns + column, (column < columns) & (token >= 0), 0.0)
    if weight_ptr is not None:
        x = (x.to(tl.float32) * tl.load(weight_ptr + row, token >= 0, 0.0)).to(x.dtype)
    tl.store(out_ptr + row * columns + column, x, column < columns)


def grid_of_rows(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    """A CTA per row and block of columns, and the columns of a block."""
    block = min(triton.next_power_of_2(columns), MAX_BLOCK)
    return (rows, triton.cdiv(columns, block)), block  # rows first: only that dimension takes more than 65,535


def launch_gather_rows(x: Tensor, token_of_row: Tensor, weight_of_row: Tensor | None = None) -> Tensor:
    """The kernel for `gather_rows_ref`; x contiguous."""
    (_, columns), out = x.shape, x.new_empty(token_of_row.shape[0], x.shape[1])
    if out.numel():
        grid, block = grid_of_rows(*out.shape)
        _gather_rows_kernel[grid](
            x, out, token_of_row, weight_of_row, columns, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return out


@operator("gather_rows", fake=lambda x, token_of_row: x.new_empty(token_of_row.shape[0], x.shape[1]))
def gather_rows(x: Tensor, token_of_row: Tensor, weight_of_row: Tensor | None = None) -> Tensor:
    """x [T, C], token_of_row int32 [R] -> [R, C] in x's dtype; zeros where the token is -1.

    weight_of_row: a factor for each row, fp32 [R]; the product is rounded once.
    """
    if not x.is_cuda or forced() == "ref":
        return gather_rows_ref(x, token_of_row, weight_of_row)
    return launch_gather_rows(x.contiguous(), token_of_row, weight_of_row)


# ---- codes in both layouts -------------------------------------------------------------------------------------------


@triton.jit
def _gather_dual_kernel(x_ptr, out_ptrs, index_ptrs, rows, columns, BLOCK: tl.constexpr):
    # x uint8 [T, columns]; out uint8 [rows, columns], [columns, rows]; token int32 [rows]; group int32 [rows / BLOCK],
    # or None. A tile's row is 128 bytes, one cache line, on all three sides.
    out_ptr, out_t_ptr = out_ptrs
    token_ptr, group_ptr = index_ptrs
    if group_ptr is not None:  # noqa: SIM102 - a branch at compile time
        if tl.load(group_ptr + tl.program_id(1)) < 0:
            return
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (column < columns)[None, :]
    token = tl.load(token_ptr + row)
    tile = load_token(x_ptr, token[:, None], column[None, :], columns, inside)
    tl.store(out_ptr + row[:, None] * columns + column[None, :], tile, inside)
    tl.store(out_t_ptr + column[:, None] * rows + row[None, :], tile.T, (column < columns)[:, None])


def launch_gather_dual(x: Tensor, token_of_row: Tensor, group_of_block: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel for `gather_dual`; x contiguous."""
    rows, columns = token_of_row.shape[0], x.shape[1]
    out, out_t = x.new_empty(rows, columns), x.new_empty(columns, rows)
    if out.numel():
        bits = out.view(torch.uint8), out_t.view(torch.uint8)
        _gather_dual_kernel[(triton.cdiv(columns, 128), rows // 128)](
            x.view(torch.uint8), bits, (token_of_row, group_of_block), rows, columns, BLOCK=128, num_warps=8
        )
    return out, out_t


def _empty_gather_dual(x, token_of_row):
    rows, columns = token_of_row.shape[0], x.shape[1]
    return x.new_empty(rows, columns), x.new_empty(columns, rows)


@operator("gather_dual", fake=_empty_gather_dual)
def gather_dual(x: Tensor, token_of_row: Tensor, group_of_block: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`gather_rows` of elements of one byte x [T, C] -> [R, C] and [C, R], R a multiple of 128. group_of_block int32
    [R / 128]: rows of blocks of no group (-1) need not be written."""
    if not x.is_cuda or forced() == "ref":
        rows = gather_rows_ref(x.view(torch.uint8), token_of_row)
        return rows.view(x.dtype), rows.t().contiguous().view(x.dtype)
    return launch_gather_dual(x.contiguous(), token_of_row, group_of_block)

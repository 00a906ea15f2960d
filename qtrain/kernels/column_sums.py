"""Sums of a matrix's columns in fp32: the gradient of a bias, and of a norm's weight from terms of many CTAs.

Memory-bound: the matrix is read once; 75 MB, 18 us at H200's 4.28 TB/s, of 32768 tokens of Qwen2.5-0.5B's qkv. A CTA
adds up some rows of a block of columns in registers, and the last one of a block adds up the CTAs' terms: no second
launch. The order depends on M alone, so a column has the same bits every time, and in any part of the matrix. `tl.sum`
would not do: its order follows the layout of the loads, which depends on the alignment of N.
"""

import torch
from torch import Tensor

from qtrain.kernels.arrivals import RESULTS, arrival_counters, arrives_last
from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton

ROWS, COLUMNS = 64, 128
"""Of a CTA's tile; a row of it is 256 bytes of bf16."""
ROWS_A_CTA = 512
"""About so many, where M is large."""
LEAST_PARTS, MOST_PARTS = 8, 128
"""CTAs that share a block of columns: where M is small, up to LEAST_PARTS, and never more than MOST_PARTS."""


def column_sums_ref(x: Tensor) -> Tensor:
    """x [M, N] -> fp32 [N]."""
    return x.sum(dim=0, dtype=torch.float32)


@triton.jit
def sum_rows(x):
    """[R, C] -> [1, C], R a power of two, 128 at most: halves of the rows are added until one is left.

    `sum_of_pairs` of the transpose needs up to 64 KiB of shared memory, this 4; `tl.sum` takes more instructions."""
    for _ in tl.static_range(7):
        if x.shape[0] > 1:
            upper, lower = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
            x = upper + lower
    return x


@triton.jit
def _column_sums_kernel(
    # [m, n] of any float dtype, rows `stride` apart; fp32 [parts, n]; fp32 [n]; `arrival_counters`.
    x_ptr, parts_ptr, out_ptr, counter_ptr, m, n, stride, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MOST_PARTS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, COLUMNS)
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks  # CTAs of the same rows are neighbors
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * ROWS, m, parts * ROWS):
        rows = start + row
        inside = (rows < m)[:, None] & (column < n)[None, :]
        total += tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
    tl.store(parts_ptr + part * n + column[None, :], sum_rows(total), (column < n)[None, :])
    if arrives_last(counter_ptr + block, parts):
        every = tl.arange(0, MOST_PARTS)[:, None]
        inside = (every < parts) & (column < n)[None, :]
        terms = tl.load(parts_ptr + every * n + column[None, :], inside, 0.0, cache_modifier=".cg")
        tl.store(out_ptr + column[None, :], sum_rows(terms), (column < n)[None, :])


def empty_column_sums(x: Tensor, columns: int) -> Tensor:
    """Memory for the sums of so many columns, on the device of x; 0: of none, where they are not wanted."""
    return x.new_empty(columns, dtype=torch.float32)


def launch_column_sums(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The kernel for `column_sums_ref`; x not empty, its rows contiguous, at most RESULTS blocks of columns. out:
    memory for the result."""
    m, n = x.shape
    blocks = triton.cdiv(n, COLUMNS)
    parts = min(triton.cdiv(m, ROWS), max(LEAST_PARTS, triton.cdiv(m, ROWS_A_CTA)), MOST_PARTS)
    out = empty_column_sums(x, n) if out is None else out
    terms = x.new_empty(parts, n, dtype=torch.float32)
    _column_sums_kernel[(parts * blocks,)](
        x, terms, out, arrival_counters(x.device), m, n, x.stride(0), parts,
        ROWS=ROWS, COLUMNS=COLUMNS, MOST_PARTS=triton.next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    return out


@operator("column_sums", fake=lambda x: empty_column_sums(x, x.shape[1]))
def column_sums(x: Tensor) -> Tensor:
    """x [M, N] of any float dtype -> the sums of its columns, fp32 [N]."""
    takes = x.is_cuda and forced() != "ref" and x.numel() > 0 and x.stride(1) == 1
    return launch_column_sums(x) if takes and x.shape[1] <= RESULTS * COLUMNS else column_sums_ref(x)


def column_sums_if(wanted: bool, x: Tensor) -> Tensor:
    """`column_sums` of x, or none: fp32 [0]."""
    return column_sums(x) if wanted else empty_column_sums(x, 0)

"""Zeros where PyTorch's grouped products write nothing: rows after the last group, and sums of groups without rows."""

from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.grouped.row_groups import ALIGNMENT


@triton.jit
def _zero_tail_kernel(out_ptr, group_ptr, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(group_ptr + tl.program_id(0)) >= 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(ROWS):
        tl.store(out_ptr + (first + row) * columns + column, tl.zeros((BLOCK,), tl.float32), column < columns)


@triton.jit
def _zero_empty_kernel(out_ptr, starts_ptr, numel, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    if tl.load(starts_ptr + group) < tl.load(starts_ptr + group + 1):
        return
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + group.to(tl.int64) * numel + index, tl.zeros((BLOCK,), tl.float32), index < numel)


def launch_zero_tail(out: Tensor, group_of_block: Tensor) -> None:
    """Zeros in the rows of `out` [R, N], contiguous, whose block is of no group."""
    grid = (out.shape[0] // ALIGNMENT, triton.cdiv(out.shape[1], 2048))
    _zero_tail_kernel[grid](out, group_of_block, out.shape[1], ALIGNMENT, 2048, num_warps=8)


def launch_zero_empty(out: Tensor, starts: Tensor) -> None:
    """Zeros in the matrices of `out` [groups, N, K], contiguous, whose group has no rows."""
    _zero_empty_kernel[(out.shape[0], 16)](out, starts, out.shape[1] * out.shape[2], 4096, num_warps=8)

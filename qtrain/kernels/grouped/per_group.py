"""What all grouped products share: the definition by dense products of each group's rows, and zeros where it is empty.

On a CPU a group's rows are sliced. Elsewhere, for shapes and formats that no kernel takes, the host does not read where
groups begin: every group's product runs over all rows, and those of other groups are not taken, or are zero.

PyTorch's grouped products write nothing in rows after the last group, and in sums of groups without rows: two kernels
fill them with zeros.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.grouped.token_permutation import ALIGNMENT


def matrices(b: Tensor, k: int, groups: int) -> Tensor:
    """The matrices of all groups as a view [groups, N, K] of b: stacked along rows [groups * N, K], as for `output`, or
    along columns [N, groups * K], as for `grad_input`."""
    by_rows = b.shape[1] == k
    assert by_rows or b.shape[1] == groups * k, f"a has K = {k}; {groups} matrices in {tuple(b.shape)} have not"
    return unstack(b, groups, by_rows)


def unstack(t: Tensor, groups: int, by_rows: bool) -> Tensor:
    """What is stacked along its rows, or along its columns, as a view [groups, *, *]."""
    if by_rows:
        return t.unflatten(0, (groups, t.shape[0] // max(groups, 1)))
    return t.unflatten(1, (groups, t.shape[1] // max(groups, 1))).transpose(0, 1)


def empty_rows(a: Tensor, b: Tensor, starts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Memory for a product of rows [R, N]: of A [R, K] with the matrices in b, as in `matrices`."""
    n = b.shape[0] // (starts.shape[0] - 1) if b.shape[1] == a.shape[1] else b.shape[0]
    return a.new_empty(a.shape[0], n, dtype=out_dtype)


def empty_sums(a: Tensor, b: Tensor, starts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Memory for sums over each group's rows [E * N, K]: of A [N, R] with B [K, R]."""
    return a.new_empty((starts.shape[0] - 1) * a.shape[0], b.shape[0], dtype=out_dtype)


def multiply_rows(multiply: Callable[[int, slice], Tensor], out: Tensor, starts: Tensor) -> Tensor:
    """Fills `out` [R, N] of zeros: multiply(group, rows of a) -> [rows, N] gives the rows of a group."""
    if out.device.type == "cpu":
        for group, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
            if last > first:
                # Zeros where a group has no rows, and after the last.
                out[first:last] = multiply(group, slice(first, last))
        return out
    row = torch.arange(out.shape[0], device=out.device)
    for group in range(starts.shape[0] - 1):
        # No synchronization: starts stay on the device, and each product runs over all rows.
        mine = (row >= starts[group]) & (row < starts[group + 1])
        out = torch.where(mine[:, None], multiply(group, slice(None)), out)
    return out


def own_columns(t: Tensor, starts: Tensor, group: int, block: int = 1) -> Tensor:
    """The columns of t [*, R / block] that are of a group's rows; on a GPU all of them, the others zero."""
    if t.device.type == "cpu":
        first, last = starts[group : group + 2].tolist()
        return t[:, first // block : last // block]  # groups begin at multiples of a block
    row = torch.arange(t.shape[1], device=t.device) * block
    mine = (row >= starts[group]) & (row < starts[group + 1])
    # `where` does not take FP8; its zero has the bits of 0.
    codes = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
    return torch.where(mine, codes, torch.zeros((), dtype=codes.dtype, device=t.device)).view(t.dtype)


def check_groups(rows: int, group_of_block: Tensor) -> None:
    blocks = group_of_block.shape[0]
    assert rows == ALIGNMENT * blocks, f"{rows} rows are not {blocks} blocks of {ALIGNMENT}"


@triton.jit
def _zero_tail_kernel(out_ptr, group_ptr, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # out [R, columns], group int32 [R / ROWS]. A CTA per block of rows and of columns; nearly all return at once.
    if tl.load(group_ptr + tl.program_id(0)) >= 0:  # the block has a group: a product has filled it
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(ROWS):
        tl.store(out_ptr + (first + row) * columns + column, tl.zeros((BLOCK,), tl.float32), column < columns)


@triton.jit
def _zero_empty_kernel(out_ptr, starts_ptr, numel, BLOCK: tl.constexpr):
    # out [groups, numel], starts int32 [groups + 1].
    group = tl.program_id(0)
    if tl.load(starts_ptr + group) < tl.load(starts_ptr + group + 1):
        return
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        # int64: all groups' sums may exceed 2**31 elements.
        tl.store(out_ptr + group.to(tl.int64) * numel + index, tl.zeros((BLOCK,), tl.float32), index < numel)


def launch_zero_tail(out: Tensor, group_of_block: Tensor) -> None:
    """Zeros in the rows of `out` [R, N], contiguous, whose block is of no group."""
    grid = (out.shape[0] // ALIGNMENT, triton.cdiv(out.shape[1], 2048))
    _zero_tail_kernel[grid](out, group_of_block, out.shape[1], ALIGNMENT, 2048, num_warps=8)


def launch_zero_empty(out: Tensor, starts: Tensor) -> None:
    """Zeros in the matrices of `out` [groups, N, K], contiguous, whose group has no rows."""
    _zero_empty_kernel[(out.shape[0], 16)](out, starts, out.shape[1] * out.shape[2], 4096, num_warps=8)

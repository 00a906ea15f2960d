"""Column scales of rows in groups: one per (group, column), where every block of 128 rows belongs to one group.

A product that sums over the rows of each group alone (the gradient of an expert's weight) takes a scale of its own from
each group. A block's rows share a group, so that a tile of a quantizer reads one index. Rows of no group (-1) are zero:
kernels count them to the first group, whose absmax they do not change, and their codes are zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import encoding, scale_from_amax

BLOCK_ROWS = 128
"""Rows that share a group."""


class BlockGroups(NamedTuple):
    """The groups of the rows of a matrix [M, K], M a multiple of BLOCK_ROWS."""

    group_of_block: Tensor
    """int32 [M / BLOCK_ROWS], the group of each block of rows; -1: none, its rows are zero."""
    count: int
    """Number of groups. Scales are stored flat [count * K], group by group."""


NO_GROUPS = (None, 1)
"""The arguments group_of_block and groups of an operator for a matrix without groups."""


def block_groups(rows: int, group_of_block: Tensor | None, groups: int, granularity: str) -> BlockGroups | None:
    """The groups of the columns of a matrix; None where there are none, or where scales belong to blocks or to the
    tensor."""
    if group_of_block is None or granularity != "rowwise":
        return None
    blocks = group_of_block.shape[0]
    assert rows == BLOCK_ROWS * blocks, f"{rows} rows are not {blocks} blocks of {BLOCK_ROWS}"
    return BlockGroups(group_of_block, groups)


def equal_groups(groups: int, rows: int, device: torch.device) -> Tensor:
    """group_of_block, int32, of groups of `rows` rows each, a multiple of BLOCK_ROWS: stacked weights."""
    assert rows % BLOCK_ROWS == 0, f"{rows} rows of a group are not a multiple of {BLOCK_ROWS}"
    return torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(rows // BLOCK_ROWS)


@triton.jit
def group_of_row(group_ptr, row):
    """The group of a row's block, the first one for rows of none."""
    return tl.maximum(tl.load(group_ptr + row // 128), 0)  # a scalar load: a tile has rows of one block


@triton.jit
def _group_scales_kernel(amax_ptr, scale_ptr, numel, CODE: tl.constexpr, BLOCK: tl.constexpr):
    # int32 bits [numel] -> fp32 [numel].
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + index, index < numel, 0)
    tl.store(scale_ptr + index, scale_from_amax(amax, CODE), index < numel)


def launch_group_scales(amax: Tensor, fmt: str, power_of_two: bool) -> Tensor:
    """Bits of absmaxes, int32 -> their scales, fp32. A group may have no rows, so that no tile would store its own."""
    scale, block = torch.empty(amax.shape, dtype=torch.float32, device=amax.device), 1024
    if amax.numel():
        grid = (triton.cdiv(amax.numel(), block),)
        _group_scales_kernel[grid](
            amax, scale, amax.numel(), CODE=encoding(fmt, amax.device, power_of_two), BLOCK=block,
            enable_fp_fusion=False,
        )  # fmt: skip
    return scale

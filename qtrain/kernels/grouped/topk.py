"""The positions of the largest scores of each row: the experts that a router chooses.

As `scores.sort(descending=True, stable=True)`: of equal scores the first, NaN before all. A kernel of its own, because
Inductor would sort whole rows, which Triton takes most of a minute to compile for 128 experts. It takes the maximum k
times, of keys of 64 bits that hold a score's order and its position: no two are equal.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton

ELEMENTS = 2048
"""Scores of a CTA."""


def topk_ref(scores: Tensor, count: int) -> Tensor:
    """scores [T, N] -> int64 [T, count]."""
    # A view would keep the positions of all of them for backward.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


@triton.jit
def _topk_kernel(
    scores_ptr, out_ptr, rows, columns, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    # scores fp32 [rows, columns], out int64 [rows, COUNT]. COLUMNS: a power of 2, at least columns.
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    score = tl.load(scores_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], inside, 0.0)
    # Bits of fp32 in the order of the values: those of negative numbers are inverted, all zeros are +0.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = (bits.to(tl.int64) << 32) + (COLUMNS - 1 - column)[None, :]
    LEAST: tl.constexpr = -(2**63)
    key = tl.where(inside, key, LEAST)
    for i in tl.static_range(COUNT):
        largest = tl.max(key, 1)
        position = COLUMNS - 1 - (largest & 0xFFFFFFFF)
        tl.store(out_ptr + row.to(tl.int64) * COUNT + i, position, row < rows)
        key = tl.where(key == largest[:, None], LEAST, key)


def launch_topk(scores: Tensor, count: int) -> Tensor:
    """The kernel for `topk_ref`; fp32, contiguous, count <= N."""
    (rows, columns), out = scores.shape, scores.new_empty(scores.shape[0], count, dtype=torch.int64)
    if out.numel():
        width = triton.next_power_of_2(columns)
        rows_per_cta = max(ELEMENTS // width, 1)
        _topk_kernel[(triton.cdiv(rows, rows_per_cta),)](
            scores, out, rows, columns, COUNT=count, ROWS=rows_per_cta, COLUMNS=width, num_warps=4
        )
    return out


@operator("topk", fake=lambda scores, count: scores.new_empty(scores.shape[0], count, dtype=torch.int64))
def topk(scores: Tensor, count: int) -> Tensor:
    """The positions int64 [T, count] of the largest scores fp32 [T, N] in descending order; of equal ones the first."""
    if not scores.is_cuda or scores.dtype != torch.float32 or forced() == "ref":
        return topk_ref(scores, count)
    return launch_topk(scores.contiguous(), count)

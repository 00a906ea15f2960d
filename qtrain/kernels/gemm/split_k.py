"""The tiles of a scaled product's last wave, cut along K.

A weight's gradient sums over all tokens into a small output: its tiles fill the sm_count a few times or not even
once, and through the last wave most of them wait for the few that have a tile. Here the tiles of the whole waves are
left to the plain kernel; each one left over is summed by several programs, each over a part of K, into a workspace,
which a second kernel adds up in a fixed order, scales and stores. INT8 sums stay exact; FP8's are added up in
another order.

What that costs is writing and reading the workspace, one tile of accumulators a program.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.gemm.tiling import Tiling, scale_tile, store_columns, tile_of

MIN_STEPS = 8
"""Steps of BLOCK_K that a part has at least: fewer do not fill the pipeline of loads."""
OVERHEAD_STEPS = 10
"""About what a wave of parts costs besides its steps, in steps: it starts, and its workspace is written and read."""
SUM_ROWS = 8
"""Rows of a tile that one program adds up: few, since few tiles may be left over, and all should have a program."""


@dataclass(frozen=True)
class Split:
    """The tiles [0, whole) are whole waves; `rest` more are cut into `parts` of `steps` * BLOCK_K each along K."""

    whole: int
    rest: int
    parts: int
    steps: int


@functools.cache  # asked at each launch
def split_of(t: Tiling, m: int, n: int, k: int, slots: int) -> Split | None:
    """The split that should end first where `slots` programs run at once; None if no tile is left over or none pays."""
    tiles, steps = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n), triton.cdiv(k, t.block_k)
    rest = tiles % slots
    best, least = None, steps
    for each in range(MIN_STEPS, steps if rest else 0):
        parts = triton.cdiv(steps, each)
        time = triton.cdiv(rest * parts, slots) * (each + OVERHEAD_STEPS)
        if time < least:
            best, least = Split(tiles - rest, rest, parts, each), time
    return best


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["m", "n", "k", "whole", "rest", "depth"])
def _part_kernel(
    a_desc, b_desc, parts_ptr, m, n, k, whole, rest, depth,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INT8: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    """The sum of one tile over `depth` of K. Programs that start together read the same part of the operands."""
    ACCUMULATOR: tl.constexpr = tl.int32 if INT8 else tl.float32
    program = tl.program_id(0)
    tile_m, tile_n = tile_of(whole + program % rest, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    row, column, first = tile_m * BLOCK_M, tile_n * BLOCK_N, program // rest * depth
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for start in range(first, min(first + depth, k), BLOCK_K):
        a = a_desc.load([row, start])
        b = b_desc.load([column, start])
        total = tl.dot(a, b.T, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=IMPRECISE)
    rows, columns = program * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    tl.store(parts_ptr + rows[:, None] * BLOCK_N + columns[None, :], total)


@triton.jit(do_not_specialize=["m", "n", "whole", "rest", "parts"])
def _sum_kernel(
    parts_ptr, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr, m, n, whole, rest, parts,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile: its parts added up, from the first of K to the last."""
    tile, top = tl.program_id(0) // (BLOCK_M // ROWS), tl.program_id(0) % (BLOCK_M // ROWS) * ROWS
    rows, columns = tile * BLOCK_M + top + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    places = rows[:, None] * BLOCK_N + columns[None, :]
    total = tl.load(parts_ptr + places)
    for part in tl.range(1, parts, loop_unroll_factor=4):  # several loads at once
        total += tl.load(parts_ptr + part * rest * BLOCK_M * BLOCK_N + places)
    tile_m, tile_n = tile_of(whole + tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    row, column = tile_m * BLOCK_M + top, tile_n * BLOCK_N
    out = scale_tile(total, row, column, scale_a_ptr, scale_b_ptr, bias_ptr, m, n, ROWS_A, ROWS_B, BIAS)
    store_columns(c_desc, out, row, column, 1, ADD)


def launch_split_tiles(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    tiling: Tiling,
    split: Split,
    *,
    bias: Tensor | None,
    fast_accum: bool,
    add: bool,
) -> None:
    """The tiles of `launch_scaled_mm` that are left over, with its arguments."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n, t, s = a.shape, b.shape[0], tiling, split
    int8 = a.dtype == torch.int8
    kind = torch.int32 if int8 else torch.float32
    parts = torch.empty(s.parts * s.rest * t.block_m, t.block_n, dtype=kind, device=a.device)
    _part_kernel[(s.parts * s.rest,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        parts, m, n, k, s.whole, s.rest, s.steps * t.block_k, t.group_m, t.block_m, t.block_n, t.block_k,
        int8, None if int8 or fast_accum else t.block_k,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    _sum_kernel[(s.rest * t.block_m // SUM_ROWS,)](
        parts, TensorDescriptor.from_tensor(out, [SUM_ROWS, t.block_n]), scale_a, scale_b, bias,
        m, n, s.whole, s.rest, s.parts, t.group_m, t.block_m, t.block_n, SUM_ROWS,
        scale_a.numel() > 1, scale_b.numel() > 1, bias is not None, add,
        num_warps=4,
    )  # fmt: skip

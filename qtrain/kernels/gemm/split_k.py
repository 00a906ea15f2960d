"""Split-K for the tiles of a scaled GEMM's partial last wave.

A weight's gradient sums over all tokens into a small output: its tiles fill the SMs a few times or not even once, and
in the last wave most SMs are idle (wave quantization). Here the full waves are left to the persistent kernel; each tile
of the last one is computed by several CTAs, each over a slice of K, into a workspace, which a second kernel sums in a
fixed order, scales and stores. INT8 sums stay exact; FP8 sums are added in another order.

The cost is the workspace's traffic, one tile of accumulators per CTA.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import TensorDescriptor, tl, triton
from qtrain.kernels.gemm.persistent import Tiling, imprecise, scale_and_store, scales_rows, tile_of

MIN_STEPS = 8
"""Least steps of BLOCK_K per slice: fewer do not fill the pipeline of loads."""
OVERHEAD_STEPS = 10
"""Cost of a wave of slices besides its steps, in steps: launch, and the workspace's traffic; about."""
SUM_ROWS = 8
"""Rows of a tile that one CTA sums: few, because few tiles may be split, and every SM should have a CTA."""


@dataclass(frozen=True)
class Split:
    """Tiles [0, whole) are full waves; `rest` more are computed in `slices` of `steps` * BLOCK_K each along K."""

    whole: int
    rest: int
    slices: int
    steps: int


@functools.cache  # asked at each launch
def choose_split(t: Tiling, m: int, n: int, k: int, resident: int) -> Split | None:
    """The split with the least estimated time where `resident` CTAs run at once; None if no tile is left over or no
    split pays."""
    tiles, steps = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n), triton.cdiv(k, t.block_k)
    rest = tiles % resident  # of the last wave
    best, least = None, steps
    for each in range(MIN_STEPS, steps if rest else 0):
        slices = triton.cdiv(steps, each)
        # Waves of all slices, each as long as its steps and the overhead; the alternative is one wave of all steps.
        time = triton.cdiv(rest * slices, resident) * (each + OVERHEAD_STEPS)
        if time < least:
            best, least = Split(tiles - rest, rest, slices, each), time
    return best


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["whole", "rest", "depth"])
def _slice_kernel(
    # TMA descriptors of A [m, k] and B [n, k], 8-bit codes, K-major.
    a_desc, b_desc,
    # int32 or fp32 [slices, rest, BLOCK_M, BLOCK_N]: the workspace, one tile of accumulators per CTA.
    slices_ptr,
    # Tiles before the split ones; tiles that are split; K of a slice.
    whole, rest, depth, TILING: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    """The accumulators of one tile over `depth` of K. CTAs that start together read the same slice of the operands."""
    m, n, k = a_desc.shape[0], b_desc.shape[0], a_desc.shape[1]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    ACCUMULATOR: tl.constexpr = tl.int32 if a_desc.dtype == tl.int8 else tl.float32
    program = tl.program_id(0)
    # Slice after slice: `rest` neighboring CTAs have the same span of K.
    tile_m, tile_n = tile_of(whole + program % rest, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), TILING.group_m)
    row, column, first = tile_m * BLOCK_M, tile_n * BLOCK_N, program // rest * depth
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for start in range(first, min(first + depth, k), TILING.block_k):
        a = a_desc.load([row, start])
        b = b_desc.load([column, start])
        total = tl.dot(a, b.T, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=IMPRECISE)
    rows, columns = program * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    tl.store(slices_ptr + rows[:, None] * BLOCK_N + columns[None, :], total)


@triton.jit(do_not_specialize=["whole", "rest", "slices"])
def _sum_slices_kernel(
    # The workspace of `_slice_kernel`; the output [m, n] in blocks [DOWN, BLOCK_N].
    slices_ptr, c_desc,
    # As for `scale_tile`. Tiles before the split ones; tiles that are split; slices of each.
    epilogue_ptrs, whole, rest, slices, TILING: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """DOWN rows of a tile: its slices summed from the first of K to the last, scaled and stored. The order of additions
    is fixed, so that the result is deterministic: no atomics."""
    m, n = c_desc.shape[0], c_desc.shape[1]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    # Its tile, and its first row there: BLOCK_M / DOWN CTAs share a tile.
    tile, top = tl.program_id(0) // (BLOCK_M // DOWN), tl.program_id(0) % (BLOCK_M // DOWN) * DOWN
    rows, columns = tile * BLOCK_M + top + tl.arange(0, DOWN), tl.arange(0, BLOCK_N)
    index = rows[:, None] * BLOCK_N + columns[None, :]
    total = tl.load(slices_ptr + index)
    for i in tl.range(1, slices, loop_unroll_factor=4):  # several loads in flight
        total += tl.load(slices_ptr + i * rest * BLOCK_M * BLOCK_N + index)
    tile_m, tile_n = tile_of(whole + tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), TILING.group_m)
    row, column = tile_m * BLOCK_M + top, tile_n * BLOCK_N
    scale_and_store(c_desc, total, row, column, epilogue_ptrs, (m, n), ROWS, 1)


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
) -> None:
    """The tiles of `launch_scaled_mm` that are split, with its arguments."""
    t, s = tiling, split
    accumulator = torch.int32 if a.dtype == torch.int8 else torch.float32  # as in the tensor cores: INT8 stays exact
    slices = torch.empty(s.slices * s.rest * t.block_m, t.block_n, dtype=accumulator, device=a.device)
    _slice_kernel[(s.slices * s.rest,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        slices, s.whole, s.rest, s.steps * t.block_k,
        TILING=t, IMPRECISE=imprecise(a, t, fast_accum), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    _sum_slices_kernel[(s.rest * t.block_m // SUM_ROWS,)](
        slices, TensorDescriptor.from_tensor(out, [SUM_ROWS, t.block_n]), (scale_a, scale_b, bias),
        s.whole, s.rest, s.slices, TILING=t, DOWN=SUM_ROWS, ROWS=scales_rows((scale_a, scale_b)), num_warps=4,
    )  # fmt: skip

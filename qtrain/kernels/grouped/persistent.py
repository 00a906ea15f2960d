"""The persistent grouped GEMMs that INT8, FP8 and bf16 share, as they are accumulated or with scales.

Rows in groups are read in two ways:

    rows  out [R, N]    each block of 128 rows times its group's matrix: `output`, `grad_input`
    sums  out [E, N, K] per group, over its own rows: `grad_weight`

A tile of either has one group, whose number or rows it reads from device memory. Groups' matrices are 3-D to the TMA
descriptors: a tile that reaches past N or K of one group reads zeros there, and writes nothing, instead of the next
group's. Rows past the last group are not multiplied, only set to zero.

Sums differ in length. Their tiles are taken by CTAs in turn, groups with most rows first, so that CTAs differ by no
more than a tile in the end.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.compiler import TensorDescriptor, tl, triton
from qtrain.kernels.gemm.persistent import Tiling, imprecise, scale_and_store, scales_rows, tile_of
from qtrain.kernels.gemm.scaled_mm import SPAN


@triton.jit
def load_block(desc, row, start, COLUMN_MAJOR: tl.constexpr):
    """A block [rows, K] of an operand. COLUMN_MAJOR: the descriptor is of the transpose."""
    return desc.load([start, row]).T if COLUMN_MAJOR else desc.load([row, start])


@triton.jit
def load_matrix(desc, group, row, start, COLUMN_MAJOR: tl.constexpr):
    """`load_block` of a group's matrix, from a descriptor of blocks [1, rows, K]."""
    block = desc.load([group, start, row]) if COLUMN_MAJOR else desc.load([group, row, start])
    block = tl.reshape(block, (block.shape[1], block.shape[2]))
    return block.T if COLUMN_MAJOR else block


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit  # one binary for all shapes: descriptors do the addressing
def _m_grouped_kernel(
    # TMA descriptors: A [m, k] in blocks [BLOCK_M, BLOCK_K]; the groups' matrices [groups, n, k] in blocks of one
    # group, [1, BLOCK_N, BLOCK_K], or of their transposes (COLUMN_MAJOR); the output [m, n].
    a_desc, b_desc, c_desc,
    # Scales fp32 [m] or [1], [groups * n] or [1]; None: stores the accumulators.
    scale_ptrs,
    # int32 [m / 128]: the group of each block of rows; [groups + 1]: first rows, the last one the end of all groups.
    group_ptrs, PROGRAMS: tl.constexpr,
    # The `Tiling`'s block_m divides 128: a tile has rows of one group.
    TILING: tl.constexpr, IMPRECISE: tl.constexpr, ROWS: tl.constexpr, COLUMN_MAJOR: tl.constexpr,
):  # fmt: skip
    """As `_persistent_mm_kernel`, over the tiles of rows that belong to a group: their number is read on the device."""
    group_ptr, starts_ptr = group_ptrs
    groups, m, n, k = b_desc.shape[0], c_desc.shape[0], c_desc.shape[1], a_desc.shape[1]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    DTYPE: tl.constexpr = tl.int32 if a_desc.dtype == tl.int8 else tl.float32
    tiles_m, tiles_n = tl.load(starts_ptr + groups) // BLOCK_M, tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, TILING.group_m)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        group = tl.load(group_ptr + row // 128)
        total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        for start in range(0, k, TILING.block_k):
            a = a_desc.load([row, start])
            b = load_matrix(b_desc, group, column, start, COLUMN_MAJOR)
            total = tl.dot(a, b.T, total, out_dtype=DTYPE, max_num_imprecise_acc=IMPRECISE)
        # A scale per column of B is one of [groups * n]: this group's n are read.
        epilogue_ptrs = scale_ptrs[0], scale_ptrs[1] + group * n if ROWS[1] else scale_ptrs[1], None
        scale_and_store(c_desc, total, row, column, epilogue_ptrs, (m, n), ROWS, TILING.subtiles)
    zero_tail(c_desc, tiles, m, tiles_n, PROGRAMS, BLOCK_M, BLOCK_N, TILING.subtiles)


@triton.jit
def zero_tail(
    c_desc, tiles, m, tiles_n,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Zeros in the tiles from number `tiles`, row by row."""
    zeros = tl.zeros((BLOCK_M, BLOCK_N // SUBTILES), tl.float32).to(c_desc.dtype)
    for tile in tl.range(tiles + tl.program_id(0), m // BLOCK_M * tiles_n, PROGRAMS):
        for part in tl.static_range(SUBTILES):
            column = tile % tiles_n * BLOCK_N + part * (BLOCK_N // SUBTILES)
            c_desc.store([tile // tiles_n * BLOCK_M, column], zeros)


def launch_m_grouped(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tiling: Tiling,
    group_of_block: Tensor,
    starts: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    fast_accum: bool = True,
) -> Tensor:
    """out [R, N] = rows of A [R, K] times their group's matrix, of B [E, N, K] (`reference.matrices`), transposed.

    R a multiple of 128; strides in multiples of 16 bytes; not empty. 8-bit operands are K-major; matrices of bf16 may
    be column-major. scales: fp32 [R] or [1] and [E * N] or [1]; None: `out` holds the accumulators, rounded to its
    dtype.
    """
    (m, n), t = out.shape, tiling
    programs = min(t.per_sm * sm_count(a.device), triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n))
    column_major = b.stride(2) != 1  # the descriptor is of the transpose, which is contiguous
    block_b = [1, t.block_k, t.block_n] if column_major else [1, t.block_n, t.block_k]
    _m_grouped_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b.transpose(1, 2) if column_major else b, block_b),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // t.subtiles]),
        scales or (None, None), (group_of_block, starts), PROGRAMS=programs,
        TILING=t, IMPRECISE=imprecise(a, t, fast_accum), ROWS=scales_rows(scales), COLUMN_MAJOR=column_major,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


# ---- sums ------------------------------------------------------------------------------------------------------------


@triton.jit
def _longest_first_kernel(starts_ptr, order_ptr, groups, BLOCK: tl.constexpr):
    """order [groups]: the groups by their number of rows, most first."""
    group, other = tl.program_id(0), tl.arange(0, BLOCK)
    inside = other < groups
    own = tl.load(starts_ptr + group + 1) - tl.load(starts_ptr + group)
    rows = tl.load(starts_ptr + 1 + other, inside, 0) - tl.load(starts_ptr + other, inside, 0)
    # Rank by counting, ties by number: a sort of a few hundred groups without a second launch.
    before = inside & ((rows > own) | ((rows == own) & (other < group)))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 0), group)


def launch_longest_first(starts: Tensor) -> Tensor:
    """starts int32 [groups + 1] -> the groups by their number of rows, most first, int32 [groups]."""
    groups = starts.shape[0] - 1
    order = torch.empty(groups, dtype=torch.int32, device=starts.device)
    _longest_first_kernel[(groups,)](starts, order, groups, triton.next_power_of_2(groups), num_warps=4)
    return order


@triton.jit
def _store_sums(total, c_desc, scale_ptrs, at, sizes, SUBTILES: tl.constexpr, ROWS: tl.constexpr):
    """Stores a tile at (group, row, column) of sums [groups, n, k], times the group's own scales if there are any."""
    scale_a_ptr, scale_b_ptr = scale_ptrs
    group, row, column = at
    n, k = sizes
    # Written in place: Triton keeps a None in a tuple, not in a variable.
    epilogue_ptrs = (
        scale_a_ptr + group * n if ROWS[0] else scale_a_ptr, scale_b_ptr + group * k if ROWS[1] else scale_b_ptr, None,
    )  # fmt: skip
    scale_and_store(c_desc, total, row, column, epilogue_ptrs, sizes, ROWS, SUBTILES, group)


@triton.jit
def steps_of_program(
    order_ptr, starts_ptr, groups, tiles, PROGRAMS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Steps of BLOCK_K rows in all tiles of this CTA, which takes every PROGRAMS-th of `tiles` tiles of each group, and
    the number of groups that have rows."""
    rank = tl.arange(0, BLOCK_E)
    group = tl.load(order_ptr + rank, rank < groups, 0)
    rows = tl.load(starts_ptr + 1 + group, rank < groups, 0) - tl.load(starts_ptr + group, rank < groups, 0)
    before = tl.cdiv(tl.maximum(rank * tiles - tl.program_id(0), 0), PROGRAMS)  # of its tiles, those of other groups
    after = tl.cdiv(tl.maximum((rank + 1) * tiles - tl.program_id(0), 0), PROGRAMS)
    return tl.sum((after - before) * (rows // BLOCK_K), 0), tl.sum((rows > 0).to(tl.int32), 0)


@triton.jit
def _k_grouped_kernel(
    # TMA descriptors of A [n, rows] and B [k, rows], rows in groups, or of their transposes (COLUMN_MAJOR); and
    # of the output [groups, n, k] in blocks of one group.
    a_desc, b_desc, c_desc,
    # Scales fp32 [groups * n] or [1], [groups * k] or [1]; None: stores the accumulators.
    scale_ptrs,
    # int32 [groups + 1]: first rows; [groups]: the groups, those with most rows first.
    group_ptrs, PROGRAMS: tl.constexpr,
    # The `Tiling`'s block_k divides 128, and so a group's rows. BLOCK_E: groups, rounded up to a power of two.
    TILING: tl.constexpr, BLOCK_E: tl.constexpr,
    IMPRECISE: tl.constexpr, ROWS: tl.constexpr, COLUMN_MAJOR: tl.constexpr,
):  # fmt: skip
    """One loop over the steps of all tiles of a CTA, in which a new tile begins where one ends: the loads of the next
    tile overlap with the epilogue of this one. (Triton flattens nested loops by itself only where all tiles are as
    long.)"""
    starts_ptr, order_ptr = group_ptrs
    groups, n, k = c_desc.shape[0], c_desc.shape[1], c_desc.shape[2]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    DTYPE: tl.constexpr = tl.int32 if a_desc.dtype == tl.int8 else tl.float32
    tiles_m, tiles_n = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    tiles = tiles_m * tiles_n  # of a group
    steps, held = steps_of_program(order_ptr, starts_ptr, groups, tiles, PROGRAMS, BLOCK_K, BLOCK_E)
    # start >= last at the first step: the loop begins with a new tile. Groups without rows are last, and never reached.
    item = tl.program_id(0) - PROGRAMS
    group, row, column, start, last = 0, 0, 0, 0, 0
    total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for _ in tl.range(0, steps):
        start += BLOCK_K
        if start >= last:
            item += PROGRAMS
            group = tl.load(order_ptr + item // tiles)
            start, last = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
            tile_m, tile_n = tile_of(item % tiles, tiles_m, tiles_n, TILING.group_m)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        a = load_block(a_desc, row, start, COLUMN_MAJOR[0])
        b = load_block(b_desc, column, start, COLUMN_MAJOR[1])
        total = tl.dot(a, b.T, total, out_dtype=DTYPE, max_num_imprecise_acc=IMPRECISE)
        if start + BLOCK_K >= last:
            _store_sums(total, c_desc, scale_ptrs, (group, row, column), (n, k), TILING.subtiles, ROWS)
            total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    zero_empty(c_desc, order_ptr, held, groups, tiles, tiles_n, PROGRAMS, BLOCK_M, BLOCK_N, TILING.subtiles)


@triton.jit
def zero_empty(
    c_desc, order_ptr, held, groups, tiles, tiles_n,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Zeros in the matrices of groups without rows, those from number `held` in the order."""
    zeros = tl.zeros((1, BLOCK_M, BLOCK_N // SUBTILES), tl.float32).to(c_desc.dtype)
    for item in tl.range(held * tiles + tl.program_id(0), groups * tiles, PROGRAMS):
        group, tile = tl.load(order_ptr + item // tiles), item % tiles
        for part in tl.static_range(SUBTILES):
            column = tile % tiles_n * BLOCK_N + part * (BLOCK_N // SUBTILES)
            c_desc.store([group, tile // tiles_n * BLOCK_M, column], zeros)


@triton.jit
def _long_sums_kernel(
    # int8 [n, rows] and [k, rows]; the rest as for `_k_grouped_kernel`, which has stored these tiles, overflown.
    a_desc, b_desc, c_desc, scale_ptrs, starts_ptr,
    LONGEST: tl.constexpr, TILING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """INT8 sums of groups with more rows than LONGEST, whose products int32 holds; further ones are added in fp32."""
    groups, n, k = c_desc.shape[0], c_desc.shape[1], c_desc.shape[2]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    tiles_m, tiles_n = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    for group in range(groups):
        first, last = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
        if last - first > LONGEST:
            for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
                row, column = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for begin in range(first, last, LONGEST):
                    span = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
                    for start in range(begin, min(begin + LONGEST, last), TILING.block_k):
                        a = a_desc.load([row, start])
                        b = b_desc.load([column, start])
                        span = tl.dot(a, b.T, span, out_dtype=tl.int32)
                    total += span.to(tl.float32)
                _store_sums(total, c_desc, scale_ptrs, (group, row, column), (n, k), 1, ROWS)


def launch_k_grouped(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tiling: Tiling,
    starts: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    fast_accum: bool = True,
) -> Tensor:
    """out [E, N, K] = A [N, R] times B [K, R] transposed, over the rows starts[e] to starts[e + 1] of R for each e.

    R a multiple of 128; strides in multiples of 16 bytes; not empty. 8-bit operands are K-major, those of bf16 may be
    column-major. scales: fp32 [E * N] or [1] and [E * K] or [1]; None: `out` holds the accumulators, rounded to its
    dtype.
    """
    (groups, n, k), t = out.shape, tiling
    items = groups * triton.cdiv(n, t.block_m) * triton.cdiv(k, t.block_n)  # tiles of all groups
    programs = min(t.per_sm * sm_count(a.device), items)
    column_major = a.stride(1) != 1, b.stride(1) != 1  # the descriptors are of the transposes
    block_a = [t.block_k, t.block_m] if column_major[0] else [t.block_m, t.block_k]
    block_b = [t.block_k, t.block_n] if column_major[1] else [t.block_n, t.block_k]
    _k_grouped_kernel[(programs,)](
        TensorDescriptor.from_tensor(a.t() if column_major[0] else a, block_a),
        TensorDescriptor.from_tensor(b.t() if column_major[1] else b, block_b),
        TensorDescriptor.from_tensor(out, [1, t.block_m, t.block_n // t.subtiles]),
        scales or (None, None), (starts, launch_longest_first(starts)), PROGRAMS=programs,
        TILING=t, BLOCK_E=triton.next_power_of_2(groups), IMPRECISE=imprecise(a, t, fast_accum),
        ROWS=scales_rows(scales), COLUMN_MAJOR=column_major,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    if a.dtype == torch.int8 and a.shape[1] > SPAN:  # a group may have more rows than int32 holds products of
        assert scales is not None
        launch_long_sums(a, b, out, starts, scales)
    return out


_LONG = Tiling(64, 64, 128, 4, 3, subtiles=1)
"""Of sums that are stored a second time: rare, so its tiles need no tuning."""


def launch_long_sums(
    a: Tensor, b: Tensor, out: Tensor, starts: Tensor, scales: tuple[Tensor, Tensor], longest: int = SPAN
) -> None:
    """The sums of `launch_k_grouped` of INT8 whose group has more rows than `longest`, a multiple of 128."""
    (_, n, k), t = out.shape, _LONG
    tiles = triton.cdiv(n, t.block_m) * triton.cdiv(k, t.block_n)
    _long_sums_kernel[(min(2 * sm_count(a.device), tiles),)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out, [1, t.block_m, t.block_n]),
        scales, starts,
        LONGEST=longest, TILING=t, ROWS=scales_rows(scales), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip

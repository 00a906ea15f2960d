"""Grouped GEMMs of 8-bit codes with blockwise scales: the products of `gemm/blockwise_mm.py`, each group alone.

1x128 activations times 128x128 weights for `output` and `grad_input`, 1x128 times 1x128 or 128x128 for `grad_weight`,
or 32x32 INT8 for all: groups of rows begin at multiples of 128, so a block belongs to one group. A weight whose N is no
multiple of the block's rows has blocks of each group's own, ceil(N / rows) of them.

The kernels are those of `gemm/blockwise_mm.py` in the frame of `persistent.py`, and `gemm/blockwise_wgmma.py`. PyTorch
has no such product.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import TensorDescriptor, operator, tl, triton
from qtrain.kernels.gemm.blockwise_mm import (
    BLOCKS,
    TILINGS,
    BlockwiseTiling,
    Tilings,
    add_block,
    blockwise_mm_ref,
    check_blocks,
    load_scale_b,
    tilings_for,
)
from qtrain.kernels.gemm.blockwise_wgmma import WgmmaGroups, WgmmaTiling, launch_blockwise_wgmma
from qtrain.kernels.gemm.persistent import store_tile, tile_of
from qtrain.kernels.gemm.scaled_mm import check_kinds
from qtrain.kernels.grouped.grouped_mm import kernels_take, launch_sums_wgmma
from qtrain.kernels.grouped.per_group import (
    check_groups,
    empty_rows,
    empty_sums,
    matrices,
    multiply_rows,
    own_columns,
    unstack,
)
from qtrain.kernels.grouped.persistent import (
    launch_longest_first,
    load_matrix,
    steps_of_program,
    zero_empty,
    zero_tail,
)

# ---- definition ------------------------------------------------------------------------------------------------------


def m_grouped_blockwise_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    starts: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """A [R, K]; B as for `m_grouped_mm` -> [R, N]: `blockwise_mm_ref` of each group's rows and matrix."""
    groups, down = starts.shape[0] - 1, BLOCKS[block_a][0]
    w, scales = matrices(b, a.shape[1], groups), unstack(scale_b, groups, b.shape[1] == a.shape[1])

    def multiply(group: int, rows: slice) -> Tensor:
        # Rows of blocks; on a GPU all rows are multiplied for each group, and all scales are its own.
        own = scale_a if rows.stop is None else scale_a[rows.start // down : rows.stop // down]
        return blockwise_mm_ref(a[rows], w[group], own, scales[group], block_a, block_b, out_dtype)

    return multiply_rows(multiply, a.new_zeros(a.shape[0], w.shape[1], dtype=out_dtype), starts)


def k_grouped_blockwise_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    starts: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """A [N, R], B [K, R] -> [E * N, K]: `blockwise_mm_ref` of each group's columns."""
    along, sums = BLOCKS[block_a][1], []
    for e in range(starts.shape[0] - 1):
        own_a, own_b = (own_columns(t, starts, e) for t in (a, b))  # [N, rows of e], [K, rows of e]
        scales = [own_columns(t, starts, e, along) for t in (scale_a, scale_b)]
        sums.append(blockwise_mm_ref(own_a, own_b, scales[0], scales[1], block_a, block_b, out_dtype))
    return torch.cat(sums) if sums else a.new_zeros(0, b.shape[0], dtype=out_dtype)


# ---- kernels ---------------------------------------------------------------------------------------------------------

_SIZES = ["m", "n", "k", "groups", "a_row_stride", "a_k_stride", "b_group_stride", "b_row_stride", "b_k_stride"]


@triton.jit(do_not_specialize=_SIZES)  # one binary for all shapes: descriptors do the addressing
def _m_grouped_blockwise_kernel(
    # TMA descriptors as for `_m_grouped_kernel`: A [m, k], the groups' matrices [groups, n, k], the output [m, n].
    a_desc, b_desc, c_desc,
    # fp32 [m / ROWS_A, k / BLOCK_K], [groups, n / ROWS_B, k / BLOCK_K], of any strides.
    scale_a_ptr, scale_b_ptr,
    # int32 [m / 128]: the group of each block of rows; [groups + 1]: first rows.
    group_ptr, starts_ptr, m, n, k, groups,
    a_row_stride, a_k_stride, b_group_stride, b_row_stride, b_k_stride,
    PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """As `_blockwise_mm_kernel`. A's rows need no mask: only those of groups are multiplied, in whole tiles."""
    # starts[groups] is where the last group ends, a multiple of 128: the rows after it are set to zero below.
    tiles_m, tiles_n = tl.load(starts_ptr + groups) // BLOCK_M, tl.cdiv(n, BLOCK_N)
    tiles, steps = tiles_m * tiles_n, tl.cdiv(k, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        # A tile lies in one group: groups begin at multiples of 128, which BLOCK_M divides.
        group = tl.load(group_ptr + row // 128)
        scale_a_row = scale_a_ptr + (row + tl.arange(0, BLOCK_M)) // ROWS_A * a_row_stride
        scale_b_group = scale_b_ptr + group * b_group_stride  # of this group's matrix: [n / ROWS_B, k / BLOCK_K]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, steps):
            scale_a = tl.load(scale_a_row + step * a_k_stride)  # [BLOCK_M] fp32
            scale_b = load_scale_b(scale_b_group + step * b_k_stride, column, n, b_row_stride, BLOCK_N, ROWS_B)
            a = a_desc.load([row, step * BLOCK_K])
            b = load_matrix(b_desc, group, column, step * BLOCK_K, False)  # [BLOCK_N, BLOCK_K] codes
            total = add_block(total, a, b, scale_a, scale_b, INT8)
        c_desc.store([row, column], total.to(c_desc.dtype))
    zero_tail(c_desc, tiles, m, tiles_n, PROGRAMS, BLOCK_M, BLOCK_N, 1)


@triton.jit(do_not_specialize=_SIZES)
def _k_grouped_blockwise_kernel(
    # TMA descriptors as for `_k_grouped_kernel`: A [n, rows], B [k, rows], the output [groups, n, k].
    a_desc, b_desc, c_desc,
    # fp32 [n / ROWS_A, rows / BLOCK_K], [k / ROWS_B, rows / BLOCK_K]: groups begin at blocks.
    scale_a_ptr, scale_b_ptr, starts_ptr, order_ptr, n, k, groups,
    a_row_stride, a_k_stride, b_row_stride, b_k_stride,
    PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """One loop over the steps of all tiles, as `_k_grouped_kernel`."""
    tiles_m, tiles_n = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    tiles = tiles_m * tiles_n  # of a group
    steps, held = steps_of_program(order_ptr, starts_ptr, groups, tiles, PROGRAMS, BLOCK_K, BLOCK_E)
    item = tl.program_id(0) - PROGRAMS  # the first step takes the first tile: start >= last
    group, row, column, start, last = 0, 0, 0, 0, 0
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, steps):
        start += BLOCK_K
        # The tile is complete: the next one of this CTA.
        if start >= last:
            item += PROGRAMS
            group = tl.load(order_ptr + item // tiles)
            start, last = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
            tile_m, tile_n = tile_of(item % tiles, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        # Step: counted over the rows of all groups, as scales are.
        step, rows = start // BLOCK_K, row + tl.arange(0, BLOCK_M)
        scale_a = tl.load(scale_a_ptr + rows // ROWS_A * a_row_stride + step * a_k_stride, rows < n, 0.0)
        scale_b = load_scale_b(scale_b_ptr + step * b_k_stride, column, k, b_row_stride, BLOCK_N, ROWS_B)
        a = a_desc.load([row, start])  # [BLOCK_M, BLOCK_K] codes
        b = b_desc.load([column, start])  # [BLOCK_N, BLOCK_K] codes
        total = add_block(total, a, b, scale_a, scale_b, INT8)
        if start + BLOCK_K >= last:
            store_tile(c_desc, total, row, column, 1, group)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    zero_empty(c_desc, order_ptr, held, groups, tiles, tiles_n, PROGRAMS, BLOCK_M, BLOCK_N, 1)


def launch_grouped_rows_blockwise(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    out: Tensor,
    tiling: BlockwiseTiling | WgmmaTiling,
    group_of_block: Tensor,
    starts: Tensor,
) -> Tensor:
    """out [R, N] = rows of A [R, K] times their group's matrix, of B [E, N, K], transposed; scale_b [E, *, *].

    R a multiple of 128; rows and K in multiples of 16 bytes; not empty. Scales of any strides. For a WgmmaTiling as
    `rows_tilings` says.
    """
    (m, k), (groups, n, _), t = a.shape, b.shape, tiling
    if isinstance(t, WgmmaTiling):
        by_rows = b.stride(1) == k  # the 2-D view that TMA reads, and the steps between its groups
        # Neither copies: TMA's 2-D descriptor reads either stacking in place.
        stacked = b.reshape(groups * n, k) if by_rows else b.transpose(0, 1).reshape(n, groups * k)
        return launch_blockwise_wgmma(
            a, stacked, scale_a, scale_b[0], out, t, (m, n, k, groups), False,
            grouped=WgmmaGroups("rows", group_of_block, starts, (n, 0) if by_rows else (0, k), scale_b.stride(0)),
        )  # fmt: skip
    (rows_a, block_k), (rows_b, _) = BLOCKS[block_a], BLOCKS[block_b]
    # Persistent: no more CTAs than are resident at once, each of which takes every PROGRAMS-th tile.
    programs = min(t.per_sm * sm_count(a.device), triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n))
    _m_grouped_blockwise_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, block_k]),
        TensorDescriptor.from_tensor(b, [1, t.block_n, block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n]),
        scale_a, scale_b, group_of_block, starts, m, n, k, groups, *scale_a.stride(), *scale_b.stride(),
        PROGRAMS=programs, GROUP_M=t.group_m, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=block_k,
        ROWS_A=rows_a, ROWS_B=rows_b, INT8=a.dtype == torch.int8,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def launch_grouped_sums_blockwise(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    out: Tensor,
    tiling: BlockwiseTiling | WgmmaTiling,
    starts: Tensor,
) -> Tensor:
    """out [E, N, K] = A [N, R] times B [K, R] transposed, over the rows starts[e] to starts[e + 1] of R for each e.

    R a multiple of 128; rows of `out` in multiples of 16 bytes; not empty. Scales of any strides. For a WgmmaTiling as
    `sums_tilings` says.
    """
    (groups, n, k), t = out.shape, tiling
    if isinstance(t, WgmmaTiling):
        launch_sums_wgmma(a, b, scale_a, scale_b, out, t, starts, block_b == "1x128")
        return out
    (rows_a, block_k), (rows_b, _) = BLOCKS[block_a], BLOCKS[block_b]
    items = groups * triton.cdiv(n, t.block_m) * triton.cdiv(k, t.block_n)  # output tiles of all groups
    programs = min(t.per_sm * sm_count(a.device), items)
    _k_grouped_blockwise_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, block_k]),
        TensorDescriptor.from_tensor(out, [1, t.block_m, t.block_n]),
        scale_a, scale_b, starts, launch_longest_first(starts), n, k, groups, *scale_a.stride(), *scale_b.stride(),
        PROGRAMS=programs, GROUP_M=t.group_m, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=block_k,
        # tl.arange takes powers of two only.
        BLOCK_E=triton.next_power_of_2(groups), ROWS_A=rows_a, ROWS_B=rows_b, INT8=a.dtype == torch.int8,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


# ---- dispatch --------------------------------------------------------------------------------------------------------


def rows_tilings(a: Tensor, w: Tensor, scale_w: Tensor, block_a: str, block_b: str, out_dtype: torch.dtype) -> Tilings:
    """The kernels for rows of A [R, K] times matrices w [E, N, K], the best in general first, by name."""
    _, n, k = w.shape
    if not _supported(a, k, n, out_dtype):
        return {}
    # Of matrices along columns a step past K would read the next group's.
    on_hopper = block_b == "128x128" and (w.stride(1) == k or k % 128 == 0)
    return tilings_for(a, w, scale_w, block_a, block_b, out_dtype) if on_hopper else TILINGS


def sums_tilings(a: Tensor, b: Tensor, scale_b: Tensor, block_a: str, block_b: str, out_dtype: torch.dtype) -> Tilings:
    """The kernels for sums over the columns of A [N, R] and B [K, R], the best in general first, by name."""
    if not _supported(a, a.shape[1], b.shape[0], out_dtype):
        return {}
    # A warpgroup's 64 rows are of one group.
    return tilings_for(a, b, scale_b, block_a, block_b, out_dtype) if a.shape[0] % 64 == 0 else TILINGS


def _supported(a: Tensor, k: int, n: int, out_dtype: torch.dtype) -> bool:
    """Whether there are kernels, on a GPU. k: of an operand's rows, n: of an output's."""
    return a.is_cuda and kernels_take(a, k, n, out_dtype) and forced() != "ref"


@operator("m_grouped_blockwise_mm", fake=empty_rows)
def m_grouped_blockwise_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    group_of_block: Tensor,
    starts: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Rows of A [R, K] times their group's matrix, transposed, each block times its scale -> [R, N] in out_dtype.

    B holds E matrices [N, K] along its rows [E * N, K] or along its columns [N, E * K], and scale_b their scales in the
    same way. block_a, block_b: "1x128" or "128x128" in any combination, or both "32x32". The rest as for
    `m_grouped_mm`.
    """
    check_blocks(block_a, block_b)
    check_kinds(a, b)
    check_groups(a.shape[0], group_of_block)
    a, b, groups = a.contiguous(), b.contiguous(), starts.shape[0] - 1
    by_rows = b.shape[1] == a.shape[1]  # `output` has matrices along rows, `grad_input` along columns
    w, scale_w = matrices(b, a.shape[1], groups), unstack(scale_b, groups, by_rows)
    tilings = rows_tilings(a, w, scale_w, block_a, block_b, out_dtype) if a.numel() and w.numel() else {}
    if not tilings:
        return m_grouped_blockwise_mm_ref(a, b, scale_a, scale_b, block_a, block_b, starts, out_dtype)

    def run(name: str) -> Tensor:
        out = torch.empty(a.shape[0], w.shape[1], dtype=out_dtype, device=a.device)
        blocks, groups_of_rows = (block_a, block_b), (group_of_block, starts)
        return launch_grouped_rows_blockwise(a, w, scale_a, scale_w, *blocks, out, tilings[name], *groups_of_rows)

    key = (*a.shape, w.shape[1], groups, by_rows, a.dtype, b.dtype, block_a, block_b, out_dtype)
    return run(choose("m_grouped_blockwise_mm", key, list(tilings), run))


@operator("k_grouped_blockwise_mm", fake=empty_sums)
def k_grouped_blockwise_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    starts: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """A [N, R] · B [K, R]ᵀ over the rows of each of E groups, each block times its scale -> [E * N, K] in out_dtype.

    scale_a, scale_b: as the quantizers give them for A and B. The rest as for `k_grouped_mm`.
    """
    check_blocks(block_a, block_b)
    check_kinds(a, b)
    a, b, groups = a.contiguous(), b.contiguous(), starts.shape[0] - 1
    n, k = a.shape[0], b.shape[0]
    present = a.numel() and b.numel() and groups
    tilings = sums_tilings(a, b, scale_b, block_a, block_b, out_dtype) if present else {}
    if not tilings:
        return k_grouped_blockwise_mm_ref(a, b, scale_a, scale_b, block_a, block_b, starts, out_dtype)

    def run(name: str) -> Tensor:
        out = torch.empty(groups, n, k, dtype=out_dtype, device=a.device)
        blocks = block_a, block_b
        return launch_grouped_sums_blockwise(a, b, scale_a, scale_b, *blocks, out, tilings[name], starts)

    key = (*a.shape, k, groups, a.dtype, b.dtype, block_a, block_b, out_dtype)
    return run(choose("k_grouped_blockwise_mm", key, list(tilings), run)).view(groups * n, k)

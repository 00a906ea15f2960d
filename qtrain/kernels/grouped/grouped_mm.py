"""Grouped GEMMs of 8-bit codes with scales in the epilogue: the products of `gemm/scaled_mm.py`, each group alone.

    m_grouped_mm  out [R, N]: each row times its group's matrix. `output`: b [E * N, K]; `grad_input`: b [N, E * K]
    k_grouped_mm  out [E * N, K]: sums over each group's own rows, `grad_weight`

Operands are INT8 or FP8 codes, with rows in groups (`token_permutation.py`). A scale is one for all ([1]), or one per
row of A, per row of a group's matrix, or, of what is summed over rows, per group and column. Rows of no group are zero,
and so are sums of groups without rows.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_fp8
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator
from qtrain.kernels.gemm.blockwise_wgmma import (
    WGMMA_TILINGS,
    WgmmaGroups,
    WgmmaTiling,
    launch_blockwise_wgmma,
    supports_wgmma,
)
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, by_name
from qtrain.kernels.gemm.scaled_mm import check_kinds, scaled_mm_ref
from qtrain.kernels.grouped.per_group import (
    check_groups,
    empty_rows,
    empty_sums,
    launch_zero_empty,
    launch_zero_tail,
    matrices,
    multiply_rows,
    own_columns,
)
from qtrain.kernels.grouped.persistent import launch_k_grouped, launch_longest_first, launch_m_grouped

# ---- definition ------------------------------------------------------------------------------------------------------


def m_grouped_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, starts: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """A [R, K]; B as for `m_grouped_mm` -> [R, N]: `scaled_mm_ref` of each group's rows and matrix."""
    groups = starts.shape[0] - 1
    w = matrices(b, a.shape[1], groups)
    # [groups, N] or [groups, 1]
    scales = scale_b.view(groups, -1) if scale_b.numel() > 1 else scale_b.expand(groups, 1)

    def multiply(group: int, rows: slice) -> Tensor:
        scale = scale_a[rows] if scale_a.numel() > 1 else scale_a
        return scaled_mm_ref(a[rows], w[group], scale, scales[group], out_dtype)  # [rows of the group, N]

    return multiply_rows(multiply, a.new_zeros(a.shape[0], w.shape[1], dtype=out_dtype), starts)


def k_grouped_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, starts: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """A [N, R], B [K, R] -> [E * N, K]: `scaled_mm_ref` of each group's columns."""
    groups = starts.shape[0] - 1
    scales_a, scales_b = (s.view(groups, -1) if s.numel() > 1 else s.expand(groups, 1) for s in (scale_a, scale_b))
    sums = [
        scaled_mm_ref(own_columns(a, starts, e), own_columns(b, starts, e), scales_a[e], scales_b[e], out_dtype)
        for e in range(groups)
    ]
    return torch.cat(sums) if sums else a.new_zeros(0, b.shape[0], dtype=out_dtype)


# ---- dispatch --------------------------------------------------------------------------------------------------------

# The candidate of the family "cublas" is PyTorch's own product, `_scaled_grouped_mm`.
# As in `gemm/scaled_mm.py`. Rows have no tiles of 256, which may span two groups; rows of a tile of sums are output
# features. Few rows to a group want few rows of tiles between two columns (GROUP_M): the group's matrix stays in L2.
_TWO, _TWO_WIDE = Tiling(128, 128, 128, 4, 3, per_sm=2), Tiling(128, 128, 128, 4, 3, subtiles=4, per_sm=2)
_LARGE, _TALL = Tiling(128, 256, 128, 8, 4), Tiling(256, 128, 128, 8, 4)
_LARGE_16, _TWO_16 = Tiling(128, 256, 128, 8, 4, group_m=16), Tiling(128, 128, 128, 4, 3, group_m=16, per_sm=2)
_SMALL = Tiling(64, 128, 128, 4, 4, subtiles=1, per_sm=2)
ROWS_TILINGS = by_name(_TWO, _TWO_WIDE, _LARGE, _LARGE_16, _TWO_16, _SMALL)
SUMS_TILINGS = by_name(_TWO, _TWO_WIDE, _LARGE, _TALL, _SMALL)


def kernels_take(a: Tensor, k: int, n: int, out_dtype: torch.dtype) -> bool:
    """k: of an operand's rows, n: of an output's; TMA descriptors take strides in multiples of 16 bytes."""
    supported = a.dtype == torch.int8 or has_fp8(a.device) or not a.is_cuda
    return supported and k % 16 == 0 and n * out_dtype.itemsize % 16 == 0


def rows_mm_names(a: Tensor, b: Tensor, n: int, out_dtype: torch.dtype) -> list[str]:
    """The implementations of `m_grouped_mm` for these operands on a GPU, the best in general first; n: of `out`."""
    k, int8 = a.shape[1], a.dtype == torch.int8
    if not kernels_take(a, k, n, out_dtype) or (int8 and k > LONGEST_EXACT_K):
        return []
    if out_dtype.itemsize > 2:
        return [_TWO_WIDE.name, _SMALL.name]
    # INT8 wants two CTAs per SM, FP8 the large tile, as in `scaled_mm.py`.
    order = [_TWO, _LARGE, _TWO_16, _LARGE_16] if int8 else [_LARGE, _TWO, _LARGE_16, _TWO_16]
    return [*(t.name for t in order), _SMALL.name, *_library(a, b, n, k, out_dtype)]


def sums_mm_names(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype, fast_accum: bool
) -> list[str]:
    """The implementations of `k_grouped_mm` for these operands on a GPU, the best in general first."""
    n, k = a.shape[0], b.shape[0]
    if not kernels_take(a, a.shape[1], k, out_dtype):
        return []
    if out_dtype.itemsize > 2:
        return [_TWO_WIDE.name, _SMALL.name]
    order = [_TWO, _LARGE, _TALL] if a.dtype == torch.int8 else [_LARGE, _TALL, _TWO]
    in_fp32 = [] if fast_accum else _wgmma_names(a, b, scales, out_dtype)
    return [*in_fp32, *(t.name for t in order), _SMALL.name, *_library(a, b, n, k, out_dtype)]


def _wgmma_names(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out_dtype: torch.dtype) -> list[str]:
    """The kernel of blockwise products, of one scale for all blocks: it adds partial sums to fp32 totals while the
    tensor cores go on, where `tl.dot` waits."""
    one_each = all(scale.numel() == 1 for scale in scales)
    takes = one_each and supports_wgmma(a, b, for_all_blocks(scales[1]), "1x128", "128x128", out_dtype)
    # A warpgroup's 64 rows are of one group.
    return list(WGMMA_TILINGS) if takes and a.shape[0] % 64 == 0 else []


def for_all_blocks(scale: Tensor) -> Tensor:
    """fp32 [1] as the scales of blocks, whose strides are 0."""
    return scale.as_strided((1, 1), (0, 0))


def _library(a: Tensor, b: Tensor, n: int, k: int, out_dtype: torch.dtype) -> list[str]:
    # What PyTorch's product supports.
    takes = a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16 and n % 16 == k % 16 == 0
    return ["cublas"] if takes else []


def _per_row(scale: Tensor, numel: int) -> Tensor:
    """PyTorch's grouped product takes a scale for each row of each group."""
    return scale if scale.numel() == numel else scale.expand(numel).contiguous()  # 4 bytes a row


@operator("m_grouped_mm", fake=empty_rows)
def m_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    group_of_block: Tensor,
    starts: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = True,
) -> Tensor:
    """Rows of A [R, K] times their group's matrix, transposed, times both scales -> [R, N] in out_dtype.

    A, B both int8 or both fp8. B holds E matrices [N, K] along its rows [E * N, K] or along its columns [N, E * K].
    scale_a: fp32 [R] or [1]; scale_b: [E * N] or [1]. group_of_block int32 [R / 128], starts int32 [E + 1]: of
    `TokenPermutation`. Rows of no group are zero.
    """
    check_kinds(a, b)
    check_groups(a.shape[0], group_of_block)
    a, groups = a.contiguous(), starts.shape[0] - 1
    w = matrices(b.contiguous(), a.shape[1], groups)  # a view [E, N, K] of either stacking, K-major
    names = rows_mm_names(a, b, w.shape[1], out_dtype) if a.is_cuda and a.numel() and w.numel() else []
    if not names or forced() == "ref":
        return m_grouped_mm_ref(a, b.contiguous(), scale_a, scale_b, starts, out_dtype)
    # Part of the key: matrices along columns have rows far apart, which may favor another tile.
    stacked = "rows" if w.is_contiguous() else "columns"
    per_row = scale_a.numel() > 1, scale_b.numel() > 1
    key = (*a.shape, w.shape[1], groups, stacked, a.dtype, b.dtype, out_dtype, *per_row, fast_accum)
    rows, n = a.shape[0], w.shape[1]

    def run(name: str) -> Tensor:
        if name == "cublas":
            scales = _per_row(scale_a, rows), _per_row(scale_b, groups * n).view(groups, n)
            out = torch._scaled_grouped_mm(
                a, w.transpose(1, 2), *scales, offs=starts[1:], out_dtype=out_dtype, use_fast_accum=fast_accum
            )
            launch_zero_tail(out, group_of_block)  # PyTorch writes nothing after the last group
            return out
        out, tiling = torch.empty(rows, n, dtype=out_dtype, device=a.device), ROWS_TILINGS[name]
        return launch_m_grouped(a, w, out, tiling, group_of_block, starts, (scale_a, scale_b), fast_accum=fast_accum)

    return run(choose("m_grouped_mm", key, names, run))


def launch_sums_wgmma(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    tiling: WgmmaTiling,
    starts: Tensor,
    vector_b: bool = False,
) -> None:
    """out [E, N, K] as `launch_k_grouped`, added to fp32 totals; N a multiple of 64, scales of blocks as for
    `launch_blockwise_wgmma`, vector_b too."""
    groups, n, k = out.shape
    blocks = WgmmaGroups("sums", launch_longest_first(starts), starts)
    sizes = n, k, a.shape[1], groups
    launch_blockwise_wgmma(a, b, scale_a, scale_b, out.view(groups * n, k), tiling, sizes, vector_b, grouped=blocks)


@operator("k_grouped_mm", fake=empty_sums)
def k_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    starts: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = True,
) -> Tensor:
    """A [N, R] · B [K, R]ᵀ over the rows of each of E groups, times its scales -> [E * N, K] in out_dtype.

    A, B both int8 or both fp8: transposed codes. scale_a: fp32 [E * N] or [1]; scale_b: [E * K] or [1]. starts int32
    [E + 1]: `TokenPermutation`. Groups without rows have sums of zero.
    """
    check_kinds(a, b)
    a, b = a.contiguous(), b.contiguous()
    scales = scale_a, scale_b
    names = sums_mm_names(a, b, scales, out_dtype, fast_accum) if a.is_cuda and a.numel() and b.numel() else []
    if not names or forced() == "ref":
        return k_grouped_mm_ref(a, b, scale_a, scale_b, starts, out_dtype)
    per_row = scale_a.numel() > 1, scale_b.numel() > 1
    groups, n, k = starts.shape[0] - 1, a.shape[0], b.shape[0]
    key = (*a.shape, k, groups, a.dtype, b.dtype, out_dtype, *per_row, fast_accum)

    def run(name: str) -> Tensor:
        if name == "cublas":
            row_scales = _per_row(scale_a, groups * n), _per_row(scale_b, groups * k)
            out = torch._scaled_grouped_mm(
                a, b.t(), *row_scales, offs=starts[1:], out_dtype=out_dtype, use_fast_accum=fast_accum
            )
            launch_zero_empty(out, starts)  # nor sums of groups without rows
            return out.view(groups * n, k)
        out = torch.empty(groups, n, k, dtype=out_dtype, device=a.device)
        if name in WGMMA_TILINGS:
            block_scales = for_all_blocks(scale_a), for_all_blocks(scale_b)
            launch_sums_wgmma(a, b, *block_scales, out, WGMMA_TILINGS[name], starts)
        else:
            launch_k_grouped(a, b, out, SUMS_TILINGS[name], starts, scales, fast_accum=fast_accum)
        return out.view(groups * n, k)

    return run(choose("k_grouped_mm", key, names, run))

"""Grouped GEMMs in high precision, bf16 or fp32: the products of `grouped_mm.py` without scales, of any layout.

    output       m_grouped_plain_mm(x, w)           x [R, K], w [E * N, K]
    grad_input   m_grouped_plain_mm(dy, w.t())      dy [R, N]; the transpose is a view
    grad_weight  k_grouped_plain_mm(dy.t(), x.t())

16-bit tensor cores read operands in either order, so a transpose is a view whose strides tell. bf16 sums are fp32,
rounded once. Candidates are this package's persistent kernel and PyTorch's `grouped_mm`, whose rows of no group, and
sums of groups without rows, are set to zero. fp32 is computed by the definition.

Formats without a product of their own (MX, NVFP4) are dequantized to bf16, which is exact, and multiplied here; their
transposed codes are K-major like those of `grouped_mm.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator
from qtrain.kernels.gemm.persistent import Tiling, by_name
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
from qtrain.kernels.grouped.persistent import launch_k_grouped, launch_m_grouped

# ---- definition ------------------------------------------------------------------------------------------------------


def m_grouped_plain_mm_ref(a: Tensor, b: Tensor, starts: Tensor) -> Tensor:
    """A [R, K]; B as for `m_grouped_mm` -> [R, N] in A's dtype: `F.linear` of each group's rows and matrix."""
    w = matrices(b, a.shape[1], starts.shape[0] - 1)  # [E, N, K]
    out = a.new_zeros(a.shape[0], w.shape[1])
    return multiply_rows(lambda group, rows: F.linear(a[rows], w[group]), out, starts)


def k_grouped_plain_mm_ref(a: Tensor, b: Tensor, starts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A [N, R], B [K, R] -> [E * N, K]: A · Bᵀ of each group's columns, in out_dtype."""
    groups, (a, b) = starts.shape[0] - 1, (t.to(out_dtype) for t in (a, b))
    sums = [own_columns(a, starts, e) @ own_columns(b, starts, e).t() for e in range(groups)]
    return torch.cat(sums) if sums else a.new_zeros(0, b.shape[0])


# ---- dispatch --------------------------------------------------------------------------------------------------------

_LARGE, _TWO = Tiling(128, 256, 64, 8, 4), Tiling(128, 128, 64, 4, 3, per_sm=2)
# For fp32 output: a quarter of a tile takes as much shared memory as half a tile of bf16.
_WIDE, _WIDE_TWO = Tiling(128, 256, 64, 8, 3, subtiles=4), Tiling(128, 128, 64, 4, 3, subtiles=4, per_sm=2)
_TALL, _SMALL = Tiling(256, 128, 64, 8, 4), Tiling(64, 128, 64, 4, 4, subtiles=2, per_sm=2)
ROWS_TILINGS = by_name(_LARGE, _TWO, _SMALL)
SUMS_TILINGS = by_name(_LARGE, _TALL, _TWO, _SMALL, _WIDE, _WIDE_TWO)


def _aligned(*operands: Tensor) -> bool:
    """Whether TMA descriptors take them: bf16, strides in multiples of 16 bytes, one of the last two of 1."""
    return all(
        t.is_cuda
        and t.dtype == torch.bfloat16
        and t.numel()
        and 1 in t.stride()[-2:]
        and all(size % 8 == 0 for size in t.shape[-2:])  # 8 bf16 are 16 bytes
        and all(stride == 1 or stride % 8 == 0 for stride in t.stride())
        and t.storage_offset() % 8 == 0
        for t in operands
    )


@operator("m_grouped_plain_mm", fake=lambda a, b, starts: empty_rows(a, b, starts, a.dtype))
def m_grouped_plain_mm(a: Tensor, b: Tensor, group_of_block: Tensor, starts: Tensor) -> Tensor:
    """Rows of A [R, K] times their group's matrix, transposed -> [R, N] in A's dtype, bf16 or fp32.

    B holds E matrices [N, K] along its rows [E * N, K] or along its columns [N, E * K]. group_of_block int32 [R / 128],
    starts int32 [E + 1]: of `TokenPermutation`. Rows of no group are zero.
    """
    check_groups(a.shape[0], group_of_block)
    a, groups = a.contiguous(), starts.shape[0] - 1
    # A transpose is a view: only what is contiguous along neither dimension is copied.
    w = matrices(b if 1 in b.stride() else b.contiguous(), a.shape[1], groups)
    if not _aligned(a, w) or forced() == "ref":
        return m_grouped_plain_mm_ref(a, b, starts)

    def run(name: str) -> Tensor:
        if name == "cublas":
            # offs: where each group ends. Rows after the last group are not written.
            out = F.grouped_mm(a, w.transpose(1, 2), offs=starts[1:])
            launch_zero_tail(out, group_of_block)
            return out
        out = a.new_empty(a.shape[0], w.shape[1])
        return launch_m_grouped(a, w, out, ROWS_TILINGS[name], group_of_block, starts)

    # Either layout of w has a fastest kernel of its own.
    key, names = (*a.shape, w.shape[1], groups, b.shape[1] == a.shape[1], w.stride(2)), [*ROWS_TILINGS, "cublas"]
    return run(choose("m_grouped_plain_mm", key, names, run))


@operator("k_grouped_plain_mm", fake=empty_sums)
def k_grouped_plain_mm(a: Tensor, b: Tensor, starts: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A [N, R] · B [K, R]ᵀ over the rows of each of E groups -> [E * N, K] in out_dtype; A and B bf16 or fp32.

    starts int32 [E + 1]: of `TokenPermutation`. Groups without rows have sums of zero.
    """
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))
    if not _aligned(a, b) or starts.shape[0] == 1 or forced() == "ref":
        return k_grouped_plain_mm_ref(a, b, starts, out_dtype)
    if out_dtype == torch.bfloat16:
        names = [*(t.name for t in (_LARGE, _TALL, _TWO, _SMALL)), "cublas"]
    else:
        names = [t.name for t in (_WIDE, _WIDE_TWO, _SMALL)]  # fp32 tiles; PyTorch's product stores bf16 only
    groups, n, k = starts.shape[0] - 1, a.shape[0], b.shape[0]

    def run(name: str) -> Tensor:
        if name == "cublas":
            # Matrices of groups without rows are not written.
            out = F.grouped_mm(a, b.t(), offs=starts[1:])
            launch_zero_empty(out, starts)
        else:
            out = torch.empty(groups, n, k, dtype=out_dtype, device=a.device)
            launch_k_grouped(a, b, out, SUMS_TILINGS[name], starts)
        return out.view(groups * n, k)

    key = (*a.shape, k, groups, a.stride(1) == 1, b.stride(1) == 1, out_dtype)
    return run(choose("k_grouped_plain_mm", key, names, run))

"""GEMM of 8-bit codes plus a product of low rank, in one kernel: out = (A · Bᵀ) * scale_a * scale_b + L · Rᵀ (+ bias).

A [M, K] and B [N, K] are codes as in `scaled_mm.py`, L [M, r] and R [N, r] in the output's dtype. So a frozen linear
with adapters (LoRA) writes its output once: as a product of its own and an addition, L · Rᵀ of rank 16 would write and
read the output four times more, 8 bytes an element, for 2·r FLOPs. A tile's accumulators are scaled, then the tensor
cores add the rank's product to them in fp32; what is rounded is the sum.

The operands of the rank are read in the epilogue, from the L2 cache, and need shared memory beside that of the
pipeline: tiles have fewer stages. Where that costs more than it saves, or the rank is large, the dispatch takes two
passes: `scaled_mm`, to whose output cuBLAS adds the product in place.
"""

import torch
from torch import Tensor

from qtrain.core.hardware import has_fp8, sm_count
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import TensorDescriptor, operator, tl, triton
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, imprecise, k_major, scale_tile, scales_rows, store_tile, tile_of
from qtrain.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_ref

LARGEST_RANK = 64
"""Of the fused kernel: 256 rows of R take 32 KiB of shared memory."""


def low_rank_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """As `scaled_mm_ref`, plus left [M, r] · right [N, r]ᵀ; added in fp32."""
    total = scaled_mm_ref(a, b, scale_a, scale_b, torch.float32, bias)
    return torch.addmm(total, left.float(), right.float().t()).to(out_dtype)


@triton.jit
def add_low_rank(out, row, column, low_rank_ptrs, sizes, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_N] at (row, column), fp32, plus its part of L · Rᵀ. low_rank_ptrs: L [m, RANK] and
    R [n, RANK], contiguous; sizes: (m, n). BLOCK_R: the next power of two, at least 16 as `tl.dot` wants."""
    left_ptr, right_ptr = low_rank_ptrs
    m, n = sizes
    rows, columns = row + tl.arange(0, out.shape[0]), column + tl.arange(0, out.shape[1])
    ranks = tl.arange(0, BLOCK_R)
    inside = (ranks < RANK)[None, :]
    left = tl.load(left_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :], (rows < m)[:, None] & inside, 0.0)
    right = tl.load(right_ptr + columns[:, None] * RANK + ranks[None, :], (columns < n)[:, None] & inside, 0.0)
    return tl.dot(left, right.T, out)


@triton.jit(do_not_specialize=["tiles"])
def _low_rank_mm_kernel(
    # As for `_persistent_mm_kernel`; L [m, RANK] and R [n, RANK] of a 16-bit float dtype.
    a_desc, b_desc, c_desc, epilogue_ptrs, low_rank_ptrs, tiles,
    PROGRAMS: tl.constexpr, TILING: tl.constexpr, IMPRECISE: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`_persistent_mm_kernel` with `add_low_rank` in its epilogue."""
    m, n, k = a_desc.shape[0], b_desc.shape[0], a_desc.shape[1]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    DTYPE: tl.constexpr = tl.int32 if a_desc.dtype == tl.int8 else tl.float32
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, TILING.group_m)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        for start in range(0, k, TILING.block_k):
            a = a_desc.load([row, start])
            b = b_desc.load([column, start])
            total = tl.dot(a, b.T, total, out_dtype=DTYPE, max_num_imprecise_acc=IMPRECISE)
        out = scale_tile(total, row, column, epilogue_ptrs, (m, n), ROWS)
        out = add_low_rank(out, row, column, low_rank_ptrs, (m, n), RANK, BLOCK_R)
        store_tile(c_desc, out, row, column, TILING.subtiles)


def launch_low_rank_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    tiling: Tiling,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """The kernel for `low_rank_mm_ref` into `out` [M, N]: K, rows of `out` and r as `low_rank_mm_names` asks."""
    (m, n), rank, t = out.shape, left.shape[1], tiling
    tiles = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n)
    programs = min(t.per_sm * sm_count(a.device), tiles)
    _low_rank_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // t.subtiles]),
        (scale_a, scale_b, bias), (left, right), tiles,
        PROGRAMS=programs, TILING=t, IMPRECISE=imprecise(a, t, fast_accum), ROWS=scales_rows((scale_a, scale_b)),
        RANK=rank, BLOCK_R=max(16, triton.next_power_of_2(rank)), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


# Three stages of the large tiles leave room for both operands of the rank; four do for a rank of 16.
_LARGE = [Tiling(128, 256, 128, 8, 3), Tiling(256, 128, 128, 8, 3)]
_DEEP = [Tiling(128, 256, 128, 8, 4, subtiles=4), Tiling(256, 128, 128, 8, 4, subtiles=4)]
_SQUARE = Tiling(128, 128, 128, 4, 3)
TILINGS = {tiling.name: tiling for tiling in (*_DEEP, *_LARGE, _SQUARE)}
TWO_PASSES = "two passes"


def low_rank_mm_names(a: Tensor, b: Tensor, left: Tensor) -> list[str]:
    """The implementations that can take these operands, K-major on a GPU, the best in general first."""
    k, n, rank = a.shape[1], b.shape[0], left.shape[1]
    supported = k <= LONGEST_EXACT_K if a.dtype == torch.int8 else has_fp8(a.device)
    # A row of L or R is read in whole 16 bytes; rows of codes and of the output are addressed by TMA descriptors.
    aligned = left.element_size() == 2 and rank % 8 == k % 16 == n % 8 == 0
    if not (supported and aligned and rank <= LARGEST_RANK):
        return [TWO_PASSES]
    return [*(t.name for t in ([*_DEEP, *_LARGE] if rank <= 16 else [*_LARGE]) + [_SQUARE]), TWO_PASSES]


@operator("low_rank_mm", fake=lambda a, b, left: left.new_empty(a.shape[0], b.shape[0]))
def low_rank_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """(A · Bᵀ) * scale_a * scale_b + left · rightᵀ + bias in the dtype of left [M, r] and right [N, r]; A, B and scales
    as for `scaled_mm`."""
    dtype = left.dtype
    a, b = k_major(a), k_major(b)
    left, right = left.contiguous(), right.contiguous()
    if not (a.is_cuda and a.numel() and len(b)) or forced() == "ref":
        return low_rank_mm_ref(a, b, scale_a, scale_b, left, right, dtype, bias)

    def run(name: str) -> Tensor:
        if name == TWO_PASSES:
            return scaled_mm(a, b, scale_a, scale_b, dtype, bias, fast_accum).addmm_(left, right.t())
        out = torch.empty(len(a), len(b), dtype=dtype, device=a.device)
        return launch_low_rank_mm(
            a, b, scale_a, scale_b, left, right, out, TILINGS[name], bias=bias, fast_accum=fast_accum
        )

    rows = scales_rows((scale_a, scale_b))
    key = (len(a), len(b), a.shape[1], left.shape[1], a.dtype, b.dtype, dtype, *rows, fast_accum)
    return run(choose("low_rank_mm", key, low_rank_mm_names(a, b, left), run))

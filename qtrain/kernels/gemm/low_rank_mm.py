"""GEMM of 8-bit codes plus a product of low rank, in one kernel: out = (A · Bᵀ) * scale_a * scale_b + L · Rᵀ (+ bias).

A [M, K] and B [N, K] are codes as in `scaled_mm.py`, L [M, r] and R [N, r] in the output's dtype. So a frozen linear
with adapters (LoRA) writes its output once: as a product of its own and an addition, L · Rᵀ of rank 16 would write and
read the output four times more, 8 bytes an element, for 2·r FLOPs. A tile's accumulators are scaled, then the tensor
cores add the rank's product to them in fp32; what is rounded is the sum.

The operands of the rank are read in the epilogue, from the L2 cache, and need shared memory beside that of the
pipeline: tiles have fewer stages. Where that costs more than it saves, or the rank is large, the dispatch takes two
passes: `scaled_mm`, to whose output cuBLAS adds the product in place. So it is in high precision, where this is one
operator for the compiler's sake: of `torch.addmm` it makes a copy of the sum first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.core.hardware.capabilities import has_fp8
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, by_name, k_major, launch_persistent_mm, scales_rows
from qtrain.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_ref
from qtrain.kernels.gemm.scaled_wgmma import LOW_RANK_TILINGS, launch_scaled_wgmma, supports_scaled_wgmma
from qtrain.kernels.gemm.wgmma_product import ProductTiling

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
    total = scaled_mm_ref(a, b, scale_a, scale_b, torch.float32, bias)  # fp32 [M, N]
    return torch.addmm(total, left.float(), right.float().t()).to(out_dtype)


# Three stages of the large tiles leave room for both operands of the rank; four do for a rank of 16.
_LARGE = [Tiling(128, 256, 128, 8, 3), Tiling(256, 128, 128, 8, 3)]
_DEEP = [Tiling(128, 256, 128, 8, 4, subtiles=4), Tiling(256, 128, 128, 8, 4, subtiles=4)]
_SQUARE = Tiling(128, 128, 128, 4, 3)
TILINGS = by_name(*_DEEP, *_LARGE, _SQUARE)
TWO_PASSES = "cublas, two passes"


def low_rank_mm_names(a: Tensor, b: Tensor, left: Tensor, fast_accum: bool = True) -> list[str]:
    """The implementations that can take these operands, K-major on a GPU, the best in general first."""
    k, n, rank = a.shape[1], b.shape[0], left.shape[1]
    supported = k <= LONGEST_EXACT_K if a.dtype == torch.int8 else has_fp8(a.device)
    # A row of L or R is read in whole 16 bytes; rows of codes and of the output are addressed by TMA descriptors.
    aligned = left.element_size() == 2 and rank % 8 == k % 16 == n % 8 == 0
    if not (supported and aligned and rank <= LARGEST_RANK):
        return [TWO_PASSES]
    tilings: list[Tiling | ProductTiling] = [*(_DEEP if rank <= 16 else ()), *_LARGE, _SQUARE]
    if supports_scaled_wgmma(a, b, left.dtype, fast_accum):
        tilings += [t for t in LOW_RANK_TILINGS.values() if rank <= 16 or t.stages == 3]
    return [*(t.name for t in tilings), TWO_PASSES]


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
        out, low_rank = torch.empty(len(a), len(b), dtype=dtype, device=a.device), (left, right)
        if name in LOW_RANK_TILINGS:
            tiling = LOW_RANK_TILINGS[name]
            return launch_scaled_wgmma(a, b, scale_a, scale_b, out, tiling, bias=bias, low_rank=low_rank)
        options = {"bias": bias, "fast_accum": fast_accum, "low_rank": low_rank}
        return launch_persistent_mm(a, b, out, TILINGS[name], (scale_a, scale_b), **options)

    rows = scales_rows((scale_a, scale_b))
    key = (len(a), len(b), a.shape[1], left.shape[1], a.dtype, b.dtype, dtype, *rows, fast_accum)
    return run(choose("low_rank_mm", key, low_rank_mm_names(a, b, left, fast_accum), run))


@operator("plain_low_rank_mm", fake=lambda a, b: a.new_empty(a.shape[0], b.shape[0]))
def plain_low_rank_mm(a: Tensor, b: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """A · Bᵀ + left · rightᵀ + bias of A [M, K] and B [N, K], all in the same dtype, B and right [N, r] in any strides;
    the sum is rounded twice."""
    return F.linear(a, b, bias).addmm_(left, right.t())

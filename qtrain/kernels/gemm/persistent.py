"""The persistent GEMM that INT8, FP8 and FP16 share: out = A · Bᵀ, as it is accumulated or with scales.

INT8 accumulates in int32, exactly; FP8 in fp32, or in what the tensor cores keep of it (fast accumulation); FP16 in
FP16.
"""

import torch
from torch import Tensor

from qtrain.core.hardware import sm_count
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.gemm.tiling import Tiling, scale_tile, store_tile, tile_of

ACCUMULATORS = {
    torch.int8: "int32",
    torch.float16: "fp16",
    torch.bfloat16: "fp32",
    torch.float8_e4m3fn: "fp32",
    torch.float8_e5m2: "fp32",
}
"""The accumulator of each operand dtype."""


@triton.jit(do_not_specialize=["m", "n", "k", "tiles"])  # one binary for all shapes: descriptors do the addressing
def _persistent_mm_kernel(
    a_desc, b_desc, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr, m, n, k, tiles,
    PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUBTILES: tl.constexpr,
    ACCUMULATOR: tl.constexpr, IMPRECISE: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
):  # fmt: skip
    """The first `tiles` tiles. scale_a_ptr None: stores the accumulators. IMPRECISE: max_num_imprecise_acc."""
    DTYPE: tl.constexpr = tl.int32 if ACCUMULATOR == "int32" else tl.float16 if ACCUMULATOR == "fp16" else tl.float32
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        for start in range(0, k, BLOCK_K):
            a = a_desc.load([row, start])
            b = b_desc.load([column, start])
            total = tl.dot(a, b.T, total, out_dtype=DTYPE, max_num_imprecise_acc=IMPRECISE)
        if scale_a_ptr is not None:
            out = scale_tile(total, row, column, scale_a_ptr, scale_b_ptr, bias_ptr, m, n, ROWS_A, ROWS_B)
            store_tile(c_desc, out, row, column, SUBTILES)
        else:
            store_tile(c_desc, total, row, column, SUBTILES)


def launch_persistent_mm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tiling: Tiling,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
    tiles: int | None = None,
) -> Tensor:
    """A [M, K] · B [N, K]ᵀ into `out` [M, N]; none empty, rows contiguous, at multiples of 16 bytes.

    scales: fp32 [M] or [1] and [N] or [1]; None: `out` has the accumulators' dtype. bias [N] is added to what is
    scaled. tiles: computes only the first ones; None: all.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n, t = a.shape, b.shape[0], tiling
    if tiles is None:
        tiles = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n)
    programs = min(t.per_sm * sm_count(a.device), tiles)
    scale_a, scale_b = scales or (None, None)
    rows_a, rows_b = (scale is not None and scale.numel() > 1 for scale in (scale_a, scale_b))
    exact = ACCUMULATORS[a.dtype] == "fp32" and not fast_accum
    _persistent_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // t.subtiles]),
        scale_a, scale_b, bias, m, n, k, tiles,
        programs, t.group_m, t.block_m, t.block_n, t.block_k, t.subtiles,
        ACCUMULATORS[a.dtype], t.block_k if exact else None, rows_a, rows_b,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out

"""FP16 matrix product with FP16 accumulation: out = A · Bᵀ, the running sum itself kept in 16 bits.

What is gained: on consumer GPUs (Ada, Ampere) tensor cores add in FP16 at twice the rate of FP32; on Hopper the rate is
the same, and only registers are saved. What is traded: every addition to the sum rounds to 11 bits, so the error grows
with K where FP32 accumulation rounds once, and a sum beyond 65,504 is Inf. Fit for inference-like products of small
numbers, and as a row of a benchmark; not for gradients.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.tiles import Tiling, multiprocessors, store_columns, tile_of
from qtrain.kernels.tuning import choose, forced

STEP_K = 16
"""Products that a tensor core adds before it rounds the sum to FP16."""


def fp16_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] fp16 · B [N, K]ᵀ fp16 -> fp16 [M, N]; 16 products at a time, then the sum is rounded."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float16, device=a.device)
    for start in range(0, a.shape[1], STEP_K):
        part = a[:, start : start + STEP_K].float() @ b[:, start : start + STEP_K].float().t()
        total = (total.float() + part).half()
    return total


@triton.jit(do_not_specialize=["m", "n", "k"])  # one binary for all shapes: descriptors do the addressing
def _fp16_mm_kernel(
    a_desc, b_desc, c_desc, m, n, k,
    PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float16)
        for start in range(0, k, BLOCK_K):
            a = a_desc.load([row, start])
            b = b_desc.load([column, start])
            total = tl.dot(a, b.T, total, out_dtype=tl.float16)
        store_columns(c_desc, total, row, column, PIECES, False)


def launch_fp16_mm(a: Tensor, b: Tensor, tiling: Tiling) -> Tensor:
    """The kernel for `fp16_mm_ref`; both contiguous, K and N multiples of 8."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n, t = a.shape, b.shape[0], tiling
    out = torch.empty(m, n, dtype=torch.float16, device=a.device)
    programs = min(multiprocessors(a.device), triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n))
    _fp16_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // t.subtiles]),
        m, n, k, programs, t.group_m, t.block_m, t.block_n, t.block_k, t.subtiles,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


# 16-bit sums take half the registers: two warpgroups hold a tile of 256 x 256 as easily as fp32 one of 128 x 256.
TILINGS = {
    t.name: t
    for t in (
        Tiling(128, 256, 64, 8, 4),
        Tiling(256, 256, 64, 8, 3, subtiles=4),
        Tiling(128, 128, 64, 4, 4, subtiles=1),
        Tiling(64, 128, 64, 4, 4, subtiles=1),
    )
}


@torch.library.custom_op("qtrain::fp16_mm", mutates_args=())
def fp16_mm(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] fp16 · B [N, K]ᵀ fp16 -> fp16 [M, N], accumulated in FP16. See the top of the file."""
    (m, k), n = a.shape, b.shape[0]
    aligned = k % 8 == 0 and n % 8 == 0  # what TMA descriptors ask of strides
    if not (a.is_cuda and m and n and k and aligned) or forced() in ("ref", "cublas"):
        return fp16_mm_ref(a, b)
    a, b = a.contiguous(), b.contiguous()
    name = choose("fp16_mm", (m, n, k), list(TILINGS), lambda name: launch_fp16_mm(a, b, TILINGS[name]))
    return launch_fp16_mm(a, b, TILINGS[name])


@fp16_mm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])

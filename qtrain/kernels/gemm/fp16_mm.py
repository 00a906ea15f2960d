"""FP16 GEMM with FP16 accumulation: out = A · Bᵀ, the accumulator itself in 16 bits.

What is gained: the tensor cores of consumer GPUs (Ada, Ampere) accumulate in FP16 at twice the rate of FP32; on Hopper
the rate is the same, and only registers are saved. What is traded: every addition rounds to 11 bits, so the error grows
with K where FP32 accumulation rounds once, and a sum above 65,504 is Inf. For inference-like products of small numbers,
and as a row of a benchmark; not for gradients.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.gemm.persistent import launch_persistent_mm
from qtrain.kernels.gemm.tiling import Tiling

STEP_K = 16
"""Products that a tensor core adds before it rounds the sum to FP16."""


def fp16_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] fp16 · B [N, K]ᵀ fp16 -> fp16 [M, N]; the sum is rounded after every 16 products."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float16, device=a.device)
    for start in range(0, a.shape[1], STEP_K):
        step = a[:, start : start + STEP_K].float() @ b[:, start : start + STEP_K].float().t()
        total = (total.float() + step).half()
    return total


def launch_fp16_mm(a: Tensor, b: Tensor, tiling: Tiling) -> Tensor:
    """The kernel for `fp16_mm_ref`; both contiguous, K and N multiples of 8."""
    return launch_persistent_mm(a, b, a.new_empty(a.shape[0], b.shape[0]), tiling)


# 16-bit accumulators take half the registers: two warpgroups hold a tile of 256 x 256 like an fp32 one of 128 x 256.
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
    aligned = k % 8 == 0 and n % 8 == 0  # TMA descriptors take strides in multiples of 16 bytes
    if not (a.is_cuda and m and n and k and aligned) or forced() in ("ref", "cublas"):
        return fp16_mm_ref(a, b)
    a, b = a.contiguous(), b.contiguous()
    name = choose("fp16_mm", (m, n, k), list(TILINGS), lambda name: launch_fp16_mm(a, b, TILINGS[name]))
    return launch_fp16_mm(a, b, TILINGS[name])


@fp16_mm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])

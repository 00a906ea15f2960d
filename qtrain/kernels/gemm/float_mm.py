"""Products of floating-point operands without scales: FP16 accumulated in FP16, and fp32 on bf16 tensor cores.

fp16_mm: the accumulator itself has 16 bits. What is gained: the tensor cores of consumer GPUs (Ada, Ampere) accumulate
in FP16 at twice the rate of FP32; on Hopper the rate is the same, and only registers are saved. What is traded: every
addition rounds to 11 bits, so the error grows with K where FP32 accumulation rounds once, and a sum above 65,504 is
Inf. For inference-like products of small numbers, and as a row of a benchmark; not for gradients.

fp32_mm: a small product in fp32 of operands that may be bf16, a router's, whose logits decide where tokens go. A
product of two bf16 numbers is exact in fp32, so bf16 tensor cores with an fp32 accumulator compute what an fp32 GEMM
would, ten times as fast. An fp32 operand with a bf16 one is cut into two bf16 terms, a + b, which hold 16 bits of its
mantissa. Both terms go through one GEMM: side by side along K, with the other operand repeated, or one below the other,
with two results to add, whichever has less to copy.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator
from qtrain.kernels.gemm.persistent import Tiling, by_name, launch_persistent_mm

STEP_K = 16
"""Products that a tensor core adds before it rounds the sum to FP16."""


def fp16_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] fp16 · B [N, K]ᵀ fp16 -> fp16 [M, N]; the sum is rounded after every 16 products."""
    # The accumulator, rounded at every step.
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float16, device=a.device)
    for start in range(0, a.shape[1], STEP_K):
        step = a[:, start : start + STEP_K].float() @ b[:, start : start + STEP_K].float().t()
        total = (total.float() + step).half()  # one rounding per 16 products, as the tensor cores do
    return total


def launch_fp16_mm(a: Tensor, b: Tensor, tiling: Tiling) -> Tensor:
    """The kernel for `fp16_mm_ref`; both contiguous, K and N multiples of 8."""
    return launch_persistent_mm(a, b, a.new_empty(a.shape[0], b.shape[0]), tiling)


# 16-bit accumulators take half the registers: two warpgroups hold a tile of 256 x 256 like an fp32 one of 128 x 256.
TILINGS = by_name(
    Tiling(128, 256, 64, 8, 4),
    Tiling(256, 256, 64, 8, 3, subtiles=4),
    Tiling(128, 128, 64, 4, 4, subtiles=1),
    Tiling(64, 128, 64, 4, 4, subtiles=1),
)


@operator("fp16_mm", fake=lambda a, b: a.new_empty(a.shape[0], b.shape[0]))
def fp16_mm(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] fp16 · B [N, K]ᵀ fp16 -> fp16 [M, N], accumulated in FP16. See the top of the file."""
    (m, k), n = a.shape, b.shape[0]
    aligned = k % 8 == 0 and n % 8 == 0  # TMA descriptors take strides in multiples of 16 bytes
    if not (a.is_cuda and m and n and k and aligned) or forced() in ("ref", "cublas"):
        return fp16_mm_ref(a, b)
    a, b = a.contiguous(), b.contiguous()
    name = choose("fp16_mm", (m, n, k), list(TILINGS), lambda name: launch_fp16_mm(a, b, TILINGS[name]))
    return launch_fp16_mm(a, b, TILINGS[name])


def fp32_mm_ref(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] · b [K, N], each fp32 or bf16 -> [M, N], rounded once to out_dtype."""
    return (a.float() @ b.float()).to(out_dtype)


@operator("fp32_mm", fake=lambda a, b, out_dtype: a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype))
def fp32_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] · b [K, N], each fp32 or bf16 -> [M, N] in out_dtype, fp32 or bf16."""
    if not a.is_cuda or b.dtype != torch.bfloat16:
        return fp32_mm_ref(a, b, out_dtype)
    if a.dtype == torch.bfloat16:
        return _mm(a, b, out_dtype)
    high = a.bfloat16()
    low = (a - high.float()).bfloat16()  # what 8 bits of mantissa leave; the difference is exact
    if b.numel() <= a.shape[0] * b.shape[1]:  # copying b twice costs less than adding two outputs
        return _mm(torch.cat([high, low], dim=1), b.repeat(2, 1), out_dtype)
    high, low = _mm(torch.cat([high, low]), b, torch.float32).chunk(2)
    return (high + low).to(out_dtype)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """bf16 operands; the accumulators are rounded once."""
    return torch.mm(a, b, out_dtype=torch.float32) if out_dtype == torch.float32 else torch.mm(a, b)

"""INT8 GEMM: A [M, K] · B [N, K]ᵀ -> int32 [M, N], exact.

The int32 output is four times as large as a scaled one in bf16: at small K this GEMM is bound by storing it.

On a CPU without INT8 dot products (AVX2) `torch._int_mm` is a scalar loop, and products in fp32 are ten to thirty times
as fast. They are exact too, over spans of K whose sums fp32 holds.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.hardware.rates import product_rate
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator, triton
from qtrain.kernels.gemm.persistent import Tiling, by_name, launch_persistent_mm

LONGEST_EXACT_K = (2**31 - 1) // (127 * 127)
"""The longest K whose sums fit in int32: 127 * 127 * K < 2**31."""


def int8_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] int8 · B [N, K]ᵀ int8 -> int32 [M, N], exact. K at most LONGEST_EXACT_K."""
    (m, k), n = a.shape, b.shape[0]
    if not k:
        return a.new_zeros(m, n, dtype=torch.int32)
    if k == 1:  # torch._int_mm reads past operands of K = 1 on a CPU
        return a.int() * b.int().t()
    if a.device.type == "cuda":
        # cuBLAS takes M > 16 and K, N in multiples of 8; rows and columns of zeros change nothing.
        pad_m, pad_k, pad_n = max(32 - m, 0), -k % 8, -n % 8
        if pad_m or pad_k or pad_n:
            a, b = F.pad(a, (0, pad_k, 0, pad_m)), F.pad(b, (0, pad_k, 0, pad_n))
            return torch._int_mm(a, b.t())[:m, :n]
    elif _fp32_is_faster():
        return fp32_products(a, b)
    return torch._int_mm(a, b.t())


EXACT_FP32_K = 2**24 // (128 * 128)
"""The longest K whose sums of products fp32 holds, in any order of additions: integers up to 2**24."""


def fp32_products(a: Tensor, b: Tensor) -> Tensor:
    """`int8_mm_ref` by GEMMs in fp32."""
    # Each span's fp32 sum is an exact integer; spans are added as int32.
    spans = zip(a.split(EXACT_FP32_K, dim=1), b.split(EXACT_FP32_K, dim=1), strict=True)
    return functools.reduce(Tensor.add_, ((x.float() @ y.float().t()).int() for x, y in spans))


@functools.cache
def _fp32_is_faster() -> bool:
    """Whether this CPU multiplies fp32 faster than INT8, by one product; either result is the same. One of 256³ is too
    small: where other processes take the cores, threads wait for each other for longer than it takes."""
    a = torch.ones(384, 384, dtype=torch.int8, device="cpu")
    # The best rate of three: other processes can only slow a product down.
    by_fp32, by_int8 = (
        max(product_rate(multiply, a) for _ in range(3))
        for multiply in (lambda x, y: fp32_products(x, y.t()), torch._int_mm)
    )
    return by_fp32 > by_int8


def launch_int8_mm(a: Tensor, b: Tensor, tiling: Tiling) -> Tensor:
    """The kernel for `int8_mm_ref`: rows at multiples of 16 bytes, N in multiples of 4."""
    return launch_persistent_mm(a, b, a.new_empty(a.shape[0], b.shape[0], dtype=torch.int32), tiling)


# Output tiles are 4 bytes per element: stored in quarters, they leave room for two CTAs per SM or one more stage.
_LARGE = [Tiling(128, 128, 128, 4, 3, subtiles=4, per_sm=2), Tiling(128, 256, 128, 8, 4, subtiles=4)]
_SMALL = [Tiling(128, 128, 128, 8, 4), Tiling(64, 128, 128, 4, 4)]
TILINGS = by_name(*_LARGE, *_SMALL)


def int8_mm_names(m: int, n: int, k: int) -> list[str]:
    """The implementations for K-major operands of this shape on a GPU, the best in general first."""
    # Enough large tiles to fill a Hopper's 132 SMs most of the way.
    large = triton.cdiv(m, 128) * triton.cdiv(n, 256) >= 96
    names = [t.name for t in (_LARGE if large else _SMALL)] if k % 16 == 0 and n % 4 == 0 else []
    return [*names, "cublas"]


def aligned_rows(x: Tensor) -> Tensor:
    """x, whose rows may be slices of longer ones, or a copy if they are not contiguous at multiples of 16 bytes."""
    # What a TMA descriptor asks of a slice of columns: spans of K are such.
    aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.contiguous()


@operator("int8_mm", fake=lambda a, b: a.new_empty(a.shape[0], b.shape[0], dtype=torch.int32))
def int8_mm(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] int8 · B [N, K]ᵀ int8 -> int32 [M, N], exact. K at most LONGEST_EXACT_K."""
    (m, k), n = a.shape, b.shape[0]
    if not (a.is_cuda and m and n and k) or forced() == "ref":
        return int8_mm_ref(a, b)
    a, b = aligned_rows(a), aligned_rows(b)

    def run(name: str) -> Tensor:
        return int8_mm_ref(a, b) if name == "cublas" else launch_int8_mm(a, b, TILINGS[name])

    return run(choose("int8_mm", (m, n, k), int8_mm_names(m, n, k), run))

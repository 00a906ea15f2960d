"""INT8 matrix product with one scale a row of each operand: out = (A · Bᵀ) * scale_a[:, None] * scale_b[None, :].

Both operands are K-major: A [M, K], B [N, K]. The sum over K is exact in int32; the scales are applied in fp32 once,
at the end.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# 127 * 127 * K must stay below 2**31: longer sums are split, and the parts are added in fp32.
LONGEST_EXACT_K = (2**31 - 1) // (127 * 127)


def int8_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] int8 · B [N, K]ᵀ int8 -> int32 [M, N], exact. K at most LONGEST_EXACT_K."""
    (m, k), n = a.shape, b.shape[0]
    if k == 1:  # torch._int_mm reads past operands of K = 1 on a CPU
        return a.int() * b.int().t()
    if a.device.type == "cuda":
        # cuBLAS takes M > 16 and K, N in multiples of 8; rows and columns of zeros change nothing.
        pad_m, pad_k, pad_n = max(32 - m, 0), -k % 8, -n % 8
        if pad_m or pad_k or pad_n:
            a, b = F.pad(a, (0, pad_k, 0, pad_m)), F.pad(b, (0, pad_k, 0, pad_n))
            return torch._int_mm(a, b.t())[:m, :n]
    return torch._int_mm(a, b.t())


def scaled_int8_mm_ref(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A [M, K] int8, B [N, K] int8, scale_a fp32 [M], scale_b fp32 [N] -> [M, N] in out_dtype."""
    k = a.shape[1]
    if k <= LONGEST_EXACT_K:
        total = int8_mm_ref(a, b).float()
    else:
        spans = range(0, k, LONGEST_EXACT_K)
        total = sum(int8_mm_ref(a[:, i : i + LONGEST_EXACT_K], b[:, i : i + LONGEST_EXACT_K]).float() for i in spans)
    return (total * scale_a[:, None] * scale_b[None, :]).to(out_dtype)

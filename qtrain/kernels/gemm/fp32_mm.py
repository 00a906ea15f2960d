"""A small product in fp32 of operands that may be bf16: a router's, whose logits decide where tokens go.

A product of two bf16 numbers is exact in fp32, so bf16 tensor cores with an fp32 accumulator compute what an fp32 GEMM
would, ten times as fast. An fp32 operand beside a bf16 one is cut into two bf16 terms, a + b, which hold 16 bits of its
mantissa.
"""

import torch
from torch import Tensor


def fp32_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] · b [K, N], each fp32 or bf16 -> fp32 [M, N]."""
    return a.float() @ b.float()


@torch.library.custom_op("qtrain::fp32_mm", mutates_args=())
def fp32_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] · b [K, N], each fp32 or bf16 -> fp32 [M, N]."""
    if not a.is_cuda or b.dtype != torch.bfloat16:
        return fp32_mm_ref(a, b)
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    high = a.bfloat16()
    low = (a - high.float()).bfloat16()
    return torch.mm(high, b, out_dtype=torch.float32) + torch.mm(low, b, out_dtype=torch.float32)


@fp32_mm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)

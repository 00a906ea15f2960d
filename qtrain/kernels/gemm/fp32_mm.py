"""A small product in fp32 of operands that may be bf16: a router's, whose logits decide where tokens go.

A product of two bf16 numbers is exact in fp32, so bf16 tensor cores with an fp32 accumulator compute what an fp32 GEMM
would, ten times as fast. An fp32 operand beside a bf16 one is cut into two bf16 terms, a + b, which hold 16 bits of its
mantissa. Both terms go through one GEMM: side by side along K, with the other operand repeated, or one below the other,
with two results to add, whichever has less to copy.
"""

import torch
from torch import Tensor


def fp32_mm_ref(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] · b [K, N], each fp32 or bf16 -> [M, N], rounded once to out_dtype."""
    return (a.float() @ b.float()).to(out_dtype)


@torch.library.custom_op("qtrain::fp32_mm", mutates_args=())
def fp32_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] · b [K, N], each fp32 or bf16 -> [M, N] in out_dtype, fp32 or bf16."""
    if not a.is_cuda or b.dtype != torch.bfloat16:
        return fp32_mm_ref(a, b, out_dtype)
    if a.dtype == torch.bfloat16:
        return _mm(a, b, out_dtype)
    high = a.bfloat16()
    low = (a - high.float()).bfloat16()
    if b.numel() <= a.shape[0] * b.shape[1]:
        return _mm(torch.cat([high, low], dim=1), b.repeat(2, 1), out_dtype)
    high, low = _mm(torch.cat([high, low]), b, torch.float32).chunk(2)
    return (high + low).to(out_dtype)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """bf16 operands; the accumulators are rounded once."""
    return torch.mm(a, b, out_dtype=torch.float32) if out_dtype == torch.float32 else torch.mm(a, b)


@fp32_mm.register_fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)

"""A tensor times a factor that is known on the device only, in fp32, rounded once: one read and one write.

PyTorch rounds an fp32 scalar to bf16 before it multiplies bf16; done exactly it takes three passes and a copy in fp32.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import tl, triton

BLOCK = 2048
"""Elements of a CTA: of bf16, two loads of 16 bytes a thread."""


def scaled_ref(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp32 or bf16, factor an fp32 scalar -> x * factor in dtype."""
    return (x.float() * factor).to(dtype)


@triton.jit
def _scaled_kernel(x_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + element, element < size, 0.0).to(tl.float32)
    tl.store(out_ptr + element, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), element < size)


def launch_scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel for `scaled_ref`; x contiguous."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _scaled_kernel[grid](x, factor, out, x.numel(), BLOCK, num_warps=4)
    return out


@torch.library.custom_op("qtrain::scaled", mutates_args=())
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp32 or bf16, of any shape, factor an fp32 scalar on its device -> x * factor in dtype, rounded once."""
    x = x.contiguous()
    if not x.is_cuda or forced() == "ref":
        return scaled_ref(x, factor, dtype)
    return launch_scaled(x, factor, dtype)


@scaled.register_fake
def _(x, factor, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

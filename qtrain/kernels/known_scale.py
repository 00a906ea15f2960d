"""A tensorwise scale that is known already, or else worked out from the tensor: the start of delayed scaling.

With delayed scaling a tensor is quantized under a scale from earlier steps, so nothing has to read it for its absmax
first. In the first step there are none. To decide that on the host would mean to wait for the GPU or to compile and
capture the step twice; here a kernel looks at the scale, and every program of it stops at once where it is known.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.formats import FORMATS
from qtrain.kernels.quantize import scale_ref
from qtrain.kernels.rounding import magnitude_bits, scale_of

BLOCK = 8192
PROGRAMS = 528
"""Four for each of an H200's multiprocessors: few, for in most calls they only start and stop."""


def known_scale_ref(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """x [M, K], scale fp32 [1] -> fp32 [1]: `scale` where it is above 0, else the one `quantize` would give x."""
    return scale.clone() if scale.item() > 0 else scale_ref(x, fmt, "tensorwise", power_of_two)


@triton.jit
def _absmax_unless_known_kernel(x_ptr, scale_ptr, bits_ptr, numel, STEP: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(scale_ptr) > 0.0:
        return
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, STEP):
        index = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(x_ptr + index, index < numel, 0.0)))
    tl.atomic_max(bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _choose_kernel(scale_ptr, bits_ptr, out_ptr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    known = tl.load(scale_ptr)
    tl.store(out_ptr, tl.where(known > 0.0, known, scale_of(tl.load(bits_ptr), LARGEST, POWER_OF_TWO)))


def launch_known_scale(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool) -> Tensor:
    """The kernels for `known_scale_ref`; x contiguous."""
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    out = torch.empty_like(scale)
    programs = max(1, min(PROGRAMS, triton.cdiv(x.numel(), BLOCK)))
    _absmax_unless_known_kernel[(programs,)](x, scale, bits, x.numel(), programs * BLOCK, BLOCK, num_warps=8)
    _choose_kernel[(1,)](scale, bits, out, FORMATS[fmt].max, power_of_two, num_warps=1)
    return out


@torch.library.custom_op("qtrain::known_scale", mutates_args=())
def known_scale(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """x [M, K], scale fp32 [1] -> fp32 [1]: `scale` where it is above 0, else the one `quantize` would give x."""
    if x.is_cuda:
        return launch_known_scale(x.contiguous(), scale, fmt, power_of_two)
    return known_scale_ref(x, scale, fmt, power_of_two)


@known_scale.register_fake
def _(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    return torch.empty_like(scale)

"""`delayed_scale` of a SwiGLU's output or of its gradient, which are computed from x (and dy) as they are read."""

import torch
from torch import Tensor

from qtrain.hardware import has_ptx
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import bf16_bits
from qtrain.kernels.numerics.silu import swiglu_f32, swiglu_grad_f32
from qtrain.kernels.quantize.delayed_scale import BLOCK, delayed_scale, launch_select_scale, programs_for
from qtrain.kernels.swiglu.quantize import activation


@triton.jit
def _swiglu_amax_unless_known_kernel(
    x_ptr, dy_ptr, scale_ptr, amax_ptr, numel, width,
    STEP: tl.constexpr, BACKWARD: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [M, 2 * width] bf16, gate then up; numel = M * width. BACKWARD: of the gradient of x."""
    if tl.load(scale_ptr) > 0.0:
        return
    amax = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, STEP):
        index = start + tl.arange(0, BLOCK)
        inside = index < numel
        at = index // width * (2 * width) + index % width
        gate, up = tl.load(x_ptr + at, inside, 0.0).to(tl.float32), tl.load(x_ptr + at + width, inside, 0.0)
        if BACKWARD:
            dy = tl.load(dy_ptr + index, inside, 0.0).to(tl.float32)
            dgate, _ = swiglu_grad_f32(dy, gate, up.to(tl.float32), PTX)
            bits = bf16_bits(dgate) & 0x7FFF0000
            bits = tl.maximum(bits, bf16_bits(swiglu_f32(gate, dy, PTX)) & 0x7FFF0000)
        else:
            bits = bf16_bits(swiglu_f32(gate, up.to(tl.float32), PTX)) & 0x7FFF0000
        amax = tl.maximum(amax, bits)
    tl.atomic_max(amax_ptr, tl.max(amax, 0), sem="relaxed")


def launch_swiglu_delayed_scale(x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool) -> Tensor:
    """The kernels for `swiglu_delayed_scale`; x [M, 2I] and dy [M, I] bf16, contiguous."""
    amax, numel = torch.zeros(1, dtype=torch.int32, device=x.device), x.numel() // 2
    programs = programs_for(numel)
    _swiglu_amax_unless_known_kernel[(programs,)](
        x, dy, scale, amax, numel, x.shape[1] // 2, programs * BLOCK, dy is not None, has_ptx(x.device), BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return launch_select_scale(scale, amax, fmt, power_of_two)


@torch.library.custom_op("qtrain::swiglu_delayed_scale", mutates_args=())
def swiglu_delayed_scale(x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """`delayed_scale` of swiglu(x), or of the gradient of x [M, 2I] where dy [M, I] is given."""
    if x.is_cuda and x.dtype is torch.bfloat16:
        dy = None if dy is None else dy.contiguous()
        return launch_swiglu_delayed_scale(x.contiguous(), dy, scale, fmt, power_of_two)
    return delayed_scale(activation(x, dy), scale, fmt, power_of_two)


@swiglu_delayed_scale.register_fake
def _(x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    return torch.empty_like(scale)

"""The kernels of `delayed_scale` for a SwiGLU's output or its gradient, which are computed from x (and dy) as read."""

from torch import Tensor

from qtrain.core.hardware import has_ptx
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import bf16_bits
from qtrain.kernels.numerics.silu import swiglu_f32, swiglu_grad_f32
from qtrain.kernels.quantize.delayed_scale import BLOCK, empty_partials, launch_select_scale, programs_for


@triton.jit
def _swiglu_amax_unless_known_kernel(
    x_ptr, dy_ptr, scale_ptr, partial_ptr, numel, width,
    STEP: tl.constexpr, BACKWARD: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [M, 2 * width] bf16, gate then up; numel = M * width. BACKWARD: of the gradient of x. partial: as for
    `_amax_unless_known_kernel`."""
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
    tl.store(partial_ptr + tl.program_id(0), tl.max(amax, 0))


def launch_swiglu_delayed_scale(
    x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`launch_delayed_scale` of swiglu(x), or of the gradient of x where dy is given; x [M, 2I] and dy [M, I] bf16,
    contiguous."""
    numel = x.numel() // 2
    programs = programs_for(numel)
    partial = empty_partials(x, programs)
    _swiglu_amax_unless_known_kernel[(programs,)](
        x, dy, scale, partial, numel, x.shape[1] // 2, programs * BLOCK, dy is not None, has_ptx(x.device), BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return launch_select_scale(scale, partial, fmt, power_of_two)

"""A tensorwise scale that is known already, or else worked out from the tensor: the start of delayed scaling.

With delayed scaling a tensor is quantized under a scale from earlier steps, so nothing has to read it for its absmax
first. In the first step there are none. To decide that on the host would mean to wait for the GPU or to compile and
capture the step twice; here a kernel looks at the scale, and every program of it stops at once where it is known.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import bf16_bits
from qtrain.kernels.numerics.encode import abs_bits, scale_from_amax
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.quantize.dual_bf16x2 import gate_of
from qtrain.kernels.quantize.operators import scale_ref
from qtrain.kernels.swiglu.quantize import activation
from qtrain.kernels.swiglu.swiglu import swiglu_f32, swiglu_grad_f32

BLOCK = 8192
PROGRAMS = 528
"""Four for each of an H200's sm_count: few, for in most calls they only start and stop."""


def delayed_scale_ref(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """x [M, K], scale fp32 [1] -> fp32 [1]: `scale` where it is above 0, else the one `quantize` would give x."""
    return scale.clone() if scale.item() > 0 else scale_ref(x, fmt, "tensorwise", power_of_two)


@triton.jit
def _absmax_unless_known_kernel(
    x_ptr, dy_ptr, scale_ptr, bits_ptr, numel, width, STEP: tl.constexpr, GATE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """GATE: of what a gated MLP makes of x [M, 2 * width] (`absmax._absmax_pairs_kernel`), numel = M * width."""
    if tl.load(scale_ptr) > 0.0:
        return
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, STEP):
        index = start + tl.arange(0, BLOCK)
        inside = index < numel
        if GATE == "":
            bits = abs_bits(tl.load(x_ptr + index, inside, 0.0))
        else:
            at = index // width * (2 * width) + index % width
            gate, up = tl.load(x_ptr + at, inside, 0.0).to(tl.float32), tl.load(x_ptr + at + width, inside, 0.0)
            if GATE == "forward":
                bits = bf16_bits(swiglu_f32(gate, up.to(tl.float32), NATIVE)) & 0x7FFF0000
            else:
                dy = tl.load(dy_ptr + index, inside, 0.0).to(tl.float32)
                bits = bf16_bits(swiglu_grad_f32(dy, gate, up.to(tl.float32), NATIVE)) & 0x7FFF0000
                bits = tl.maximum(bits, bf16_bits(swiglu_f32(gate, dy, NATIVE)) & 0x7FFF0000)
        largest = tl.maximum(largest, bits)
    tl.atomic_max(bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _choose_kernel(scale_ptr, bits_ptr, out_ptr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    known = tl.load(scale_ptr)
    tl.store(out_ptr, tl.where(known > 0.0, known, scale_from_amax(tl.load(bits_ptr), LARGEST, POWER_OF_TWO)))


def launch_delayed_scale(
    x: Tensor, scale: Tensor, fmt: str, power_of_two: bool, of_gate: bool = False, dy: Tensor | None = None
) -> Tensor:
    """The kernels for `delayed_scale_ref`; x contiguous. of_gate, dy: as for `launch_dual_bf16x2`."""
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    out = torch.empty_like(scale)
    numel = x.numel() // 2 if of_gate else x.numel()
    programs = max(1, min(PROGRAMS, triton.cdiv(numel, BLOCK)))
    _absmax_unless_known_kernel[(programs,)](
        x, dy, scale, bits, numel, x.shape[1] // 2, programs * BLOCK, gate_of(of_gate, dy), x.is_cuda, BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _choose_kernel[(1,)](scale, bits, out, FORMATS[fmt].max, power_of_two, num_warps=1)
    return out


@torch.library.custom_op("qtrain::delayed_scale", mutates_args=())
def delayed_scale(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """x [M, K], scale fp32 [1] -> fp32 [1]: `scale` where it is above 0, else the one `quantize` would give x."""
    if x.is_cuda:
        return launch_delayed_scale(x.contiguous(), scale, fmt, power_of_two)
    return delayed_scale_ref(x, scale, fmt, power_of_two)


@delayed_scale.register_fake
def _(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    return torch.empty_like(scale)


@torch.library.custom_op("qtrain::swiglu_delayed_scale", mutates_args=())
def swiglu_delayed_scale(x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """`delayed_scale` of what `quantize_swiglu` quantizes."""
    if x.is_cuda and x.dtype is torch.bfloat16:
        dy = None if dy is None else dy.contiguous()
        return launch_delayed_scale(x.contiguous(), scale, fmt, power_of_two, True, dy)
    return delayed_scale(activation(x, dy), scale, fmt, power_of_two)


@swiglu_delayed_scale.register_fake
def _(x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    return torch.empty_like(scale)

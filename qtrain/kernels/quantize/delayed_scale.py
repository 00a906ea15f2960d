"""The tensorwise scale of delayed scaling: the one from earlier steps or, where there is none yet, the tensor's own.

With delayed scaling nothing reads a tensor for its absmax before it is quantized, except in the first step. Deciding
that on the host would synchronize with the GPU, or compile and capture the step twice. Here a kernel reads the scale
from device memory, and every CTA returns at once where it is known (above 0).

A tensor's quantizer then has three small launches around it: that kernel, one that writes the scale and zeros the
absmax that the quantizer adds to, and `record_amax` after it. Of a SwiGLU's output, or of its gradient, the absmax is
computed from x (and dy) as they are read.
"""

import torch
from torch import Tensor

from qtrain.core.hardware import has_ptx
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.bf16x2 import bf16_bits
from qtrain.kernels.numerics.encode import abs_bits, encoding, scale_from_amax
from qtrain.kernels.numerics.silu import swiglu_f32, swiglu_grad_f32
from qtrain.kernels.quantize.gather_rows import EVERY_ROW, RowIndex, load_token, load_weight, times_weight
from qtrain.kernels.quantize.reference import scale_ref

BLOCK = 8192
PROGRAMS = 528
"""Four per SM of an H200: few, because in most calls they only start and return."""


def delayed_scale_ref(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool = False) -> Tensor:
    """x [M, K], scale fp32 [1] -> fp32 [1]: `scale` where it is above 0, else the one `quantize` would give x."""
    return scale.clone() if scale.item() > 0 else scale_ref(x, fmt, "tensorwise", power_of_two)


@triton.jit
def _amax_unless_known_kernel(
    # fp32 or bf16 [*, columns], contiguous; numel elements, in rows that are gathered from it: int32 and fp32, or None.
    x_ptr, token_ptr, weight_ptr,
    # fp32 [1]: the known scale, or 0. int32 [CTAs]: receives the bits of the absmax that each has seen.
    scale_ptr, partial_ptr, columns, numel, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scale_ptr) > 0.0:
        return
    amax = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, STEP):
        index = start + tl.arange(0, BLOCK)
        inside = index < numel
        if token_ptr is None:
            x = tl.load(x_ptr + index, inside, 0.0)
        else:
            row, column = index // columns, index % columns
            token = tl.load(token_ptr + row, inside, -1)
            x = load_token(x_ptr, token, column, columns, inside)
            if weight_ptr is not None:
                x = times_weight(x, load_weight(weight_ptr, row, token), False)
        amax = tl.maximum(amax, abs_bits(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(amax, 0))


@triton.jit
def _select_scale_kernel(scale_ptr, partial_ptr, out_ptr, amax_ptr, partials, CODE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the known scale, or that of the partial absmaxes, which are written only where none is known."""
    # scale, out fp32 [1]; partial int32 [partials]; amax int32 [1], zeroed for the quantizer that follows.
    scale, index = tl.load(scale_ptr), tl.arange(0, BLOCK)
    if (scale > 0.0) == 0:  # of a NaN too, which compares false
        scale = scale_from_amax(tl.max(tl.load(partial_ptr + index, index < partials, 0), 0), CODE)
    tl.store(out_ptr, scale)
    tl.store(amax_ptr, 0)


def empty_partials(x: Tensor, numel: int) -> Tensor:
    """Memory for the absmaxes that the CTAs of a pass over `numel` elements have seen, int32 [CTAs]."""
    programs = max(1, min(PROGRAMS, triton.cdiv(numel, BLOCK)))  # all but the first call return at once
    return torch.empty(programs, dtype=torch.int32, device=x.device)


def launch_select_scale(scale: Tensor, partial: Tensor, fmt: str, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """scale fp32 [1], bits of at most PROGRAMS absmaxes int32 [n] -> `scale` where it is above 0, else the one of their
    maximum; and a zero, int32 [1]."""
    out, amax = torch.empty_like(scale), torch.empty_like(partial[:1])
    _select_scale_kernel[(1,)](
        scale, partial, out, amax, partial.shape[0], encoding(fmt, scale.device, power_of_two),
        triton.next_power_of_2(PROGRAMS), num_warps=4,
    )  # fmt: skip
    return out, amax


def launch_delayed_scale(
    x: Tensor, scale: Tensor, fmt: str, power_of_two: bool, index: RowIndex = EVERY_ROW
) -> tuple[Tensor, Tensor]:
    """The kernels for `delayed_scale_ref` of the rows of x, contiguous; and a zero, int32 [1], for the quantizer."""
    rows, columns = index.shape(x)
    partial = empty_partials(x, rows * columns)
    _amax_unless_known_kernel[(len(partial),)](
        x, *index, scale, partial, columns, numel=rows * columns,
        STEP=len(partial) * BLOCK, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return launch_select_scale(scale, partial, fmt, power_of_two)


@operator("delayed_scale", fake=lambda scale: torch.empty_like(scale))
def delayed_scale(
    x: Tensor,
    scale: Tensor,
    fmt: str,
    power_of_two: bool = False,
    token_of_row: Tensor | None = None,
    weight_of_row: Tensor | None = None,
) -> Tensor:
    """x [M, K], scale fp32 [1] -> fp32 [1]: `scale` where it is above 0, else the one `quantize` would give x, or the
    rows that a `RowIndex` gathers from x."""
    index = RowIndex(token_of_row, weight_of_row)
    if x.is_cuda:
        return launch_delayed_scale(x.contiguous(), scale, fmt, power_of_two, index.values)[0]
    return delayed_scale_ref(index.gathered(x), scale, fmt, power_of_two)


# ---- after the quantizer ---------------------------------------------------------------------------------------------


def record_amax_ref(seen: Tensor, amax: Tensor, scale: Tensor) -> Tensor:
    """seen = max(seen, amax), in place -> scale, or NaN where amax is not finite; all fp32 [1]."""
    seen.copy_(torch.maximum(seen, amax))
    return scale + 0 * amax


@triton.jit
def _record_amax_kernel(seen_ptr, amax_ptr, scale_ptr, out_ptr):
    amax = tl.load(amax_ptr)
    bits = tl.maximum(abs_bits(tl.load(seen_ptr)), abs_bits(amax))  # keeps a NaN, which a maximum of floats may not
    tl.store(seen_ptr, bits.to(tl.float32, bitcast=True))
    tl.store(out_ptr, tl.where(abs_bits(amax) < 0x7F800000, tl.load(scale_ptr), float("nan")))


def launch_record_amax(seen: Tensor, amax: Tensor, scale: Tensor) -> Tensor:
    """The kernel for `record_amax_ref`."""
    out = torch.empty_like(scale)
    _record_amax_kernel[(1,)](seen, amax, scale, out, num_warps=1, enable_fp_fusion=False)
    return out


@operator("record_amax", fake=lambda scale: torch.empty_like(scale), mutates_args={"seen"})
def record_amax(seen: Tensor, amax: Tensor, scale: Tensor) -> Tensor:
    """Add a tensor's absmax to that of the step, `seen`, in place; all fp32 [1]. Returns the scale, made NaN by an
    absmax that is not finite: a given scale would let an Inf saturate."""
    return (launch_record_amax if seen.is_cuda else record_amax_ref)(seen, amax, scale)


@triton.jit
def _swiglu_amax_unless_known_kernel(
    # bf16 [M, 2 * width], gate then up; bf16 [M, width], or None. scale, partial: as above.
    x_ptr, dy_ptr, scale_ptr, partial_ptr,
    # M * width. BACKWARD: of the gradient of x, else of y.
    numel, width, STEP: tl.constexpr, BACKWARD: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scale_ptr) > 0.0:
        return
    amax = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, STEP):
        index = start + tl.arange(0, BLOCK)
        inside = index < numel
        # Rows of x are twice as long as those of y: gate, and up `width` elements later.
        at = index // width * (2 * width) + index % width
        gate, up = tl.load(x_ptr + at, inside, 0.0).to(tl.float32), tl.load(x_ptr + at + width, inside, 0.0)
        if BACKWARD:
            dy = tl.load(dy_ptr + index, inside, 0.0).to(tl.float32)
            dgate, _ = swiglu_grad_f32(dy, gate, up.to(tl.float32), PTX)
            # Of the numbers as they would be stored: rounded to bf16, without their sign.
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
    partial = empty_partials(x, numel)
    _swiglu_amax_unless_known_kernel[(len(partial),)](
        x, dy, scale, partial, numel, width=x.shape[1] // 2,
        STEP=len(partial) * BLOCK, BACKWARD=dy is not None, PTX=has_ptx(x.device), BLOCK=BLOCK,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return launch_select_scale(scale, partial, fmt, power_of_two)

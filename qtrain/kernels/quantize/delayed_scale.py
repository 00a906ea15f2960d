"""The tensorwise scale of delayed scaling: the one from earlier steps or, where there is none yet, the tensor's own.

With delayed scaling nothing reads a tensor for its absmax before it is quantized, except in the first step. Deciding
that on the host would synchronize with the GPU, or compile and capture the step twice. Here a kernel reads the scale
from device memory, and every CTA returns at once where it is known (above 0).

A tensor's quantizer then has two small launches around it: that kernel, which also zeros the absmax that the quantizer
raises, and `record_amax` after it. Of a SwiGLU's output, or of its gradient, the absmax is computed from x (and dy) as
they are read.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.arrivals import arrival_counters, arrives_last
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
def knows_scale(scale_ptrs):
    """Whether the scale is known (not if it is NaN, which compares false); one CTA then stores it."""
    known_ptr, out_ptr, amax_ptr, _, _ = scale_ptrs
    known = tl.load(known_ptr)
    if known > 0.0 and tl.program_id(0) == 0:
        tl.store(out_ptr, known)
        tl.store(amax_ptr, 0)
    return known > 0.0


@triton.jit
def merge_amax(amax, scale_ptrs, CODE: tl.constexpr, PROGRAMS: tl.constexpr):
    """amax: bits of what this CTA has seen, int32; the last CTA to come here stores the scale of all."""
    _, out_ptr, amax_ptr, partial_ptr, counter_ptr = scale_ptrs
    tl.store(partial_ptr + tl.program_id(0), amax)
    if arrives_last(counter_ptr, tl.num_programs(0)):
        index = tl.arange(0, PROGRAMS)
        partial = tl.load(partial_ptr + index, index < tl.num_programs(0), 0, cache_modifier=".cg")
        tl.store(out_ptr, scale_from_amax(tl.max(partial, 0), CODE))
        tl.store(amax_ptr, 0)


@triton.jit
def _scale_unless_known_kernel(
    # fp32 or bf16 [*, columns], contiguous; numel elements, in rows that are gathered from it: int32 and fp32, or None.
    x_ptr, token_ptr, weight_ptr, scale_ptrs,  # `ScaleBuffers`
    columns, numel, STEP: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    if knows_scale(scale_ptrs):
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
    merge_amax(tl.max(amax, 0), scale_ptrs, CODE, PROGRAMS)


class ScaleBuffers(NamedTuple):
    """What a kernel reads and stores that finds a scale unless it is known."""

    known: Tensor
    """fp32 [1]: the known scale, or 0."""
    out: Tensor
    """fp32 [1]: receives the scale."""
    amax: Tensor
    """int32 [1]: receives a zero, which the quantizer that follows raises to the bits of the absmax."""
    partial: Tensor
    """int32 [CTAs]: the bits of the absmax that each has seen."""
    counter: Tensor
    """`arrival_counters`."""

    @property
    def programs(self) -> int:
        return len(self.partial)


def scale_buffers(known: Tensor, parts: int) -> ScaleBuffers:
    """For the CTAs that read `parts` parts of a tensor, of which PROGRAMS are resident."""
    amax, partial = known.new_empty(1, dtype=torch.int32), known.new_empty(min(PROGRAMS, parts), dtype=torch.int32)
    return ScaleBuffers(known, torch.empty_like(known), amax, partial, arrival_counters(known.device))


def scale_constants(fmt: str, device: torch.device, power_of_two: bool) -> dict[str, Any]:
    """The constexprs of `merge_amax`."""
    return {"CODE": encoding(fmt, device, power_of_two), "PROGRAMS": triton.next_power_of_2(PROGRAMS)}


def launch_delayed_scale(
    x: Tensor, scale: Tensor, fmt: str, power_of_two: bool, index: RowIndex = EVERY_ROW
) -> tuple[Tensor, Tensor]:
    """The kernel for `delayed_scale_ref` of the rows of x, contiguous; and a zero, int32 [1], for the quantizer."""
    rows, columns = index.shape(x)
    buffers = scale_buffers(scale, max(1, triton.cdiv(rows * columns, BLOCK)))
    _scale_unless_known_kernel[(buffers.programs,)](
        x, *index, buffers, columns, numel=rows * columns, STEP=buffers.programs * BLOCK, BLOCK=BLOCK,
        **scale_constants(fmt, x.device, power_of_two), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return buffers.out, buffers.amax


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
def _swiglu_scale_unless_known_kernel(
    # bf16 [M, 2 * width], gate then up; bf16 [M, width], or None; `ScaleBuffers`.
    x_ptr, dy_ptr, scale_ptrs,
    # M * width. BACKWARD: of the gradient of x, else of y.
    numel, width, STEP: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    if knows_scale(scale_ptrs):
        return
    PTX: tl.constexpr = CODE.ptx
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
    merge_amax(tl.max(amax, 0), scale_ptrs, CODE, PROGRAMS)


def launch_swiglu_delayed_scale(
    x: Tensor, dy: Tensor | None, scale: Tensor, fmt: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`launch_delayed_scale` of swiglu(x), or of the gradient of x where dy is given; x [M, 2I] and dy [M, I] bf16,
    contiguous."""
    numel = x.numel() // 2
    buffers = scale_buffers(scale, max(1, triton.cdiv(numel, BLOCK)))
    _swiglu_scale_unless_known_kernel[(buffers.programs,)](
        x, dy, buffers, numel, width=x.shape[1] // 2, STEP=buffers.programs * BLOCK, BACKWARD=dy is not None,
        BLOCK=BLOCK, **scale_constants(fmt, x.device, power_of_two), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return buffers.out, buffers.amax

"""The tensorwise scale of delayed scaling: the one from earlier steps or, where there is none yet, the tensor's own.

With delayed scaling nothing reads a tensor for its absmax before it is quantized, except in the first step. Deciding
that on the host would synchronize with the GPU, or compile and capture the step twice. Here a kernel reads the scale
from device memory, and every CTA returns at once where it is known (above 0).
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import abs_bits, encoding, scale_from_amax
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
    x_ptr, token_ptr, weight_ptr, scale_ptr, amax_ptr, columns, numel, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """token_ptr, weight_ptr: rows of `columns` columns, numel elements in all, are gathered from x; or None."""
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
    tl.atomic_max(amax_ptr, tl.max(amax, 0), sem="relaxed")


@triton.jit
def _select_scale_kernel(scale_ptr, amax_ptr, out_ptr, CODE: tl.constexpr):
    known = tl.load(scale_ptr)
    tl.store(out_ptr, tl.where(known > 0.0, known, scale_from_amax(tl.load(amax_ptr), CODE)))


def programs_for(numel: int) -> int:
    """CTAs of an absmax pass that usually returns at once."""
    return max(1, min(PROGRAMS, triton.cdiv(numel, BLOCK)))


def launch_select_scale(scale: Tensor, amax: Tensor, fmt: str, power_of_two: bool) -> Tensor:
    """scale fp32 [1], bits of an absmax int32 [1] -> `scale` where it is above 0, else the one of that absmax."""
    out = torch.empty_like(scale)
    _select_scale_kernel[(1,)](scale, amax, out, encoding(fmt, scale.device, power_of_two), num_warps=1)
    return out


def launch_delayed_scale(x: Tensor, scale: Tensor, fmt: str, power_of_two: bool, index: RowIndex = EVERY_ROW) -> Tensor:
    """The kernels for `delayed_scale_ref` of the rows of x, contiguous."""
    rows, columns = index.shape(x)
    amax, programs = torch.zeros(1, dtype=torch.int32, device=x.device), programs_for(rows * columns)
    _amax_unless_known_kernel[(programs,)](
        x, *index, scale, amax, columns, rows * columns, programs * BLOCK, BLOCK, num_warps=8, enable_fp_fusion=False
    )
    return launch_select_scale(scale, amax, fmt, power_of_two)


@torch.library.custom_op("qtrain::delayed_scale", mutates_args=())
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
        return launch_delayed_scale(x.contiguous(), scale, fmt, power_of_two, index.values)
    return delayed_scale_ref(index.gathered(x), scale, fmt, power_of_two)


@delayed_scale.register_fake
def _(x, scale, fmt, power_of_two=False, token_of_row=None, weight_of_row=None):
    return torch.empty_like(scale)

"""Quantizes along rows (rowwise, 1x128, 1x32): every group of consecutive elements that share a scale is read once.

A program takes several short groups, or one row; one too long for registers in pieces, twice, the second time mostly
from cache. bf16 has a kernel of fewer instructions for 8 bits (`quantize_row_words`).
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import (
    abs_bits,
    casts_to_fp8,
    encode,
    inv_scale_of,
    packed,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.numerics.formats import FORMATS, codes_shape, empty_scale, group_shape
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, philox_bits
from qtrain.kernels.numerics.rounding import NEAREST, Rounding

LONGEST = 16384
"""The longest row that one program keeps in registers."""
PIECE = 1024
"""Of a longer one, or one that would fill less than three quarters of a power of two, what is read at a time."""


@triton.jit(do_not_specialize=["role", "groups", "per_row"])
def _groups_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, groups, per_row, width, k, row_stride, group_stride,
    FMT: tl.constexpr, LARGEST: tl.constexpr, PACKING: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    STOCHASTIC: tl.constexpr, N_ROLES: tl.constexpr, CAST: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, start = (group // per_row).to(tl.int64)[:, None], (group % per_row * width)[:, None]
    inside = (group < groups)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * k + start + lane, inside & (lane < width) & (start + lane < k), 0.0)
    absmax = tl.max(abs_bits(x), 1)
    bad = tl.max(absmax, 0) >= 0x7F800000
    scale = scale_from_amax(absmax, LARGEST, POWER_OF_TWO)
    tl.store(scale_ptr + group // per_row * row_stride + group % per_row * group_stride, scale, group < groups)
    noise = 0
    if STOCHASTIC:  # k is a multiple of 8 here, so that the eight elements of a draw share a row
        block = row * (k // 8) + start // 8 + tl.arange(0, BLOCK // 8)[None, :]
        noise = philox_bits(block, key_ptr, role, N_ROLES, CAST)
    codes = encode(
        zero_nonfinite(x, bad), inv_scale_of(scale, bad)[:, None], noise, FMT, LARGEST, STOCHASTIC, False, CAST
    )
    byte = tl.arange(0, BLOCK // PACKING)[None, :]
    stored = inside & (byte * PACKING < width) & (start + byte * PACKING < k)
    tl.store(codes_ptr + row * tl.cdiv(k, PACKING) + start // PACKING + byte, packed(codes, PACKING), stored)


@triton.jit(do_not_specialize=["role"])
def _long_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, k,
    FMT: tl.constexpr, LARGEST: tl.constexpr, PACKING: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    STOCHASTIC: tl.constexpr, N_ROLES: tl.constexpr, CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)[None, :]
    most = tl.zeros((1, BLOCK), tl.int32)
    for start in range(0, k, BLOCK):
        most = tl.maximum(most, abs_bits(tl.load(x_ptr + row * k + start + lane, start + lane < k, 0.0)))
    absmax = tl.max(most, 1)
    bad = tl.max(absmax, 0) >= 0x7F800000
    scale = scale_from_amax(absmax, LARGEST, POWER_OF_TWO)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    reciprocal = inv_scale_of(scale, bad)[:, None]
    for start in range(0, k, BLOCK):
        x = tl.load(x_ptr + row * k + start + lane, start + lane < k, 0.0)
        noise = 0
        if STOCHASTIC:
            block = row * (k // 8) + start // 8 + tl.arange(0, BLOCK // 8)[None, :]
            noise = philox_bits(block, key_ptr, role, N_ROLES, CAST)
        codes = encode(zero_nonfinite(x, bad), reciprocal, noise, FMT, LARGEST, STOCHASTIC, False, CAST)
        byte = start // PACKING + tl.arange(0, BLOCK // PACKING)[None, :]
        tl.store(codes_ptr + row * tl.cdiv(k, PACKING) + byte, packed(codes, PACKING), byte * PACKING < k)


def launch_rowwise(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    *,
    elements: int = 4096,
    longest: int = LONGEST,
    piece: int = PIECE,
) -> tuple[Tensor, Tensor]:
    """The kernels for `quantize_ref` at rowwise, 1x128 and 1x32. x contiguous, not empty; K % 8 == 0 with a key.

    elements: what a program takes at least, of short groups; longest, piece: for tests, see LONGEST and PIECE.
    """
    (m, k), form, key, role = x.shape, FORMATS[fmt], rounding.row_key, rounding.role
    codes = torch.empty(codes_shape(fmt, m, k), dtype=form.dtype, device=x.device)
    scale = empty_scale(granularity, m, k, x)
    width = group_shape(granularity, m, k)[1]
    block = triton.next_power_of_2(width) if len(scale.shape) == 2 else max(triton.next_power_of_2(width), 256)
    stochastic = key is not None
    options = (fmt, form.max, form.packing, power_of_two, stochastic, len(ROUNDED_TENSORS), casts_to_fp8(x.device))
    if block <= longest and (block <= PIECE or 4 * width >= 3 * block):
        groups, per_block = scale.numel(), max(elements // block, 1)
        _groups_kernel[(triton.cdiv(groups, per_block),)](
            x, codes.view(torch.int8), scale, key, role, groups, triton.cdiv(k, width), width, k,
            scale.stride(0), scale.stride(1) if scale.ndim == 2 else 0, *options,
            per_block, block, num_warps=8 if block > 8192 and stochastic else 4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        _long_rows_kernel[(m,)](
            x, codes.view(torch.int8), scale, key, role, k, *options, piece,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale

"""Quantizes along rows in any format (rowwise, 1x128, 1x32): each group of elements that share a scale is read once.

A CTA takes several short groups, or one row. A row too long for registers is read twice in chunks, the second time
mostly from cache. bf16 to 8 bits goes through `rowwise_bf16x2.py`, in fewer instructions.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import (
    abs_bits,
    encode,
    encoding,
    inv_scale_of,
    pack_codes,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.numerics.formats import empty_codes, group_shape
from qtrain.kernels.numerics.philox import philox_bits
from qtrain.kernels.numerics.rounding import NEAREST, Rounding

LONGEST = 16384
"""The longest row, in elements, that a CTA holds in registers."""
CHUNK = 1024
"""Elements per iteration of a longer row, or of one that would fill less than three quarters of a power of two."""


@triton.jit(do_not_specialize=["role", "groups", "per_row"])
def _groups_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, groups, per_row, width, k, row_stride, group_stride,
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of `width` elements, `per_row` to a row; row_stride, group_stride: of the scales."""
    PACKING: tl.constexpr = CODE.fmt.packing
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, start = (group // per_row).to(tl.int64)[:, None], (group % per_row * width)[:, None]
    inside = (group < groups)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * k + start + lane, inside & (lane < width) & (start + lane < k), 0.0)
    amax = tl.max(abs_bits(x), 1)
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    scale = scale_from_amax(amax, CODE)
    tl.store(scale_ptr + group // per_row * row_stride + group % per_row * group_stride, scale, group < groups)
    noise = 0
    if STOCHASTIC:  # k is a multiple of 8 here, so the eight elements of a draw share a row
        block = row * (k // 8) + start // 8 + tl.arange(0, BLOCK // 8)[None, :]
        noise = philox_bits(block, key_ptr, role, CODE.ptx)
    x = zero_nonfinite(x, nonfinite)
    codes = encode(x, inv_scale_of(scale, nonfinite)[:, None], noise, STOCHASTIC, False, CODE)
    byte = tl.arange(0, BLOCK // PACKING)[None, :]
    stored = inside & (byte * PACKING < width) & (start + byte * PACKING < k)
    tl.store(codes_ptr + row * tl.cdiv(k, PACKING) + start // PACKING + byte, pack_codes(codes, PACKING), stored)


@triton.jit(do_not_specialize=["role"])
def _long_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, k,
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PACKING: tl.constexpr = CODE.fmt.packing
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)[None, :]
    lane_amax = tl.zeros((1, BLOCK), tl.int32)
    for start in range(0, k, BLOCK):
        x = tl.load(x_ptr + row * k + start + lane, start + lane < k, 0.0)
        lane_amax = tl.maximum(lane_amax, abs_bits(x))
    amax = tl.max(lane_amax, 1)
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    scale = scale_from_amax(amax, CODE)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    inv_scale = inv_scale_of(scale, nonfinite)[:, None]
    for start in range(0, k, BLOCK):
        x = tl.load(x_ptr + row * k + start + lane, start + lane < k, 0.0)
        noise = 0
        if STOCHASTIC:
            block = row * (k // 8) + start // 8 + tl.arange(0, BLOCK // 8)[None, :]
            noise = philox_bits(block, key_ptr, role, CODE.ptx)
        codes = encode(zero_nonfinite(x, nonfinite), inv_scale, noise, STOCHASTIC, False, CODE)
        byte = start // PACKING + tl.arange(0, BLOCK // PACKING)[None, :]
        tl.store(codes_ptr + row * tl.cdiv(k, PACKING) + byte, pack_codes(codes, PACKING), byte * PACKING < k)


def launch_rowwise(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    *,
    elements: int = 4096,
    longest: int = LONGEST,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The kernels for `quantize_ref` at rowwise, 1x128 and 1x32. x contiguous, not empty; K % 8 == 0 with a key.

    elements: least number per CTA; longest, chunk: LONGEST and CHUNK; tests pass smaller ones.
    """
    (m, k), key, code = x.shape, rounding.row_key, encoding(fmt, x.device, power_of_two)
    codes, scale = empty_codes(x, fmt, granularity)
    width = group_shape(granularity, m, k)[1]
    block = triton.next_power_of_2(width) if scale.ndim == 2 else max(triton.next_power_of_2(width), 256)
    if block <= longest and (block <= CHUNK or 4 * width >= 3 * block):
        groups, per_cta = scale.numel(), max(elements // block, 1)
        _groups_kernel[(triton.cdiv(groups, per_cta),)](
            x, codes.view(torch.int8), scale, key, rounding.role, groups, triton.cdiv(k, width), width, k,
            scale.stride(0), scale.stride(1) if scale.ndim == 2 else 0, key is not None, code, per_cta, block,
            num_warps=8 if block > 8192 and key is not None else 4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        _long_rows_kernel[(m,)](
            x, codes.view(torch.int8), scale, key, rounding.role, k, key is not None, code, chunk,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale

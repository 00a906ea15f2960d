"""The definition of every quantizer, in plain PyTorch: the CPU path, and what the kernels equal bit for bit.

A code is computed with the reciprocal of the scale that is stored, in fp32. Rounding is to nearest even, or stochastic:
up with a probability equal to the discarded fraction. A group of zeros has the scale SCALE_EPS. A group with a NaN or
an Inf has a NaN or Inf scale and codes of zero, so that products with it are NaN. Under a given scale FP8 codes keep a
NaN, and everything else saturates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.numerics.formats import (
    FORMATS,
    SCALE_EPS,
    Format,
    empty_scale,
    expand_scale,
    group_shape,
    pack,
    scale_shape,
)
from qtrain.kernels.quantize.absmax import column_absmax_ref
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS, BlockGroups


def scale_ref(x: Tensor, fmt: str, granularity: str, power_of_two: bool = False) -> Tensor:
    """x [M, K] -> scale of each group, fp32, shaped as `scale_shape`. power_of_two: rounded up to a power of two."""
    if fmt != "ternary":
        return scale_from_amax_ref(amax_ref(x, granularity), fmt, granularity, x.shape, power_of_two)
    return _laid_out(_mean_abs(_groups(x, granularity), x.shape), granularity, x.shape, power_of_two)


def group_scale_ref(x: Tensor, fmt: str, groups: BlockGroups, power_of_two: bool = False) -> Tensor:
    """x [M, K] -> scale of each (group, column), fp32 [groups * K]: `scale_ref` of each group's rows, transposed."""
    if fmt != "ternary":
        amax = column_absmax_ref(x, groups).view(torch.float32)
        return scale_from_amax_ref(amax, fmt, "rowwise", (amax.numel(), 1), power_of_two)
    sums = torch.linalg.vector_norm(x.unflatten(0, (-1, BLOCK_ROWS)), ord=1, dim=1, dtype=torch.float64)  # of blocks
    member = groups.group_of_block == torch.arange(groups.count, device=x.device)[:, None]  # [groups, blocks]
    member, finite = member.double(), sums.isfinite()
    total = member @ torch.where(finite, sums, 0.0)  # not by atomics: the order of the sum is fixed
    total = total.masked_fill(member @ (~finite).double() > 0, float("nan"))
    mean = (total / (member.sum(1) * BLOCK_ROWS).clamp(min=1)[:, None]).float().flatten()
    return _laid_out(mean, "rowwise", (mean.numel(), 1), power_of_two)


def amax_ref(x: Tensor, granularity: str) -> Tensor:
    """x [M, K] -> absmax of each group, fp32, shaped as `scale_shape`. NaN propagates."""
    amax = _groups(x, granularity).abs().amax(dim=(1, 3)).float()  # [down, across]
    return amax.reshape(scale_shape(granularity, *x.shape))


def scale_from_amax_ref(
    amax: Tensor, fmt: str, granularity: str, shape: Sequence[int], power_of_two: bool = False
) -> Tensor:
    """Absmax of each group of a matrix of this shape -> scales; a power of two where that is wanted."""
    # A product with the reciprocal, as on the GPU: CUDA compiles a division by a constant to one.
    return _laid_out(amax * (1 / FORMATS[fmt].max), granularity, shape, power_of_two)


def _laid_out(scale: Tensor, granularity: str, shape: Sequence[int], power_of_two: bool) -> Tensor:
    scale = scale.clamp(min=SCALE_EPS)
    if power_of_two:
        bits = scale.view(torch.int32)
        raised = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), raised, scale)
    return empty_scale(granularity, shape[0], shape[1], scale).copy_(scale.reshape(scale_shape(granularity, *shape)))


def quantize_ref(
    x: Tensor,
    fmt: str,
    granularity: str,
    bits: Tensor | None = None,
    power_of_two: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes as `codes_shape`, scale fp32 as `scale_shape`.

    bits: 16 random bits per element, int32 [M, K], for stochastic rounding. scale: given, fp32 as `scale_shape`.
    """
    x = x.float()
    if scale is None:  # else x may hold what the scale does not know of: codes saturate, and keep a NaN
        scale = scale_ref(x, fmt, granularity, power_of_two)
        x = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # the scale is non-finite already
    return _codes(x, expand_scale(_reciprocal(scale), granularity, x.shape), fmt, bits), scale


def quantize_transposed_ref(
    x: Tensor,
    fmt: str,
    granularity: str,
    bits: Tensor | None = None,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    groups: BlockGroups | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_ref` of the transpose of x. bits: int32 [M, K], as x. groups: rowwise, each group's rows have scales of
    their own, fp32 [groups * K]."""
    if groups is not None:
        return _quantize_columns_of_groups(x, fmt, groups, bits, power_of_two)
    if fmt == "ternary" and granularity == "tensorwise" and scale is None:
        scale = scale_ref(x, fmt, granularity, power_of_two)  # the same order of summation as in `quantize_ref`
    return quantize_ref(x.t(), fmt, granularity, None if bits is None else bits.t(), power_of_two, scale)


def _quantize_columns_of_groups(
    x: Tensor, fmt: str, groups: BlockGroups, bits: Tensor | None, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    scale = group_scale_ref(x, fmt, groups, power_of_two)
    inv_scale = F.pad(_reciprocal(scale).view(groups.count, -1), (0, 0, 0, 1))  # of no group: 0, found at -1
    # Block by block of rows: group -1 finds the row of zeros that the padding above appended.
    inv_scale = inv_scale[groups.group_of_block.long()].repeat_interleave(BLOCK_ROWS, 0)  # [M, K]
    x = x.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return _codes(x.t(), inv_scale.t(), fmt, None if bits is None else bits.t()), scale


def _reciprocal(scale: Tensor) -> Tensor:
    return scale.reciprocal().nan_to_num(nan=0.0)


def _codes(x: Tensor, inv_scale: Tensor, fmt: str, bits: Tensor | None) -> Tensor:
    """x fp32 and inverse scales that broadcast with it -> codes as they are stored."""
    codes = _encode(
        x * inv_scale, FORMATS[fmt], bits
    ).contiguous()  # a transpose is copied here, at one byte per element
    return pack(codes, fmt)


def _groups(x: Tensor, granularity: str) -> Tensor:
    """x [M, K] -> [groups down, rows per group, groups across, columns per group], padded with zeros."""
    m, k = x.shape
    group_m, group_k = group_shape(granularity, m, k)
    counts = scale_shape(granularity, m, k)
    down, across = counts if len(counts) == 2 else (counts[0], 1)
    x = F.pad(x, (0, across * group_k - k, 0, down * group_m - m))  # zeros change no absmax; the mean counts them out
    return x.reshape(down, group_m, across, group_k)


def _mean_abs(groups: Tensor, shape: Sequence[int]) -> Tensor:
    """Mean |x| of each group of a matrix of this shape; padding is not counted."""
    down, group_m, across, group_k = groups.shape
    rows = (shape[0] - torch.arange(down, device=groups.device) * group_m).clamp(1, group_m)
    columns = (shape[1] - torch.arange(across, device=groups.device) * group_k).clamp(1, group_k)
    # fp64: the mean does not depend on the order of summation once it is rounded to fp32.
    total = torch.linalg.vector_norm(groups, ord=1, dim=(1, 3), dtype=torch.float64)
    return (total / (rows[:, None] * columns)).float()


def _encode(scaled: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """x / scale, fp32 -> codes, one per element: int8 or fp8."""
    clamped = scaled.clamp(-fmt.max, fmt.max)
    if not fmt.is_float:
        clamped.nan_to_num_(nan=0.0)
        if bits is None:
            return clamped.round_().to(torch.int8)
        # Fixed point with 15 fractional bits, to which 15 random bits are added: exact in fp32, and on the GPU one
        # integer addition to the bit pattern.
        fixed = clamped.mul_(2.0**15).round_()
        return fixed.add_(bits >> 1).mul_(2.0**-15).floor_().to(torch.int8)
    codes = clamped.to(fmt.dtype).view(torch.uint8) if bits is None else encode_minifloat(scaled, fmt, bits)
    return codes.masked_fill_(scaled.isnan(), 0x7F).view(fmt.dtype)


def encode_minifloat(scaled: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """fp32 -> codes uint8, sign bit first, saturating; NaN becomes 0.

    bits: 16 random bits per element, int32, for stochastic rounding; None: to nearest even.
    """
    clamped = scaled.clamp(-fmt.max, fmt.max).nan_to_num(nan=0.0)
    dropped = 23 - fmt.mantissa_bits
    if bits is None:
        # Rounded as a multiple of the spacing of its binade: nearest even, and exact in the shift below.
        exponent = torch.frexp(clamped).exponent.sub(1).clamp(min=1 - fmt.exponent_bias)
        spacing = torch.ldexp(torch.ones_like(clamped), exponent - fmt.mantissa_bits)
        clamped, noise = (clamped / spacing).round() * spacing, 0
    else:  # centered: unbiased, and 0 for numbers that the format holds
        noise = (bits << (dropped - 16)) + (1 << (dropped - 17))
    # Moved to the exponents at which fp32 has its own subnormals, a number's fp32 pattern is the format's pattern with
    # more mantissa bits, subnormals included.
    pattern = (clamped * 2.0 ** (fmt.exponent_bias - 127)).view(torch.int32)
    magnitude = ((pattern & 0x7FFFFFFF) + noise) >> dropped
    width = 8 // fmt.packing
    sign = (pattern >> (32 - width)) & (1 << (width - 1))
    return (magnitude | sign).to(torch.uint8)

"""From an absmax to a scale, and from numbers to codes, inside Triton: the device functions that all quantizers share.

They compute what `quantize/reference.py` defines, bit for bit. A code is one byte while it is in registers, whatever
its format; `pack_codes` packs those of formats below 8 bits. Kernels are launched with enable_fp_fusion=False: an FMA
would round a product and a sum once, where the definition rounds twice.
"""

import functools
from dataclasses import dataclass

import torch

from qtrain.core.hardware.capabilities import has_fp8, has_ptx
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.formats import FORMATS, Format


@dataclass(frozen=True)
class Encoding:
    """What a kernel is compiled for, as one constexpr: the codes that it produces, the instructions that it may use."""

    fmt: Format
    power_of_two: bool
    """Scales are rounded up to powers of two."""
    ptx: bool
    """Inline PTX is allowed; not in the interpreter."""
    fp8_cvt: bool
    """The GPU converts fp32 to FP8; otherwise it is done with integer operations."""


@functools.cache  # asked at each launch
def encoding(fmt: str, device: torch.device, power_of_two: bool = False) -> Encoding:
    """The encoding of a format (`FORMATS`) on a device."""
    return Encoding(FORMATS[fmt], power_of_two, has_ptx(device), has_fp8(device))


@triton.jit
def abs_bits(x):
    """|x| as int32 bits of fp32: they order as the numbers do, Inf above all numbers and NaN above Inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_amax(amax_bits, CODE: tl.constexpr):
    """Bits of an absmax, int32 -> the scale that maps it to the largest code."""
    scale = amax_bits.to(tl.float32, bitcast=True) * (1.0 / CODE.fmt.max)
    scale = tl.where(scale < 1e-12, 1e-12, scale)  # a comparison, not a maximum: NaN is kept
    if CODE.power_of_two:
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000  # up to the next power of two; powers stay
        # Inf and NaN as they are: adding to their bits would change them.
        scale = tl.where(scale < float("inf"), raised.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def inv_scale_of(scale, nonfinite):
    """1 / scale. nonfinite: a scalar, whether any scale is NaN or Inf; the reciprocal of those is 0."""
    if nonfinite:
        scale = tl.where(scale < float("inf"), scale, float("inf"))  # NaN compares false
    return tl.div_rn(1.0, scale)


@triton.jit
def zero_nonfinite(x, nonfinite):
    """x as fp32. nonfinite: a scalar, whether there are NaNs and Infs, which become 0; a branch that is rarely taken
    costs nothing per element."""
    x = x.to(tl.float32)
    if nonfinite:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return x


@triton.jit
def _encode_minifloat(scaled, noise, STOCHASTIC: tl.constexpr, CODE: tl.constexpr):
    LARGEST: tl.constexpr = CODE.fmt.max
    DROPPED: tl.constexpr = 23 - CODE.fmt.mantissa_bits  # bits of fp32's mantissa
    WIDTH: tl.constexpr = 8 // CODE.fmt.packing
    if CODE.fp8_cvt and WIDTH == 8 and not STOCHASTIC:  # to nearest even, saturating
        if CODE.fmt.name == "e4m3":
            return scaled.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        else:
            return scaled.to(tl.float8e5).to(tl.int8, bitcast=True)
    else:
        # Moved to the exponents at which fp32 has its own subnormals, a number's pattern is the format's with more
        # mantissa bits, subnormals included.
        DOWN: tl.constexpr = 2.0 ** (CODE.fmt.exponent_bias - 127)
        rounded = tl.clamp(scaled, -LARGEST, LARGEST)
        if STOCHASTIC:
            pattern = (rounded * DOWN).to(tl.int32, bitcast=True)
            pattern += noise.to(tl.int32) * (1 << (DROPPED - 16)) + (1 << (DROPPED - 17))  # never reaches the sign
        else:
            bits = rounded.to(tl.int32, bitcast=True)
            # To nearest, ties to even.
            normal = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) & -(1 << DROPPED)
            # A sum whose last bit is worth the spacing of the format's subnormals rounds to it.
            SMALLEST: tl.constexpr = 2.0 ** (1 - CODE.fmt.exponent_bias)  # normal number
            SPACING: tl.constexpr = SMALLEST * 2.0**-CODE.fmt.mantissa_bits
            subnormal = (rounded + SPACING * 12582912.0) - SPACING * 12582912.0
            rounded = tl.where(tl.abs(rounded) < SMALLEST, subnormal, normal.to(tl.float32, bitcast=True))
            pattern = (rounded * DOWN).to(tl.int32, bitcast=True)
        SIGN: tl.constexpr = 1 << (WIDTH - 1)
        sign = scaled.to(tl.int32, bitcast=True) >> (32 - WIDTH)
        return (((pattern >> DROPPED) & (SIGN - 1)) | (sign & SIGN)).to(tl.int8)


@triton.jit
def _encode_integer(
    x, inv_scale, noise, STOCHASTIC: tl.constexpr, CLAMPED: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    # Adding 1.5 * 2**23 rounds to the nearest integer, even at ties, and leaves it in the low bits of the pattern.
    if STOCHASTIC:  # fixed point with 15 fractional bits, to which the noise is added; 0x400000 is the half of 1.5
        scaled = tl.clamp(x * (inv_scale * 32768.0), -LARGEST * 32768.0, LARGEST * 32768.0)
        fixed = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x400000
        return ((fixed + (noise >> 1).to(tl.int32)) >> 15).to(tl.int8)
    else:
        scaled = x * inv_scale
        if CLAMPED:
            scaled = tl.clamp(scaled, -LARGEST, LARGEST)
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def encode(x, inv_scale, noise, STOCHASTIC: tl.constexpr, GIVEN: tl.constexpr, CODE: tl.constexpr):
    """x / scale -> codes int8 (FP8 as its bits). noise: 16 random bits each, uint32, for stochastic rounding.

    GIVEN: the scale is not derived from x, which may exceed its range or be NaN.
    """
    if CODE.fmt.is_float:
        codes = _encode_minifloat(x * inv_scale, noise, STOCHASTIC, CODE)
        NAN: tl.constexpr = 0x7F
    else:
        codes = _encode_integer(x, inv_scale, noise, STOCHASTIC, GIVEN, CODE.fmt.max)
        NAN: tl.constexpr = 0
    if GIVEN:
        scaled = x * inv_scale
        codes = tl.where(scaled != scaled, NAN, codes)
    return codes


@triton.jit
def pack_codes(codes, PACKING: tl.constexpr):
    """Codes int8 [R, C] -> as stored, PACKING of them per byte [R, C / PACKING], the first in the lowest bits."""
    BITS: tl.constexpr = 8 // PACKING
    if PACKING == 1:
        return codes
    else:
        even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        # The sign's copies above the code are cut off.
        two = (even & ((1 << BITS) - 1)) | ((odd & ((1 << BITS) - 1)) << BITS)
        if PACKING == 2:
            return two
        else:
            even, odd = tl.split(tl.reshape(two, (codes.shape[0], codes.shape[1] // 4, 2)))
            return even | (odd << 4)

"""How quantizing kernels make scales and codes: the functions shared by all of them, inside Triton.

A code is made and kept as a byte, whatever its format. Kernels are launched with enable_fp_fusion=False: a product and
a sum that are rounded once would not be the code as `quantize_ref` defines it.
"""

import torch

from qtrain.kernels.compiler import tl, triton


def casts_to_fp8(device: torch.device) -> bool:
    """Whether this device converts fp32 to FP8 itself; the interpreter does not round as it should."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def abs_bits(x):
    """|x| as int32 bits of fp32: they order as the numbers do, Inf above all numbers and NaN above Inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_amax(absmax_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Bits of an absmax, int32 -> the scale with which it becomes the code LARGEST."""
    scale = absmax_bits.to(tl.float32, bitcast=True) * (1.0 / LARGEST)
    scale = tl.where(scale < 1e-12, 1e-12, scale)  # a comparison, not a maximum: NaN stays
    if POWER_OF_TWO:
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), raised.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def inv_scale_of(scale, bad):
    """1 / scale; where `bad`, the scalar that says that one of the scales is NaN or Inf, that one's is 0."""
    if bad:
        scale = tl.where(scale < float("inf"), scale, float("inf"))
    return tl.div_rn(1.0, scale)


@triton.jit
def zero_nonfinite(x, bad):
    """x as fp32; where `bad`, its NaNs and Infs are 0. A branch that is hardly ever taken costs nothing an element."""
    x = x.to(tl.float32)
    if bad:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return x


@triton.jit
def _encode_fp8(scaled, noise, FMT: tl.constexpr, STOCHASTIC: tl.constexpr, CAST: tl.constexpr):
    LARGEST: tl.constexpr = 448.0 if FMT == "e4m3" else 57344.0
    DROPPED: tl.constexpr = 20 if FMT == "e4m3" else 21  # bits of fp32's mantissa
    if CAST and not STOCHASTIC:  # to nearest even, saturating
        if FMT == "e4m3":
            return scaled.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        else:
            return scaled.to(tl.float8e5).to(tl.int8, bitcast=True)
    else:
        # Moved to the exponents at which fp32 has its own subnormals, a number's pattern is the FP8 pattern with more
        # mantissa bits, subnormals included.
        DOWN: tl.constexpr = 2.0**-120 if FMT == "e4m3" else 2.0**-112
        rounded = tl.clamp(scaled, -LARGEST, LARGEST)
        if STOCHASTIC:
            pattern = (rounded * DOWN).to(tl.int32, bitcast=True)
            pattern += noise.to(tl.int32) * (1 << (DROPPED - 16)) + (1 << (DROPPED - 17))  # the sign is out of reach
        else:
            bits = rounded.to(tl.int32, bitcast=True)
            normal = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) & -(1 << DROPPED)
            # A sum whose last bit is worth the spacing of FP8's subnormals rounds to it.
            SPACING: tl.constexpr = 2.0**-9 if FMT == "e4m3" else 2.0**-16
            subnormal = (rounded + SPACING * 12582912.0) - SPACING * 12582912.0
            SMALLEST: tl.constexpr = SPACING * 8 if FMT == "e4m3" else SPACING * 4
            rounded = tl.where(tl.abs(rounded) < SMALLEST, subnormal, normal.to(tl.float32, bitcast=True))
            pattern = (rounded * DOWN).to(tl.int32, bitcast=True)
        sign = scaled.to(tl.int32, bitcast=True) >> 24
        return (((pattern >> DROPPED) & 0x7F) | (sign & 0x80)).to(tl.int8)


@triton.jit
def _encode_integer(
    x, reciprocal, noise, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr, CLAMPED: tl.constexpr
):  # fmt: skip
    # Adding 1.5 * 2**23 rounds to the nearest integer, even at ties, and leaves it in the low bits of the pattern.
    if STOCHASTIC:  # fixed point with 15 bits after the point, where the noise is added; less the half of 1.5
        scaled = tl.clamp(x * (reciprocal * 32768.0), -LARGEST * 32768.0, LARGEST * 32768.0)
        fixed = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x400000
        return ((fixed + (noise >> 1).to(tl.int32)) >> 15).to(tl.int8)
    else:
        scaled = x * reciprocal
        if CLAMPED:
            scaled = tl.clamp(scaled, -LARGEST, LARGEST)
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def encode(
    x, reciprocal, noise, FMT: tl.constexpr, LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr, GIVEN: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """x / scale to codes int8 (FP8 as its bits). noise: 16 random bits each, uint32, for stochastic rounding.

    GIVEN: the scale is not of this x, which may be larger than it allows, or NaN. CAST: `casts_to_fp8`.
    """
    if FMT == "e4m3" or FMT == "e5m2":
        codes = _encode_fp8(x * reciprocal, noise, FMT, STOCHASTIC, CAST)
        NAN: tl.constexpr = 0x7F
    else:
        codes = _encode_integer(x, reciprocal, noise, LARGEST, STOCHASTIC, GIVEN)
        NAN: tl.constexpr = 0
    if GIVEN:
        scaled = x * reciprocal
        codes = tl.where(scaled != scaled, NAN, codes)
    return codes


@triton.jit
def packed(codes, PACKING: tl.constexpr):
    """Codes int8 [R, C] -> as stored, PACKING of them a byte [R, C / PACKING], the first in the lowest bits."""
    BITS: tl.constexpr = 8 // PACKING
    if PACKING == 1:
        return codes
    else:
        even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        pairs = (even & ((1 << BITS) - 1)) | ((odd & ((1 << BITS) - 1)) << BITS)
        if PACKING == 2:
            return pairs
        else:
            even, odd = tl.split(tl.reshape(pairs, (codes.shape[0], codes.shape[1] // 4, 2)))
            return even | (odd << 4)

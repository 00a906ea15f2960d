"""Codes of small floating-point formats (FP8, e2m1): to nearest even and stochastic, in plain PyTorch."""

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import Format


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

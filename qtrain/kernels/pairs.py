"""Pairs of bf16 in the 32-bit words they lie in: absolute maxima of both at once.

Bits of numbers without sign order as the numbers do, Inf above all numbers and NaN above Inf.
"""

from qtrain.kernels.compiler import tl, triton


@triton.jit
def lower(pairs):
    """The first number of each pair, in the lower half, as bits of fp32."""
    return pairs << 16


@triton.jit
def upper(pairs):
    """The second number of each pair, as bits of fp32."""
    return pairs & -65536


@triton.jit
def magnitudes(pairs):
    """Pairs without sign."""
    return pairs & 0x7FFF7FFF


@triton.jit
def _larger_natively(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger(a, b, NATIVE: tl.constexpr):
    """The larger ones of two pairs without sign. NATIVE: on a GPU that compares both at once."""
    if NATIVE:
        return _larger_natively(a, b)
    else:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def largest(pairs, axis: tl.constexpr, NATIVE: tl.constexpr):
    """Pairs without sign -> the pair of the largest along an axis."""
    if NATIVE:
        return tl.reduce(pairs, axis, _larger_natively)
    else:
        return tl.max(pairs & 0xFFFF, axis) | (tl.max(pairs >> 16, axis) << 16)


@triton.jit
def larger_half(pairs):
    """Pairs without sign -> the larger number of each, as bits of fp32."""
    return tl.maximum(lower(pairs), upper(pairs))

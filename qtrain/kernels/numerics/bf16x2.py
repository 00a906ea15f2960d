"""Pairs of bf16 in the 32-bit words they lie in: absolute maxima of both at once, and conversion from fp32.

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


@triton.jit
def largest_of_rows(pairs, NATIVE: tl.constexpr):
    """Pairs without sign [R, C] -> the largest number of each row, as bits of fp32."""
    # Pairs within a thread's reach, then whole numbers across threads, for which there is one instruction.
    pairs = largest(tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] // 4, 4)), 2, NATIVE)
    return tl.max(larger_half(pairs), 1)


@triton.jit
def zero_nonfinite_bf16x2(pairs, bad):
    """Where `bad`, NaNs and Infs are 0."""
    if bad:
        pairs = tl.where((pairs & 0x7F80) == 0x7F80, pairs & -65536, pairs)
        pairs = tl.where((pairs & 0x7F800000) == 0x7F800000, pairs & 0xFFFF, pairs)
    return pairs


@triton.jit
def bf16_bits(x):
    """fp32 -> its bits rounded to bf16, to nearest even, in the upper half."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FFF0000)


@triton.jit
def paired(first, second, NATIVE: tl.constexpr):
    """Two fp32 -> a pair of bf16, to nearest even."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((bf16_bits(first) >> 16) & 0xFFFF) | (bf16_bits(second) & -65536)

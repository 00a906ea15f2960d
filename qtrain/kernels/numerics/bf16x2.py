"""Pairs of bf16 in one int32 word ("bf16x2"): absolute maxima of both at once, and conversion from fp32.

The first number of a pair is in the low half. Bits of numbers without sign order as the numbers do, with Inf above all
numbers and NaN above Inf. PTX: by bf16x2 instructions, which the interpreter lacks.
"""

from qtrain.kernels.compiler import tl, triton


@triton.jit
def low_half(bf16x2):
    """The first number of each pair, as bits of fp32."""
    return bf16x2 << 16


@triton.jit
def high_half(bf16x2):
    """The second number of each pair, as bits of fp32."""
    return bf16x2 & -65536


@triton.jit
def halves_f32(bf16x2):
    """Pairs -> their first and their second numbers, fp32."""
    return low_half(bf16x2).to(tl.float32, bitcast=True), high_half(bf16x2).to(tl.float32, bitcast=True)


@triton.jit
def abs_bf16x2(bf16x2):
    """Pairs without their signs."""
    return bf16x2 & 0x7FFF7FFF


@triton.jit
def _max_ptx(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def max_bf16x2(a, b, PTX: tl.constexpr):
    """Elementwise maximum of pairs without sign."""
    if PTX:
        return _max_ptx(a, b)
    else:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def reduce_max_bf16x2(bf16x2, axis: tl.constexpr, PTX: tl.constexpr):
    """Pairs without sign -> their elementwise maximum along an axis."""
    if PTX:
        return tl.reduce(bf16x2, axis, _max_ptx)
    else:
        return tl.max(bf16x2 & 0xFFFF, axis) | (tl.max(bf16x2 >> 16, axis) << 16)


@triton.jit
def max_of_halves(bf16x2):
    """Pairs without sign -> the larger number of each, as bits of fp32."""
    return tl.maximum(low_half(bf16x2), high_half(bf16x2))


@triton.jit
def row_max_bf16x2(bf16x2, PTX: tl.constexpr):
    """Pairs without sign [R, C] -> the largest number of each row, as bits of fp32."""
    # Within a thread as pairs; across threads as int32, for which there is a redux instruction.
    bf16x2 = reduce_max_bf16x2(tl.reshape(bf16x2, (bf16x2.shape[0], bf16x2.shape[1] // 4, 4)), 2, PTX)
    return tl.max(max_of_halves(bf16x2), 1)


@triton.jit
def zero_nonfinite_bf16x2(bf16x2, nonfinite):
    """nonfinite: a scalar, whether there are NaNs and Infs, which become 0."""
    if nonfinite:
        bf16x2 = tl.where((bf16x2 & 0x7F80) == 0x7F80, bf16x2 & -65536, bf16x2)
        bf16x2 = tl.where((bf16x2 & 0x7F800000) == 0x7F800000, bf16x2 & 0xFFFF, bf16x2)
    return bf16x2


@triton.jit
def bf16_bits(x):
    """fp32 -> its bits rounded to bf16, to nearest even, in the high half."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FFF0000)


@triton.jit
def to_bf16x2(first, second, PTX: tl.constexpr):
    """Two fp32 -> a pair of bf16, to nearest even."""
    if PTX:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((bf16_bits(first) >> 16) & 0xFFFF) | (bf16_bits(second) & -65536)


@triton.jit
def multiply_bf16x2(bf16x2, factor, PTX: tl.constexpr):
    """Pairs times fp32 factors, each product rounded once."""
    first, second = halves_f32(bf16x2)
    return to_bf16x2(first * factor, second * factor, PTX)

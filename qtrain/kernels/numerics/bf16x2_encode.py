"""Codes of pairs of bf16, in few instructions: to nearest and stochastic, packed into words along rows and columns.

A code is made as what a word is packed from: a pattern with the code in one of its bytes, or, where FP8 is rounded to
nearest, the scaled number itself, which the GPU converts as it packs. Stochastic rounding adds integers, as `encode`
does, and its code ends where a byte does: packing picks the byte, and nothing is shifted.

CAST, as in `rounding.py`; where it is not, in the interpreter, every code is in the lowest byte.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import lower, upper, zero_nonfinite_bf16x2
from qtrain.kernels.numerics.encode import encode, inv_scale_of
from qtrain.kernels.numerics.packed_words import bytes_of_both
from qtrain.kernels.numerics.philox import philox_words


@triton.jit
def quick_reciprocal(scale, bad, CAST: tl.constexpr):
    """`inv_scale_of` by what `rcp.rn.f32` comes to for 2**-126 to 2**126, without the branch that tells."""
    if CAST:
        near = tl.inline_asm_elementwise(
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000;"
            " fma.rn.f32 $0, e, r, r; }",
            "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        if bad:
            near = tl.where(scale < float("inf"), near, 0.0)
        return near
    else:
        return inv_scale_of(scale, bad)


@triton.jit
def _to_nearest(bits, reciprocal, FMT: tl.constexpr, LARGEST: tl.constexpr, CAST: tl.constexpr):
    """Bits of fp32 x -> what `two_codes` and `four_codes` take: the code in the lowest byte, or x / scale."""
    x = bits.to(tl.float32, bitcast=True)
    if not CAST:
        KEEPS_NAN: tl.constexpr = FMT != "int8"  # under a scale that is given, as the conversions below
        return encode(x, reciprocal, 0, FMT, LARGEST, False, KEEPS_NAN, False).to(tl.int32) & 0xFF
    elif FMT == "int8":
        return (x * reciprocal + 12582912.0).to(tl.int32, bitcast=True)  # as in `encode`
    else:
        return x * reciprocal


@triton.jit
def _noise(words, half, UPPER: tl.constexpr, FMT: tl.constexpr, CAST: tl.constexpr):
    """Random words -> what `_stochastically` adds for the first number of each pair, or the second one (UPPER): its 16
    bits, below INT8's third byte, with the half of 256 in that, or below FP8's fourth, with the half of one behind."""
    if CAST:  # three bytes in order, of the word and of the half
        if FMT == "int8":
            BYTES: tl.constexpr = "0x5432" if UPPER else "0x5410"
        else:
            BYTES: tl.constexpr = "0x5324" if UPPER else "0x5104"
        return bytes_of_both(words, half, BYTES)
    else:
        bits = (words >> 16 if UPPER else words & 0xFFFF).to(tl.int32)
        return bits | (half << 16) if FMT == "int8" else (bits << 8) | half


@triton.jit
def _saturated(scaled, FMT: tl.constexpr, LARGEST: tl.constexpr):
    NAN: tl.constexpr = 480.0 if FMT == "e4m3" else 114688.0  # what NaN's code would be worth as a number's
    return tl.where(scaled == scaled, tl.clamp(scaled, -LARGEST, LARGEST), NAN)


@triton.jit
def _stochastically(scaled, noise, FMT: tl.constexpr, CAST: tl.constexpr):
    """x / scale -> the code in the third byte (INT8) or in the fourth (FP8). Nothing is clamped: no bf16 number over
    the scale that is made of it comes out beyond the largest code."""
    if FMT == "int8":  # fixed point with 15 bits after the point, doubled
        code = 2 * (scaled + 384.0).to(tl.int32, bitcast=True) + noise
        return code if CAST else (code >> 16) & 0xFF
    else:
        DOWN: tl.constexpr = 2.0**-120 if FMT == "e4m3" else 2.0**-112
        ROOM: tl.constexpr = 16 if FMT == "e4m3" else 8  # above what is moved down; the sign is pushed out
        code = (scaled * DOWN).to(tl.int32, bitcast=True) * ROOM + noise
        code = code | (scaled.to(tl.int32, bitcast=True) & -0x80000000)
        return code if CAST else (code >> 24) & 0xFF


@triton.jit
def draw_bf16x2(block, key, CAST: tl.constexpr):
    """block int64 [R, C] and key, as `philox` takes them -> words [R, 4 * C] and half, as `scale_bf16x2` takes them."""
    seed, step, tensor, once = key
    words = philox_words(block, seed, step, tensor, CAST, once)
    return tl.reshape(words, (block.shape[0], block.shape[1] * 4)), once * 0x80


@triton.jit
def scale_bf16x2(
    pairs, by_first, by_second, words, half, beyond,
    STOCHASTIC: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Both numbers of each pair by their reciprocal scales, as `two_codes` and `four_codes` take them.

    STOCHASTIC: words are random, one a pair, and half is 0x80, as a number that the compiler does not know: else it
    builds a register with the order of bytes for each. beyond: there are NaNs or numbers too large for the scale, which
    is possible where it is given, for FP8 only; conversions to nearest saturate by themselves.
    """
    if STOCHASTIC:
        first = lower(pairs).to(tl.float32, bitcast=True) * by_first
        second = upper(pairs).to(tl.float32, bitcast=True) * by_second
        if beyond:
            first, second = _saturated(first, FMT, LARGEST), _saturated(second, FMT, LARGEST)
        first = _stochastically(first, _noise(words, half, False, FMT, CAST), FMT, CAST)
        second = _stochastically(second, _noise(words, half, True, FMT, CAST), FMT, CAST)
    else:
        first = _to_nearest(lower(pairs), by_first, FMT, LARGEST, CAST)
        second = _to_nearest(upper(pairs), by_second, FMT, LARGEST, CAST)
    return first, second


@triton.jit
def two_codes(a, b, STOCHASTIC: tl.constexpr, FMT: tl.constexpr, CAST: tl.constexpr):
    """The codes of a and b as int16, that of a in the lower byte."""
    if not CAST:
        return (a | (b << 8)).to(tl.int16)
    elif FMT == "int8" or STOCHASTIC:
        BYTE: tl.constexpr = "0x0040" if not STOCHASTIC else "0x0062" if FMT == "int8" else "0x0073"
        PRMT: tl.constexpr = "prmt.b32 s, $1, $3, " + BYTE + "; prmt.b32 t, $2, $4, " + BYTE
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; " + PRMT + "; prmt.b32 $0, s, t, 0x5410; }",
            "=r,r,r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        CVT: tl.constexpr = "cvt.rn.satfinite." + FMT + "x2.f32"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 s, t; " + CVT + " s, $3, $1; " + CVT + " t, $4, $2; mov.b32 $0, {s, t}; }",
            "=r,f,f,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def encode_bf16x2(
    pairs, by_first, by_second, bad, draws, key,
    STOCHASTIC: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Pairs [R, C] or [C] -> `scale_bf16x2` of them, NaNs and Infs left out where `bad` says that there are some.
    draws: numbers [R, C / 4] of what `philox` draws for them; key: what else it takes."""
    words, half = None, 0
    if STOCHASTIC:
        words, half = draw_bf16x2(draws, key, CAST)
        words = tl.reshape(words, pairs.shape)
    pairs = zero_nonfinite_bf16x2(pairs, bad)
    return scale_bf16x2(pairs, by_first, by_second, words, half, False, STOCHASTIC, FMT, LARGEST, CAST)


@triton.jit
def store_codes(
    ptrs, inside, pairs, by, bad, draws, key,
    STOCHASTIC: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """The codes of pairs under the reciprocal scale(s) `by`, as int16 to ptrs; the rest as for `encode_bf16x2`."""
    a, b = encode_bf16x2(pairs, by, by, bad, draws, key, STOCHASTIC, FMT, LARGEST, CAST)
    tl.store(ptrs, two_codes(a, b, STOCHASTIC, FMT, CAST), inside)


@triton.jit
def four_codes(a, b, c, d, FMT: tl.constexpr, CAST: tl.constexpr):
    """The codes of a, b, c and d, to nearest, as int32, that of a in the lowest byte."""
    if not CAST:
        return a | (b << 8) | (c << 16) | (d << 24)
    elif FMT == "int8":
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; prmt.b32 s, $1, $2, 0x0040; prmt.b32 t, $3, $4, 0x0040; prmt.b32 $0, s, t, 0x5410; }",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        CVT: tl.constexpr = "cvt.rn.satfinite." + FMT + "x2.f32"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 s, t; " + CVT + " s, $2, $1; " + CVT + " t, $4, $3; mov.b32 $0, {s, t}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def two_rows(a, b, FMT: tl.constexpr, CAST: tl.constexpr):
    """The codes of a and b, rounded stochastically, in the lower half of int32, that of a in the lowest byte."""
    if CAST:
        BYTES: tl.constexpr = "0x0062" if FMT == "int8" else "0x0073"
        return bytes_of_both(a, b, BYTES)
    else:
        return a | (b << 8)


@triton.jit
def two_halves(a, b, CAST: tl.constexpr):
    """The lower halves of a and b as int32, that of a below."""
    if CAST:
        return bytes_of_both(a, b, "0x5410")
    else:
        return a | (b << 16)

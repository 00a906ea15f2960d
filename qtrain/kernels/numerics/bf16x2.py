"""Pairs of bf16 in one int32 word ("bf16x2"): absmaxes of both at once, conversions, 8-bit and INT4 codes of both.

The first number of a pair is in the low half. Bits of numbers without sign order as the numbers do, with Inf above all
numbers and NaN above Inf. PTX: by bf16x2 instructions, which the interpreter lacks.

Until it is packed, a code is an int32 with the code in one of its bytes, or, where the GPU converts to FP8 as it packs,
the scaled fp32 number itself. Stochastic rounding adds integers, as `encode` does, and leaves the code in byte 2 (INT8,
INT4) or 3 (FP8): packing 8 bits selects the byte (prmt), and nothing is shifted. Rounding to nearest leaves it in byte
0, and so does everything in the interpreter, which has no PTX.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import encode, inv_scale_of
from qtrain.kernels.numerics.packed_words import select_bytes
from qtrain.kernels.numerics.philox import philox_words


@triton.jit
def low_half(bf16x2):
    """The first number of each pair, as bits of fp32."""
    return bf16x2 << 16  # bf16 is the upper half of fp32: the bits are the number


@triton.jit
def high_half(bf16x2):
    """The second number of each pair, as bits of fp32."""
    return bf16x2 & -65536  # 0xFFFF0000 as int32


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
        # Without signs both halves are below 0x8000, so that shifted down they are non-negative.
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
    return tl.maximum(low_half(bf16x2), high_half(bf16x2))  # as integers, which order as the numbers do


@triton.jit
def row_max_bf16x2(bf16x2, PTX: tl.constexpr):
    """Pairs without sign [R, C] -> the largest number of each row, as bits of fp32."""
    # Within a thread as pairs; across threads as int32, for which there is a redux instruction.
    bf16x2 = reduce_max_bf16x2(tl.reshape(bf16x2, (bf16x2.shape[0], bf16x2.shape[1] // 4, 4)), 2, PTX)
    return tl.max(max_of_halves(bf16x2), 1)


@triton.jit
def zero_nonfinite_bf16x2(bf16x2, nonfinite):
    """nonfinite: a scalar, whether there are NaNs and Infs, which become 0."""
    if nonfinite:  # an exponent of ones is a NaN or an Inf; each half by itself
        bf16x2 = tl.where((bf16x2 & 0x7F80) == 0x7F80, bf16x2 & -65536, bf16x2)
        bf16x2 = tl.where((bf16x2 & 0x7F800000) == 0x7F800000, bf16x2 & 0xFFFF, bf16x2)
    return bf16x2


@triton.jit
def bf16_bits(x):
    """fp32 -> its bits rounded to bf16, to nearest even, in the high half."""
    # Half a unit of the last place, minus one bit where that place is even: ties go to even. NaN must not carry into
    # Inf.
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


@triton.jit
def fast_inv_scale(scale, nonfinite, PTX: tl.constexpr):
    """`inv_scale_of` by the instructions of `rcp.rn.f32` for 2**-126 to 2**126, without its branch on the range."""
    if PTX:  # an approximation and one Newton step: e = 1 - scale * r, r + r * e, correctly rounded in that range
        inv_scale = tl.inline_asm_elementwise(
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000;"
            " fma.rn.f32 $0, e, r, r; }",
            "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        if nonfinite:
            inv_scale = tl.where(scale < float("inf"), inv_scale, 0.0)
        return inv_scale
    else:
        return inv_scale_of(scale, nonfinite)


@triton.jit
def round_to_nearest(x, inv_scale, CODE: tl.constexpr):
    """fp32 x -> the code in byte 0, or x / scale where the GPU converts it as it packs."""
    if CODE.fmt.is_float:
        if CODE.fp8_cvt:
            return x * inv_scale
        else:  # NaN is kept, as in the conversion of the GPU
            return encode(x, inv_scale, 0, False, True, CODE).to(tl.int32) & 0xFF
    else:
        code = (x * inv_scale + 12582912.0).to(tl.int32, bitcast=True)  # as in `encode`
        return code if CODE.ptx else code & 0xFF


@triton.jit
def _noise(rng_words, half_unit, HIGH: tl.constexpr, CODE: tl.constexpr):
    """What `_round_stochastically` adds for the low or the HIGH number of each pair: its 16 random bits, below byte 2
    (INT8, and half_unit in byte 2) or below byte 3 (FP8, and half_unit in byte 0)."""
    # Byte selectors, lowest byte first: 0-3 are bytes of rng_words, 4-7 of half_unit (0x80 in byte 4, zeros above).
    if CODE.ptx:
        if CODE.fmt.is_float:
            BYTES: tl.constexpr = "0x5324" if HIGH else "0x5104"
        else:
            BYTES: tl.constexpr = "0x5432" if HIGH else "0x5410"
        return select_bytes(rng_words, half_unit, BYTES)
    else:
        bits = (rng_words >> 16 if HIGH else rng_words & 0xFFFF).to(tl.int32)
        return (bits << 8) | half_unit if CODE.fmt.is_float else bits | (half_unit << 16)


@triton.jit
def _saturate(scaled, CODE: tl.constexpr):
    if CODE.fmt.is_float:
        LARGEST: tl.constexpr = CODE.fmt.max
        MANTISSA: tl.constexpr = CODE.fmt.mantissa_bits
        # The number whose code would be 0x7F, FP8's NaN: 480 of e4m3, 114688 of e5m2.
        NAN: tl.constexpr = (2 - 2.0**-MANTISSA) * 2.0 ** (2 ** (7 - MANTISSA) - 1 - CODE.fmt.exponent_bias)
        return tl.where(scaled == scaled, tl.clamp(scaled, -LARGEST, LARGEST), NAN)
    else:  # INT8 codes are not made under a given scale
        return scaled


@triton.jit
def _round_stochastically(scaled, noise, CODE: tl.constexpr):
    """x / scale -> the code in byte 2 (INT8) or 3 (FP8). Nothing is clamped: of a bf16 number, over the scale derived
    from it, no code exceeds the largest one."""
    if CODE.fmt.is_float:
        DOWN: tl.constexpr = 2.0 ** (CODE.fmt.exponent_bias - 127)
        ROOM: tl.constexpr = 2 << CODE.fmt.mantissa_bits  # moves the code's last bit to bit 24; the sign is shifted out
        # Exact in fp32: a product with a power of two, into its subnormals, whose pattern is FP8's with more mantissa.
        code = (scaled * DOWN).to(tl.int32, bitcast=True) * ROOM + noise
        code = code | (scaled.to(tl.int32, bitcast=True) & -0x80000000)
        return code if CODE.ptx else (code >> 24) & 0xFF
    else:  # fixed point with 15 fractional bits, doubled
        # 384 = 1.5 * 2**8: its fp32 spacing is 2**-15, so the low bits are the number in units of 2**-15.
        code = 2 * (scaled + 384.0).to(tl.int32, bitcast=True) + noise
        return code if CODE.ptx else (code >> 16) & 0xFF


@triton.jit
def draw_bf16x2(block, key, PTX: tl.constexpr):
    """block int64 [R, C], key: (seed, step, tensor, runtime_one) as for `philox` -> rng_words [R, 4 * C] and half_unit,
    as `scale_bf16x2` takes them."""
    seed, step, tensor, runtime_one = key
    rng_words = philox_words(block, seed, step, tensor, PTX, runtime_one)
    return tl.reshape(rng_words, (block.shape[0], block.shape[1] * 4)), runtime_one * 0x80


@triton.jit
def scale_bf16x2(
    bf16x2, inv_first, inv_second, rng_words, half_unit, overflow, STOCHASTIC: tl.constexpr, CODE: tl.constexpr
):
    """Both numbers of each pair times their inverse scales, rounded, ready for the `pack_` functions.

    STOCHASTIC: rng_words has one random word per pair. half_unit: 0x80, as a runtime value, because a constant would be
    merged with the byte order into a register per use. overflow: a scalar, whether there are NaNs or numbers out of the
    range of a given scale (FP8 only); conversions to nearest saturate by themselves.
    """
    if STOCHASTIC:
        first = low_half(bf16x2).to(tl.float32, bitcast=True) * inv_first
        second = high_half(bf16x2).to(tl.float32, bitcast=True) * inv_second
        if overflow:
            first, second = _saturate(first, CODE), _saturate(second, CODE)
        first = _round_stochastically(first, _noise(rng_words, half_unit, False, CODE), CODE)
        second = _round_stochastically(second, _noise(rng_words, half_unit, True, CODE), CODE)
    else:
        first, second = halves_f32(bf16x2)
        first, second = round_to_nearest(first, inv_first, CODE), round_to_nearest(second, inv_second, CODE)
    return first, second


@triton.jit
def encode_bf16x2(bf16x2, inv_first, inv_second, nonfinite, block, key, STOCHASTIC: tl.constexpr, CODE: tl.constexpr):
    """`scale_bf16x2` of pairs [R, C] or [C], whose NaNs and Infs become 0 if nonfinite; block int64 [R, C / 4] and key
    as for `draw_bf16x2`."""
    rng_words, half_unit = None, 0
    if STOCHASTIC:
        rng_words, half_unit = draw_bf16x2(block, key, CODE.ptx)
        rng_words = tl.reshape(rng_words, bf16x2.shape)
    bf16x2 = zero_nonfinite_bf16x2(bf16x2, nonfinite)
    return scale_bf16x2(bf16x2, inv_first, inv_second, rng_words, half_unit, False, STOCHASTIC, CODE)


@triton.jit
def store_codes_bf16x2(
    ptrs, inside, bf16x2, inv_scale, nonfinite, block, key, STOCHASTIC: tl.constexpr, CODE: tl.constexpr
):
    """Stores the codes of pairs as `pack_two_codes` has them; the rest as for `encode_bf16x2`."""
    a, b = encode_bf16x2(bf16x2, inv_scale, inv_scale, nonfinite, block, key, STOCHASTIC, CODE)
    tl.store(ptrs, pack_two_codes(a, b, STOCHASTIC, CODE), inside)


@triton.jit
def pack_two_codes(a, b, STOCHASTIC: tl.constexpr, CODE: tl.constexpr):
    """The codes of a and b as int16, that of a in the low byte, or those of INT4 as int8, that of a in the low half;
    eight bytes of input per thread at once."""
    if CODE.fmt.packing == 2:
        BYTE: tl.constexpr = 16 if STOCHASTIC and CODE.ptx else 0  # where the code begins
        return (((a >> BYTE) & 15) | (((b >> BYTE) & 15) << 4)).to(tl.int8)
    elif not CODE.ptx:
        return (a | (b << 8)).to(tl.int16)
    elif CODE.fmt.is_float and CODE.fp8_cvt and not STOCHASTIC:
        # Converts two numbers at once, the second operand into the low byte; a thread has two pairs.
        CVT: tl.constexpr = "cvt.rn.satfinite." + CODE.fmt.name + "x2.f32"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 s, t; " + CVT + " s, $3, $1; " + CVT + " t, $4, $2; mov.b32 $0, {s, t}; }",
            "=r,f,f,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # The byte that holds the code: 0 to nearest, 3 of stochastic FP8, 2 of stochastic INT8.
        BYTES: tl.constexpr = "0x0040" if not STOCHASTIC else "0x0073" if CODE.fmt.is_float else "0x0062"
        PRMT: tl.constexpr = "prmt.b32 s, $1, $3, " + BYTES + "; prmt.b32 t, $2, $4, " + BYTES
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; " + PRMT + "; prmt.b32 $0, s, t, 0x5410; }",
            "=r,r,r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def pack_four_codes(a, b, c, d, CODE: tl.constexpr):
    """The codes of a, b, c and d, rounded to nearest, as int32, that of a in the lowest byte."""
    if not CODE.ptx:
        return a | (b << 8) | (c << 16) | (d << 24)
    elif CODE.fmt.is_float and CODE.fp8_cvt:
        CVT: tl.constexpr = "cvt.rn.satfinite." + CODE.fmt.name + "x2.f32"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 s, t; " + CVT + " s, $2, $1; " + CVT + " t, $4, $3; mov.b32 $0, {s, t}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; prmt.b32 s, $1, $2, 0x0040; prmt.b32 t, $3, $4, 0x0040; prmt.b32 $0, s, t, 0x5410; }",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def pack_two_rows(a, b, CODE: tl.constexpr):
    """The codes of a and b, rounded stochastically, in the low half of int32, that of a in the lowest byte."""
    if CODE.ptx:
        BYTES: tl.constexpr = "0x0073" if CODE.fmt.is_float else "0x0062"
        return select_bytes(a, b, BYTES)
    else:
        return a | (b << 8)


@triton.jit
def pack_two_halves(a, b, PTX: tl.constexpr):
    """The low halves of a and b as int32, that of a in the low half."""
    if PTX:
        return select_bytes(a, b, "0x5410")
    else:
        return (a & 0xFFFF) | (b << 16)


@triton.jit
def pack_high_halves(a, b, PTX: tl.constexpr):
    """The high halves of a and b as int32, that of a in the low half."""
    if PTX:
        return select_bytes(a, b, "0x7632")
    else:
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def two_codes(a, b, CODE: tl.constexpr):
    """The codes of a and b, rounded to nearest, in the low half of int32, that of a in the lowest byte."""
    if CODE.ptx and CODE.fmt.is_float and CODE.fp8_cvt:
        CVT: tl.constexpr = "cvt.rn.satfinite." + CODE.fmt.name + "x2.f32"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 s; " + CVT + " s, $2, $1; cvt.u32.u16 $0, s; }",
            "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return a | (b << 8)


@triton.jit
def transpose_two_codes(upper, lower, PTX: tl.constexpr):
    """`two_codes` of a row and of the row below -> the codes of both rows in the first column (low half, that of the
    upper row in the lowest byte) and in the second (high half)."""
    if PTX:
        return select_bytes(upper, lower, "0x5140")
    else:
        first, second = (upper & 0xFF) | ((lower & 0xFF) << 8), ((upper >> 8) & 0xFF) | (lower & 0xFF00)
        return first | (second << 16)

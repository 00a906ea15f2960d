"""Loads and stores of eight elements per thread as 32-bit words: unpacking and packing without shuffles.

A tile is [R, C, 8]: the last axis is contiguous in memory and held by one thread, the middle one runs over the threads
that share a row. Eight elements are whole words whatever their width: 8 of fp32, 4 of bf16, 2 of 8-bit codes, 1 of
4-bit codes. Tiles are loaded and stored as words, and every step between words and elements stays within a thread.

ALIGNED: rows and addresses are multiples of 16 elements. Otherwise words are assembled from single elements.
PTX: inline PTX is allowed; CODE: the `Encoding` of FP8.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import encode


@triton.jit
def without_contiguity(pointer):
    """Pointers [R, C] without the hint that rows are contiguous: Triton then keeps the layout of the words."""
    if pointer.shape[0] > 1:
        pointer = tl.max_contiguous(pointer, [1, 1])
    return pointer


@triton.jit
def load_words(address, group, limit, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Groups int32 [R, C] of eight elements, at an address (int64) -> words int32 [R, C, WORDS], or [R, C] for 1.

    Loads are not masked: beyond the first `limit` elements the last ones are read again.
    """
    if ALIGNED:
        # Clamped instead of masked: a mask would cost a predicate and a select per word.
        at = tl.minimum(group, limit // 8 - 1) * WORDS
        pointer = address.to(tl.pointer_type(tl.int32))
        if WORDS == 1:
            return tl.load(without_contiguity(pointer + at))
        elif WORDS == 8:  # 16 bytes a load
            pointer = tl.multiple_of(pointer, 16)
            pointers = pointer + (at[:, :, None] + tl.arange(0, 4)[None, None, :])
            halves = tl.join(tl.load(pointers), tl.load(pointers + 4))  # [R, C, 4, 2]
            # Words 0 to 3, then 4 to 7.
            return tl.reshape(tl.permute(halves, (0, 1, 3, 2)), (group.shape[0], group.shape[1], 8))
        else:
            pointer = tl.multiple_of(pointer, 16 if WORDS > 2 else 8)
            return tl.load(pointer + (at[:, :, None] + tl.arange(0, WORDS)[None, None, :]))
    else:
        first, last = group * 8, limit - 1
        if WORDS == 8:
            return _load_eight(address.to(tl.pointer_type(tl.int32)), first, last, False)
        elif WORDS == 4:
            # int16 loads are sign-extended; the mask keeps a neighbor's half clean.
            return _join_fields(_load_eight(address.to(tl.pointer_type(tl.int16)), first, last, False) & 0xFFFF, 16)
        elif WORDS == 2:
            eight = _load_eight(address.to(tl.pointer_type(tl.uint8)), first, last, False)
            return _join_fields(_join_fields(eight, 8), 16)
        else:
            eight = _load_eight(address.to(tl.pointer_type(tl.uint8)), first, last, True)
            eight = _join_fields(_join_fields(_join_fields(eight, 4), 8), 16)
            return tl.reshape(eight, (group.shape[0], group.shape[1]))


@triton.jit
def _load_eight(pointer, first, last, NIBBLES: tl.constexpr):
    """Elements `first` int32 [R, C] to first + 7, clamped to `last`, by single loads -> int32 [R, C, 8]."""
    # join appends an axis of 2: nested as 04|26 and 15|37 the flattened order is 0 to 7.
    e04 = tl.join(_load_one(pointer, first, last, NIBBLES), _load_one(pointer, first + 4, last, NIBBLES))
    e15 = tl.join(_load_one(pointer, first + 1, last, NIBBLES), _load_one(pointer, first + 5, last, NIBBLES))
    e26 = tl.join(_load_one(pointer, first + 2, last, NIBBLES), _load_one(pointer, first + 6, last, NIBBLES))
    e37 = tl.join(_load_one(pointer, first + 3, last, NIBBLES), _load_one(pointer, first + 7, last, NIBBLES))
    eight = tl.join(tl.join(e04, e26), tl.join(e15, e37))
    return tl.reshape(eight, (first.shape[0], first.shape[1], 8))


@triton.jit
def _load_one(pointer, element, last, NIBBLES: tl.constexpr):
    element = tl.minimum(element, last)
    if NIBBLES:
        byte = tl.load(without_contiguity(pointer + element // 2)).to(tl.int32)
        return (byte >> (element % 2 * 4)) & 15
    else:
        return tl.load(without_contiguity(pointer + element)).to(tl.int32)


@triton.jit
def store_words(address, group, limit, words, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """The inverse of `load_words`. Beyond the limit nothing is written, but for a 0 in a shared byte."""
    if ALIGNED:
        at = tl.minimum(group, limit // 8 - 1) * WORDS  # the addresses that the tile was read from
        inside = group < limit // 8
        pointer = address.to(tl.pointer_type(tl.int32))
        if WORDS == 1:
            tl.store(without_contiguity(pointer + at), words, inside)
        elif WORDS == 8:
            pointer = tl.multiple_of(pointer, 16)
            pointers = pointer + (at[:, :, None] + tl.arange(0, 4)[None, None, :])
            halves = tl.permute(tl.reshape(words, (group.shape[0], group.shape[1], 2, 4)), (0, 1, 3, 2))
            low, high = tl.split(halves)  # [R, C, 4] each
            tl.store(pointers, low, inside[:, :, None])
            tl.store(pointers + 4, high, inside[:, :, None])
        else:
            pointer = tl.multiple_of(pointer, 16 if WORDS > 2 else 8)
            tl.store(pointer + (at[:, :, None] + tl.arange(0, WORDS)[None, None, :]), words, inside[:, :, None])
    else:
        element = group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        if WORDS == 8:
            tl.store(address.to(tl.pointer_type(tl.int32)) + element, words, element < limit)
        elif WORDS == 4:
            halves = _split_fields(words, 16)  # [R, C, 8]
            tl.store(address.to(tl.pointer_type(tl.int16)) + element, halves.to(tl.int16), element < limit)
        elif WORDS == 2:
            bytes = _split_fields(_split_fields(words, 16), 8)
            tl.store(address.to(tl.pointer_type(tl.uint8)) + element, bytes.to(tl.uint8), element < limit)
        else:
            bytes = _split_fields(_split_fields(tl.reshape(words, (group.shape[0], group.shape[1], 1)), 16), 8)
            byte = group[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
            bytes = tl.where(byte * 2 + 1 < limit, bytes, bytes & 15)  # a row of odd length pads its last byte with 0
            tl.store(address.to(tl.pointer_type(tl.uint8)) + byte, bytes.to(tl.uint8), byte * 2 < limit)


@triton.jit
def _deinterleave(x):
    """[R, C, 2n] -> its even and its odd elements, [R, C, n] each."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))


@triton.jit
def _interleave(even, odd):
    """The inverse of `_deinterleave`."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], even.shape[1], even.shape[2] * 2))


@triton.jit
def _join_fields(x, BITS: tl.constexpr):
    """Neighbors of BITS bits, int32 [R, C, 2n], in one: [R, C, n]."""
    even, odd = _deinterleave(x)
    return even | (odd << BITS)


@triton.jit
def _split_fields(x, BITS: tl.constexpr):
    """The inverse of `_join_fields`; odd fields are sign-extended."""
    return _interleave(x & ((1 << BITS) - 1), x >> BITS)


@triton.jit
def _masked_float(words, MASK: tl.constexpr, PTX: tl.constexpr):
    """2**23 + (words & MASK) as fp32, MASK < 2**23: a conversion (I2F) would take four times as long."""
    if PTX:
        # lop3 by truth table 0xEA: (words & mask) | exponent, one instruction instead of two.
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, MASK, 0x4B000000],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = (words & MASK) | 0x4B000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def halves_to_float(words, PTX: tl.constexpr):
    """uint32 [R, C, 4] -> 2**23 + each half as an integer, fp32 [R, C, 8]."""
    if PTX:
        words = words.to(tl.int32, bitcast=True)
        # Bytes 0 and 1 (2 and 3) of the word below the exponent of 2**23: the half is the mantissa.
        low = select_bytes(words, 0x4B000000, "0x7610").to(tl.float32, bitcast=True)
        high = select_bytes(words, 0x4B000000, "0x7632").to(tl.float32, bitcast=True)
    else:
        low = ((words & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = ((words >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
    return _interleave(low, high)


@triton.jit
def to_unit(x, PTX: tl.constexpr):
    """x clamped to 0..1; NaN becomes 0."""
    if PTX:
        return tl.inline_asm_elementwise("cvt.sat.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    """1 / x for x from 0 to 2**126, within 2 ulp."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def bf16_to_float(words):
    """int32 [R, C, 4] -> fp32 [R, C, 8]."""
    # bf16 is the upper half of fp32: the first element of a word is shifted up, the second masked.
    low = (words << 16).to(tl.float32, bitcast=True)
    high = (words & -65536).to(tl.float32, bitcast=True)
    return _interleave(low, high)


@triton.jit
def _digit(words, PLACE: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """A field of BITS bits at bit PLACE (up to bit 22) as fp32, minus an offset. Instead of a shift, a product with a
    power of two, which one FMA does together with the subtraction."""
    shift: tl.constexpr = 1.0 / (1 << PLACE)
    field = _masked_float(words, ((1 << BITS) - 1) << PLACE, PTX)
    return field * shift - (8388608.0 * shift + OFFSET)


@triton.jit
def bytes_to_float(words, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """int32 [R, C, 2] -> the bytes minus an offset, fp32 [R, C, 8]."""
    # A field must lie below bit 23, in the mantissa: bytes 2 and 3 are shifted down, two fields by one shift.
    high = words >> 16
    first, third = _digit(words, 0, 8, OFFSET, PTX), _digit(high, 0, 8, OFFSET, PTX)
    second, fourth = _digit(words, 8, 8, OFFSET, PTX), _digit(high, 8, 8, OFFSET, PTX)
    # join appends an axis: (first, third), (second, fourth) flatten to the order of the bytes.
    four = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(four, (words.shape[0], words.shape[1], 8))


@triton.jit
def nibbles_to_float(words, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """int32 [R, C] -> the nibbles minus an offset, fp32 [R, C, 8]."""
    high = words >> 16
    # `high` has nibbles 4 to 7 at the places of 0 to 3: a field must lie below bit 23.
    n04 = tl.join(_digit(words, 0, 4, OFFSET, PTX), _digit(high, 0, 4, OFFSET, PTX))
    n15 = tl.join(_digit(words, 4, 4, OFFSET, PTX), _digit(high, 4, 4, OFFSET, PTX))
    n26 = tl.join(_digit(words, 8, 4, OFFSET, PTX), _digit(high, 8, 4, OFFSET, PTX))
    n37 = tl.join(_digit(words, 12, 4, OFFSET, PTX), _digit(high, 12, 4, OFFSET, PTX))
    eight = tl.join(tl.join(n04, n26), tl.join(n15, n37))
    return tl.reshape(eight, (words.shape[0], words.shape[1], 8))


@triton.jit
def select_bytes(a, b, BYTES: tl.constexpr):
    """prmt: four bytes of two int32 words, each a digit of BYTES from the lowest: 0-3 of a, 4-7 of b. PTX only."""
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, " + BYTES + ";"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pack_halves(x, PTX: tl.constexpr):
    """The high 16 bits of int32 [R, C, 8] -> int32 [R, C, 4]."""
    even, odd = _deinterleave(x)
    if PTX:
        return select_bytes(even, odd, "0x7632")
    return ((even >> 16) & 0xFFFF) | (odd & -65536)


@triton.jit
def pack_bytes(x, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """The bytes at bit SHIFT (0 or 16) of int32 [R, C, 4n] -> int32 [R, C, n]."""
    even, odd = _deinterleave(x)
    if PTX:
        # prmt twice: pairs of codes into halves, pairs of halves into words.
        first, third = _deinterleave(select_bytes(even, odd, "0x0040" if SHIFT == 0 else "0x0062"))
        return select_bytes(first, third, "0x5410")
    first, third = _deinterleave((even >> SHIFT) & 255)
    second, fourth = _deinterleave((odd >> SHIFT) & 255)
    return (first | (second << 8)) | ((third << 16) | (fourth << 24))


@triton.jit
def pack_nibbles(x, PTX: tl.constexpr):
    """The four bits from bit 16 of int32 [R, C, 8] -> int32 [R, C]."""
    even, odd = _deinterleave(x)
    odd = odd << 4
    if PTX:  # a bitwise select: the mask's bits of even, the others of odd
        both = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [even, odd, 0xF0000],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = (even & 0xF0000) | (odd & 0xF00000)
    words = pack_bytes(both, 16, PTX)
    return tl.reshape(words, (x.shape[0], x.shape[1]))


@triton.jit
def fp8_to_float(words, CODE: tl.constexpr):
    """int32 [R, C, 2] of e4m3 -> fp32 [R, C, 8]."""
    if CODE.fp8_cvt:
        # FP8 to fp16 two at a time, exactly, then to fp32: there is no instruction from FP8 to fp32.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b, c, d; .reg .b32 x, y;
                 mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
                 mov.b32 {a, b}, x; mov.b32 {c, d}, y;
                 cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }""",
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        four = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(four, (words.shape[0], words.shape[1], 8))
    else:
        high = words >> 16
        bytes = tl.join(tl.join(words, high), tl.join(words >> 8, high >> 8))
        bytes = tl.reshape(bytes, (words.shape[0], words.shape[1], 8))
        # e4m3's exponent and mantissa at fp32's places, its exponent 120 too small: bias 7 instead of 127.
        bits = ((bytes & 0x7F) << 20) | ((bytes & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True) * 2.0**120  # from fp32's exponents, subnormals included
        return tl.where((bytes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def pack_fp8(x, CODE: tl.constexpr):
    """fp32 [R, C, 8] -> int32 [R, C, 2] of e4m3, to nearest even, saturating; NaN is kept."""
    if CODE.fp8_cvt:
        even, odd = _deinterleave(x)
        # The first to the fourth of every four elements, [R, C, 2] each.
        first, third = _deinterleave(even)
        second, fourth = _deinterleave(odd)
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
                 mov.b32 $0, {a, b}; }""",
            "=r,f,f,f,f", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return pack_bytes(encode(x, 1.0, 0, False, True, CODE).to(tl.int32), 0, CODE.ptx)

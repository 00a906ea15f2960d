"""Parts of kernels that read and write optimizer states a tile at a time; `state_formats` defines what they do.

A tile is [R, C, 8] elements as `words` has them: a row is a block of the format, and a thread holds eight of its
elements and its scale.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.packed_words import (
    bf16_to_float,
    bytes_to_float,
    fp8_to_float,
    halves_to_float,
    load_words,
    nibbles_to_float,
    one_a_thread,
    pack_bytes,
    pack_fp8,
    pack_halves,
    pack_nibbles,
    store_words,
    to_unit,
)
from qtrain.kernels.numerics.philox import philox


@triton.jit
def _scale_pointers(address, group, block):
    """Pointers [R, C] to the scales of blocks int32 [R, 1], a number for each thread of a row."""
    return one_a_thread(address.to(tl.pointer_type(tl.float32)) + (block + tl.zeros_like(group)))


@triton.jit
def load_state(address, scale_address, group, block, limit, last_block, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of a state as it is stored: words, and scales fp32 [R, C] (0 without), for `decode_state`."""
    words = 0
    scale = 0.0
    if FORMAT != 0:
        WORDS: tl.constexpr = (0, 8, 4, 2, 2, 1)[FORMAT]
        words = load_words(address, group, limit, WORDS, ALIGNED)
    if FORMAT >= 3:
        scale = tl.load(_scale_pointers(scale_address, group, tl.minimum(block, last_block)))
    return words, scale


@triton.jit
def decode_state(words, scale, factor, FORMAT: tl.constexpr, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """What `load_state` read -> values fp32 [R, C, 8] times a factor. The definition is `dequantize_state`."""
    if FORMAT == 1:
        return words.to(tl.float32, bitcast=True) * factor
    elif FORMAT == 2:
        return bf16_to_float(words) * factor
    elif FORMAT == 3:
        c = fp8_to_float(words, PTX)
        scale = (scale * factor)[:, :, None]
        if SIGNED:
            return c * (scale * (1.0 / 448.0))
        else:
            c = c * (1.0 / 448.0)
            return tl.where(scale < 0.0, tl.sqrt(c), c) * tl.abs(scale)
    elif SIGNED:  # flipping the sign bit makes two's complement a number above 0
        if FORMAT == 4:
            c = bytes_to_float(words ^ -2139062144, 128.0, PTX)
            return c * tl.abs(c) * (scale * factor * (1.0 / 16129.0))[:, :, None]
        else:
            c = nibbles_to_float(words ^ -2004318072, 8.0, PTX)
            return c * tl.abs(c) * (scale * factor * (1.0 / 49.0))[:, :, None]
    elif FORMAT == 4:
        c = bytes_to_float(words, -1.0, PTX)
        square = c * c
        return square * square * (scale * factor * (1.0 / 4294967296.0))[:, :, None]
    else:
        c = nibbles_to_float(words, -1.0, PTX)
        return c * c * (scale * factor * (1.0 / 256.0))[:, :, None]


@triton.jit
def to_bf16_bits(x, bits):
    """fp32 -> int32 whose upper half is x rounded to bf16 with 16 random bits (int32) each. NaN is what a GPU makes of
    it, 0x7FFFFFFF, and must not overflow."""
    return tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFF0000) + bits


@triton.jit
def store_bf16(address, group, limit, x, bits, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):
    """A tile, fp32, is stored in bf16."""
    if STOCHASTIC:
        store_words(address, group, limit, pack_halves(to_bf16_bits(x, bits), PTX), 4, ALIGNED)
    else:
        element = group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        pointer = address.to(tl.pointer_type(tl.bfloat16))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
            element = tl.minimum(group, limit // 8 - 1)[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
            tl.store(pointer + element, x.to(tl.bfloat16), (group < limit // 8)[:, :, None])
        else:
            tl.store(pointer + element, x.to(tl.bfloat16), element < limit)


@triton.jit
def _over_block(x):
    """The largest of each block's numbers, none of which is negative: fp32 [R, C, 8] -> [R]."""
    of_thread = tl.max(x, 2).to(tl.int32, bitcast=True)
    return tl.max(of_thread, 1).to(tl.float32, bitcast=True)  # the GPU has one instruction for it in integers


@triton.jit
def store_state(
    x, root, bits, address, scale_address, group, block, limit, last_block,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A tile of a state, fp32 [R, C, 8], is encoded and stored; `root` is the square root of an unsigned one; bits:
    16 random ones each, int32, for a signed FORMAT 5 as `half_of_each` gives them in FLOAT. The definition is
    `quantize_state`.

    A float of a known exponent is a fixed-point number: adding 128 to one below 128 leaves 16 binary places at the low
    end of its bits, to which 16 random bits are added as an integer; what is above them is the code.
    """
    if FORMAT == 1:
        store_words(address, group, limit, x.to(tl.int32, bitcast=True), 8, ALIGNED)
    elif FORMAT == 2:
        store_bf16(address, group, limit, x, bits, STOCHASTIC, ALIGNED, PTX)
    else:
        absmax = _over_block(tl.abs(x))[:, None]
        inverse = tl.where(absmax > 1e-30, tl.rsqrt(tl.maximum(absmax, 1e-30)), 0.0)
        scale = absmax
        if FORMAT == 3:
            if SIGNED:
                y = x * (inverse * inverse * 448.0)[:, :, None]
            else:
                full = (block + 1) * (x.shape[1] * 8) <= limit  # a shorter block counts as having zeros
                low = tl.min(tl.min(x, 2).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
                squared = (low[:, None] > absmax * (1.0 / 256.0)) & full
                scale = tl.where(squared, -absmax, absmax)
                y = x * (inverse * inverse * tl.where(squared, 21.166010488516726, 448.0))[:, :, None]
                y = tl.maximum(tl.where(squared[:, :, None], y * y, y), 0.001953125)
                if STOCHASTIC:  # below the three bits of mantissa that stay, to whose last half it is rounded
                    raw = y.to(tl.int32, bitcast=True) + (bits << 4) - 524288
                    y = raw.to(tl.float32, bitcast=True)
            store_words(address, group, limit, pack_fp8(y, PTX), 2, ALIGNED)
        elif FORMAT == 4:
            if SIGNED:
                y = tl.sqrt(tl.abs(x) * (16129.0 * inverse * inverse)[:, :, None])
                code = (_with_sign(y, x) + 12582912.0).to(tl.int32, bitcast=True)  # rounded; the low bits
                store_words(address, group, limit, pack_bytes(code, 0, PTX), 2, ALIGNED)
            else:
                y = tl.sqrt(to_unit(root * inverse[:, :, None], PTX)) * 256.0 + 255.0  # 256 + code: 15 places
                y = tl.maximum(y, 256.0)
                if STOCHASTIC:
                    code = (y.to(tl.int32, bitcast=True) << 1) + bits
                    store_words(address, group, limit, pack_bytes(code, 16, PTX), 2, ALIGNED)
                else:
                    code = (y + 12582912.0).to(tl.int32, bitcast=True)
                    store_words(address, group, limit, pack_bytes(code, 0, PTX), 2, ALIGNED)
        else:
            if SIGNED:
                y = tl.abs(x * (inverse * inverse)[:, :, None])
                half = bits * (1.0 / 458752.0) - 18.357142857142858  # a random number less one half, over 7
                y = to_unit(y + (half * half - 0.25 / 49.0), PTX)
                y = _with_sign(tl.sqrt(y), x) * 7.0 + 144.0
                bits = bits.to(tl.int32, bitcast=True)  # the same below bit 24
            else:
                y = tl.maximum(root * (16.0 * inverse)[:, :, None] + 127.0, 128.0)
            code = y.to(tl.int32, bitcast=True) + bits
            store_words(address, group, limit, pack_nibbles(code, PTX), 1, ALIGNED)
        first = tl.arange(0, x.shape[1])[None, :] == 0
        pointer = _scale_pointers(scale_address, group, tl.minimum(block, last_block))
        scale = tl.broadcast_to(scale, (x.shape[0], x.shape[1]))
        tl.store(pointer, scale, first & (block <= last_block))


@triton.jit
def _with_sign(magnitude, x):
    """A number that is not negative, with x's sign."""
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def draw_each(element, seed, step, tensor, PTX: tl.constexpr):
    """element int64 [R, C, 8]: where the eight do not share a draw -> the word of each, uint32."""
    w0, w1, w2, w3 = philox(element >> 3, seed, step, tensor, PTX)
    pair = (element >> 1) & 3
    return tl.where(pair < 2, tl.where(pair == 0, w0, w1), tl.where(pair == 2, w2, w3))


@triton.jit
def half_of_each(words, element, MIX: tl.constexpr, SHARED: tl.constexpr, FLOAT: tl.constexpr, PTX: tl.constexpr):
    """The words of `philox_words` (SHARED) or `draw_each`, multiplied -> 16 random bits an element, int32 [R, C, 8], or
    FLOAT: 2**23 more than they, as fp32."""
    mixed = words if MIX == 1 else words * MIX
    if SHARED and FLOAT:
        return halves_to_float(mixed, PTX)
    elif SHARED:
        pairs = tl.join(mixed & 0xFFFF, mixed >> 16)
        return tl.reshape(pairs, (words.shape[0], words.shape[1], 8)).to(tl.int32)
    else:
        bits = tl.where((element & 1) == 1, mixed >> 16, mixed & 0xFFFF).to(tl.int32)
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) if FLOAT else bits

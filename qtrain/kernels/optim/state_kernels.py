"""Device functions that load, decode, encode and store optimizer states by tiles; `state_formats.py` defines them.

A tile is [R, C, 8] elements as in `numerics/packed_words.py`: a row is a block of the format, and a thread holds eight
of its elements and its scale. FORMAT is the name of the state's format, "" for a state that the rule does not have.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import abs_bf16x2, max_of_halves, reduce_max_bf16x2
from qtrain.kernels.numerics.packed_words import (
    bf16_to_float,
    bytes_to_float,
    fp8_to_float,
    halves_to_float,
    load_words,
    nibbles_to_float,
    pack_bytes,
    pack_fp8,
    pack_halves,
    pack_nibbles,
    store_words,
    to_unit,
    without_contiguity,
)
from qtrain.kernels.numerics.philox import philox


@triton.jit
def state_address(address, base, byte_base, FORMAT: tl.constexpr):
    """The address of element `base` of a state; byte_base: the byte of a row of 4-bit codes."""
    BYTES: tl.constexpr = 4 if FORMAT == "fp32" else 2 if FORMAT == "bf16" else 0 if FORMAT == "" else 1
    return address + (byte_base if FORMAT == "int4" else base * BYTES)


@triton.jit
def _scale_pointers(address, group, block):
    """Pointers [R, C] to the scales of blocks int32 [R, 1], one per thread of a row."""
    return without_contiguity(address.to(tl.pointer_type(tl.float32)) + (block + tl.zeros_like(group)))


@triton.jit
def load_state(address, scale_address, group, block, limit, last_block, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of a state as it is stored, for `decode_state`: words, and scales fp32 [R, C] (0 without)."""
    words = 0
    scale = 0.0
    if FORMAT != "":
        WORDS: tl.constexpr = 8 if FORMAT == "fp32" else 4 if FORMAT == "bf16" else 1 if FORMAT == "int4" else 2
        words = load_words(address, group, limit, WORDS, ALIGNED)
    if FORMAT == "fp8" or FORMAT == "int8" or FORMAT == "int4":
        # Blocks past the end of the row read the last one's scale: no mask, and in bounds.
        scale = tl.load(_scale_pointers(scale_address, group, tl.minimum(block, last_block)))
    return words, scale


@triton.jit
def decode_state(words, scale, factor, FORMAT: tl.constexpr, SIGNED: tl.constexpr, CODE: tl.constexpr):
    """What `load_state` returned -> values fp32 [R, C, 8] times a factor. The definition is `dequantize_state`."""
    if FORMAT == "":
        return 0.0
    elif FORMAT == "fp32":
        return words.to(tl.float32, bitcast=True) * factor
    elif FORMAT == "bf16":
        return bf16_to_float(words) * factor
    elif FORMAT == "fp8":
        c = fp8_to_float(words, CODE)  # a negated scale: the codes are squares
        scale = (scale * factor)[:, :, None]
        if SIGNED:
            return c * (scale * (1.0 / 448.0))
        else:
            c = c * (1.0 / 448.0)
            return tl.where(scale < 0.0, tl.sqrt(c), c) * tl.abs(scale)
    elif SIGNED:  # flipping the sign bit adds 128 (8) to two's complement
        if FORMAT == "int8":
            # A signed code is 127 times the root of |x| / scale, with x's sign; 127² = 16129.
            c = bytes_to_float(words ^ -2139062144, 128.0, CODE.ptx)
            return c * tl.abs(c) * (scale * factor * (1.0 / 16129.0))[:, :, None]
        else:
            c = nibbles_to_float(words ^ -2004318072, 8.0, CODE.ptx)
            return c * tl.abs(c) * (scale * factor * (1.0 / 49.0))[:, :, None]
    elif FORMAT == "int8":
        # Codes from 1 to 256 are stored less 1: 256 times the fourth root of x / scale; 256⁴ = 4294967296.
        c = bytes_to_float(words, -1.0, CODE.ptx)
        square = c * c
        return square * square * (scale * factor * (1.0 / 4294967296.0))[:, :, None]
    else:
        c = nibbles_to_float(words, -1.0, CODE.ptx)
        return c * c * (scale * factor * (1.0 / 256.0))[:, :, None]


@triton.jit
def _to_bf16_bits(x, bits):
    """fp32 -> int32 whose high half is x rounded to bf16 with 16 random bits (int32) each. The minimum keeps the NaN of
    GPU arithmetic, 0x7FFFFFFF, from overflowing."""
    return tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFF0000) + bits


@triton.jit
def store_bf16(address, group, limit, x, bits, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):
    """Stores a tile fp32 [R, C, 8] in bf16."""
    if STOCHASTIC:
        store_words(address, group, limit, pack_halves(_to_bf16_bits(x, bits), PTX), 4, ALIGNED)
    else:
        element = group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        pointer = address.to(tl.pointer_type(tl.bfloat16))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
            # Clamped as in `load_words`: masked lanes keep addresses in bounds.
            element = tl.minimum(group, limit // 8 - 1)[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
            tl.store(pointer + element, x.to(tl.bfloat16), (group < limit // 8)[:, :, None])
        else:
            tl.store(pointer + element, x.to(tl.bfloat16), element < limit)


@triton.jit
def tile_amax(x, bits, group, limit, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):
    """The absmax of each eight elements of a tile fp32 [R, C, 8], as bits of fp32 [R, C]: as `store_bf16` rounds them
    if STOCHASTIC, else as they are. Elements beyond the limit count as 0."""
    if not ALIGNED:
        element = group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        x = tl.where(element < limit, x, 0.0)
        if STOCHASTIC:
            bits = tl.where(element < limit, bits, 0)
    if STOCHASTIC:
        bf16x2 = abs_bf16x2(pack_halves(_to_bf16_bits(x, bits), PTX))  # the words that are stored
        amax = max_of_halves(reduce_max_bf16x2(bf16x2, 2, PTX))
    else:
        amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    return tl.where(group < limit // 8, amax, 0) if ALIGNED else amax


@triton.jit
def _block_max(x):
    """The maximum of each block of non-negative numbers: fp32 [R, C, 8] -> [R]."""
    thread_max = tl.max(x, 2).to(tl.int32, bitcast=True)
    return tl.max(thread_max, 1).to(tl.float32, bitcast=True)  # as integers: one redux instruction


@triton.jit
def store_state(
    x, root, bits, at, FORMAT: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    """Encodes and stores a tile of a state, fp32 [R, C, 8]. The definition is `quantize_state`.

    at: address and scale address, groups of eight int32 [R, C] and blocks int32 [R, 1] of the tile, the number of
    elements, the last block. root: the square root of an unsigned state. bits: 16 random bits per element, int32; those
    of a signed int4 state as `random_halves` returns them with FLOAT.

    A float of a known exponent is a fixed-point number: adding 128 to one below 128 leaves 16 fractional bits in its
    low bits, to which 16 random bits are added as an integer; the bits above are the code.
    """
    address, scale_address, group, block, limit, last_block = at
    if FORMAT == "fp32":
        store_words(address, group, limit, x.to(tl.int32, bitcast=True), 8, ALIGNED)
    elif FORMAT == "bf16":
        store_bf16(address, group, limit, x, bits, STOCHASTIC, ALIGNED, CODE.ptx)
    else:
        amax = _block_max(tl.abs(x))[:, None]  # [R, 1]: a block is a row of the tile, within one warp
        # 1 / sqrt(amax), one instruction; its square is 1 / amax. 0 for a block that counts as zero, or is NaN.
        inv_root = tl.where(amax > 1e-30, tl.rsqrt(tl.maximum(amax, 1e-30)), 0.0)
        scale = amax
        if FORMAT == "fp8":
            if SIGNED:
                y = x * (inv_root * inv_root * 448.0)[:, :, None]
            else:
                full = (block + 1) * (x.shape[1] * 8) <= limit  # a shorter block counts as padded with zeros
                low = tl.min(tl.min(x, 2).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
                # Where all of a block lies above 1/256 of its absmax, squares fill e4m3's range (`state_formats.py`).
                squared = (low[:, None] > amax * (1.0 / 256.0)) & full
                scale = tl.where(squared, -amax, amax)
                # 21.17 = sqrt(448): y * y below is 448 * (x / amax)².
                y = x * (inv_root * inv_root * tl.where(squared, 21.166010488516726, 448.0))[:, :, None]
                y = tl.maximum(tl.where(squared[:, :, None], y * y, y), 0.001953125)
                if STOCHASTIC:  # noise below the three mantissa bits that are kept, minus half a unit of the last
                    raw = y.to(tl.int32, bitcast=True) + (bits << 4) - 524288
                    y = raw.to(tl.float32, bitcast=True)
            store_words(address, group, limit, pack_fp8(y, CODE), 2, ALIGNED)
        elif FORMAT == "int8":
            if SIGNED:
                y = tl.sqrt(tl.abs(x) * (16129.0 * inv_root * inv_root)[:, :, None])
                code = (_copy_sign(y, x) + 12582912.0).to(tl.int32, bitcast=True)  # rounded, in the low bits
                store_words(address, group, limit, pack_bytes(code, 0, CODE.ptx), 2, ALIGNED)
            else:
                y = tl.sqrt(to_unit(root * inv_root[:, :, None], CODE.ptx)) * 256.0 + 255.0  # 256 + code: 15 bits
                y = tl.maximum(y, 256.0)
                if STOCHASTIC:
                    code = (y.to(tl.int32, bitcast=True) << 1) + bits
                    store_words(address, group, limit, pack_bytes(code, 16, CODE.ptx), 2, ALIGNED)
                else:
                    code = (y + 12582912.0).to(tl.int32, bitcast=True)
                    store_words(address, group, limit, pack_bytes(code, 0, CODE.ptx), 2, ALIGNED)
        else:
            if SIGNED:
                y = tl.abs(x * (inv_root * inv_root)[:, :, None])
                # Unbiased as a value, not as a root: `state_formats._encode` derives it. 458752 = 7 * 2**16.
                half = bits * (1.0 / 458752.0) - 18.357142857142858  # (u - 1 / 2) / 7 with u from 0 to 1
                y = to_unit(y + (half * half - 0.25 / 49.0), CODE.ptx)
                y = _copy_sign(tl.sqrt(y), x) * 7.0 + 144.0
                bits = bits.to(tl.int32, bitcast=True)  # the same below bit 24
            else:
                # 127 + code from 1 to 16, as a float from 128 to 256 with 16 fractional bits.
                y = tl.maximum(root * (16.0 * inv_root)[:, :, None] + 127.0, 128.0)
            code = y.to(tl.int32, bitcast=True) + bits
            store_words(address, group, limit, pack_nibbles(code, CODE.ptx), 1, ALIGNED)
        # One thread of a row stores its scale; all hold it, and the tensor of pointers keeps the layout of the words.
        first = tl.arange(0, x.shape[1])[None, :] == 0
        pointer = _scale_pointers(scale_address, group, tl.minimum(block, last_block))
        scale = tl.broadcast_to(scale, (x.shape[0], x.shape[1]))
        tl.store(pointer, scale, first & (block <= last_block))


@triton.jit
def _copy_sign(magnitude, x):
    """A non-negative number with x's sign."""
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def draw_unaligned(element, seed, step, tensor, PTX: tl.constexpr):
    """element int64 [R, C, 8]: where the eight do not share a draw -> the random word of each, uint32."""
    w0, w1, w2, w3 = philox(element >> 3, seed, step, tensor, PTX)
    word = (element >> 1) & 3
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def random_halves(rng_words, element, MIX: tl.constexpr, SHARED: tl.constexpr, FLOAT: tl.constexpr, PTX: tl.constexpr):
    """The words of `philox_words` (SHARED) or `draw_unaligned`, times MIX -> 16 random bits per element, int32
    [R, C, 8], or, with FLOAT, 2**23 + those bits as fp32."""
    mixed = rng_words if MIX == 1 else rng_words * MIX
    if SHARED and FLOAT:
        return halves_to_float(mixed, PTX)
    elif SHARED:
        halves = tl.join(mixed & 0xFFFF, mixed >> 16)
        return tl.reshape(halves, (rng_words.shape[0], rng_words.shape[1], 8)).to(tl.int32)
    else:
        bits = tl.where((element & 1) == 1, mixed >> 16, mixed & 0xFFFF).to(tl.int32)
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) if FLOAT else bits

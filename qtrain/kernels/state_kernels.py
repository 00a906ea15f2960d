"""Parts of kernels that read and write optimizer states a tile at a time; `state_formats` defines what they do.

A tile is [R, BLOCK] elements, a row of it a block of the format.
"""

from qtrain.kernels.compiler import tl, triton


@triton.jit
def pointer_to(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def unpack_nibbles(packed):
    """bytes int32 [R, C] -> nibbles [R, 2 * C], the low one first."""
    return tl.reshape(tl.join(packed & 15, packed >> 4), (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def pack_nibbles(nibbles):
    """nibbles int32 [R, 2 * C] -> bytes [R, C]."""
    halves = tl.split(tl.reshape(nibbles, (nibbles.shape[0], nibbles.shape[1] // 2, 2)))
    return (halves[0] | (halves[1] << 4)).to(tl.uint8)


@triton.jit
def bits_to_float(number):
    """2**23 + an integer from 0 to 2**16 - 1 (int32), as fp32, by its bits: conversions take four times as long."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def load_state(
    address, scale_address, base, byte_base, local, byte_local, mask, byte_mask, blocks, block_mask, factor,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of a state -> its values fp32 [R, BLOCK] times a factor. The definition is `dequantize_state`."""
    if FORMAT == 1:
        return tl.load(pointer_to(address, tl.float32, ALIGNED) + base + local, mask, 0.0) * factor
    elif FORMAT == 2:
        return tl.load(pointer_to(address, tl.bfloat16, ALIGNED) + base + local, mask, 0.0).to(tl.float32) * factor
    else:
        scale = tl.load(scale_address.to(tl.pointer_type(tl.float32)) + blocks, block_mask, 0.0) * factor
        if FORMAT == 5:
            packed = tl.load(pointer_to(address, tl.uint8, ALIGNED) + byte_base + byte_local, byte_mask, 0)
            byte = unpack_nibbles(packed.to(tl.int32))
        else:
            byte = tl.load(pointer_to(address, tl.uint8, ALIGNED) + base + local, mask, 0)
        if FORMAT == 3:
            c = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            if SIGNED:
                return c * (scale * (1.0 / 448.0))[:, None]
            else:
                c = c * (1.0 / 448.0)
                return tl.where(scale[:, None] < 0.0, tl.sqrt(c), c) * tl.abs(scale)[:, None]
        elif SIGNED:  # flipping the sign bit makes two's complement a number above 0
            half: tl.constexpr = 128 if FORMAT == 4 else 8
            most: tl.constexpr = 127 if FORMAT == 4 else 7
            c = bits_to_float(byte.to(tl.int32) ^ half) - (8388608.0 + half)
            return c * tl.abs(c) * (scale * (1.0 / (most * most)))[:, None]
        else:
            c = bits_to_float(byte.to(tl.int32)) - 8388607.0
            square = c * c
            if FORMAT == 4:
                return square * square * (scale * (1.0 / 4294967296.0))[:, None]
            else:
                return square * (scale * (1.0 / 256.0))[:, None]


@triton.jit
def to_bf16(x, bits, STOCHASTIC: tl.constexpr):
    """fp32 -> bf16; bits int32: 16 random ones each."""
    if STOCHASTIC:
        raw = x.to(tl.int32, bitcast=True) + tl.where(x == x, bits, 0)
        return (raw >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _inverse_root(absmax):
    """1 / sqrt(absmax), and 0 for a block that counts as zero."""
    return tl.where(absmax > 1e-30, tl.rsqrt(tl.maximum(absmax, 1e-30)), 0.0)


@triton.jit
def store_state(
    x, root, bits, address, scale_address, base, byte_base, local, byte_local, mask, byte_mask, blocks, block_mask,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of a state, fp32, is encoded and stored; `root` is the square root of an unsigned one. The definition is
    `quantize_state`. What lies outside of the mask is zero, or so small that no absmax notices, and its code is 0.

    Adding 1.5 * 2**23 rounds to the nearest integer, which is then the low bits of the sum.
    """
    if FORMAT == 1:
        tl.store(pointer_to(address, tl.float32, ALIGNED) + base + local, x, mask)
    elif FORMAT == 2:
        tl.store(pointer_to(address, tl.bfloat16, ALIGNED) + base + local, to_bf16(x, bits, STOCHASTIC), mask)
    else:
        absmax = tl.max(tl.abs(x), 1)
        inverse = _inverse_root(absmax)
        scale = absmax
        if FORMAT == 3:
            y = x * (inverse * inverse)[:, None]
            if SIGNED:
                y = y * 448.0
            else:
                squared = tl.min(x, 1) > absmax * (1.0 / 256.0)
                scale = tl.where(squared, -absmax, absmax)
                y = tl.maximum(tl.where(squared[:, None], y * y, y) * 448.0, 0.001953125)
                if STOCHASTIC:  # below the three bits of mantissa that stay
                    raw = (y.to(tl.int32, bitcast=True) + (bits << 4)) & -1048576
                    y = tl.minimum(raw.to(tl.float32, bitcast=True), 448.0)
            tl.store(
                pointer_to(address, tl.uint8, ALIGNED) + base + local,
                y.to(tl.float8e4nv).to(tl.uint8, bitcast=True),
                mask,
            )
        else:
            if STOCHASTIC:
                uniform = bits_to_float(bits) * (1.0 / 65536.0)  # 128 and a number in [0, 1)
            if SIGNED:
                most: tl.constexpr = 127.0 if FORMAT == 4 else 7.0
                y = tl.sqrt(tl.abs(x) * (most * most * inverse * inverse)[:, None])
                if STOCHASTIC:  # right on average as a value: between the squares of two codes
                    y = tl.minimum(y, most)
                    low = ((y - 0.5) + 12582912.0) - 12582912.0
                    up = (uniform - 127.99999) * (2.0 * low + 1.0) < y * y - low * low
                    y = tl.where(up, low + 1.0, low)
                sign = x.to(tl.int32, bitcast=True) & -2147483648
                number = (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
                code = (number + 12582912.0).to(tl.int32, bitcast=True)
            else:
                most: tl.constexpr = 256.0 if FORMAT == 4 else 16.0
                if FORMAT == 4:
                    y = tl.sqrt(root * (most * most * inverse)[:, None])
                else:
                    y = root * (most * inverse)[:, None]
                if STOCHASTIC:  # right on average as a root
                    y = uniform + (y - 128.49999)
                number = tl.minimum(tl.maximum(y, 1.0), most)
                code = (number + 12582911.0).to(tl.int32, bitcast=True)
            if FORMAT == 4:
                tl.store(pointer_to(address, tl.uint8, ALIGNED) + base + local, code.to(tl.uint8), mask)
            else:
                packed = pack_nibbles(code & 15)
                tl.store(pointer_to(address, tl.uint8, ALIGNED) + byte_base + byte_local, packed, byte_mask)
        tl.store(scale_address.to(tl.pointer_type(tl.float32)) + blocks, scale, block_mask)


@triton.jit
def element_bits(element, key_ptr, role, N_ROLES: tl.constexpr):
    """element int64 [R, C] -> 16 random bits, as `random_bits_ref`'s, where a draw's elements are not side by side."""
    tensor = (tl.load(key_ptr + 2) * N_ROLES + role).to(tl.uint32)
    block = element >> 3
    w0, w1, w2, w3 = tl.philox(
        tl.load(key_ptr),
        block.to(tl.uint32),
        (block >> 32).to(tl.uint32),
        tensor,
        tl.load(key_ptr + 1).to(tl.uint32),
        7,
    )
    place = (element & 7).to(tl.int32)
    word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    return tl.where((place & 1) == 1, word >> 16, word & 0xFFFF)

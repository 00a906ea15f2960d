"""The kernels of `fused_update`: one works out every tensor's factors, the other updates elements."""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.philox import philox_bits
from qtrain.kernels.state_kernels import (
    bits_to_float,
    element_bits,
    load_state,
    pack_nibbles,
    pointer_to,
    store_state,
    to_bf16,
    unpack_nibbles,
)


@triton.jit
def factors_kernel(
    table_ptr, grads_ptr, hyper_ptr, scale_ptr, steps_ptr, keys_ptr, factors_ptr, n,
    RULE: tl.constexpr, HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the step of every tensor that has a gradient, and work out what its elements are multiplied with."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    grad = tl.load(grads_ptr + i, inside, 0)
    active = inside & (grad != 0)
    step = tl.load(steps_ptr + i, inside, 0.0) + 1.0
    tl.store(steps_ptr + i, step, active)
    tl.store(keys_ptr + i * 3 + 1, step.to(tl.int64), active)
    row = hyper_ptr + tl.load(table_ptr + i * COLUMNS + 10, inside, 0) * 5
    lr = tl.load(row, inside, 0.0)  # fp64, and all below: 1 - beta**step would lose half its digits in fp32
    decay = tl.load(row + 1, inside, 0.0)
    beta1 = tl.load(row + 2, inside, 0.0)
    beta2 = tl.load(row + 3, inside, 0.0)
    eps = tl.load(row + 4, inside, 0.0)
    scale = lr * 0.0 + 1.0
    if HAS_SCALE:
        scale = lr * 0.0 + tl.load(scale_ptr).to(tl.float64)
    size = lr
    correction = lr * 0.0 + 1.0
    own1 = scale
    own2 = scale
    if RULE == 0:
        power1 = lr * 0.0 + 1.0
        power2 = lr * 0.0 + 1.0
        square1 = beta1
        square2 = beta2
        left = step.to(tl.int32)
        for _ in range(24):  # fp32 counts no further
            odd = (left & 1) == 1
            power1 = tl.where(odd, power1 * square1, power1)
            power2 = tl.where(odd, power2 * square2, power2)
            square1 = square1 * square1
            square2 = square2 * square2
            left = left >> 1
        size = lr / (1.0 - power1)
        correction = 1.0 / tl.sqrt(1.0 - power2)
        own1 = scale * (1.0 - beta1)
        own2 = scale * scale * (1.0 - beta2)
    if RULE == 1:
        own1 = scale * (1.0 - beta1)
        own2 = scale * (1.0 - beta2)
    out = factors_ptr + i * 8
    tl.store(out, (1.0 - lr * decay).to(tl.float32), inside)
    tl.store(out + 1, size.to(tl.float32), inside)
    tl.store(out + 2, correction.to(tl.float32), inside)
    tl.store(out + 3, eps.to(tl.float32), inside)
    tl.store(out + 4, beta1.to(tl.float32), inside)
    tl.store(out + 5, own1.to(tl.float32), inside)
    tl.store(out + 6, beta2.to(tl.float32), inside)
    tl.store(out + 7, own2.to(tl.float32), inside)


@triton.jit
def update_kernel(
    owner_ptr, table_ptr, grads_ptr, factors_ptr, keys_ptr, role,
    RULE: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    SR_WEIGHT: tl.constexpr, SR_M: tl.constexpr, SR_V: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, LOOPS: tl.constexpr, COLUMNS: tl.constexpr, N_ROLES: tl.constexpr,
    MIX_M: tl.constexpr, MIX_V: tl.constexpr,
):  # fmt: skip
    """A program updates up to LOOPS tiles of [TILE // BLOCK, BLOCK] elements, all of one row of one tensor."""
    pid = tl.program_id(0)
    owner = tl.load(owner_ptr + pid).to(tl.int64)
    row_ptr = table_ptr + owner * COLUMNS
    grad_address = tl.load(grads_ptr + owner)
    if grad_address == 0:
        return
    weight_address = tl.load(row_ptr)
    m_address = tl.load(row_ptr + 1)
    m_scale_address = tl.load(row_ptr + 2)
    v_address = tl.load(row_ptr + 3)
    v_scale_address = tl.load(row_ptr + 4)
    extra_address = tl.load(row_ptr + 5)
    row_length = tl.load(row_ptr + 6)
    chunks = tl.load(row_ptr + 7)
    inside = pid - tl.load(row_ptr + 8)
    first_element = tl.load(row_ptr + 9)
    f = factors_ptr + owner * 8
    decay = tl.load(f)
    size = tl.load(f + 1)
    correction = tl.load(f + 2)
    eps = tl.load(f + 3)
    beta1 = tl.load(f + 4)
    own1 = tl.load(f + 5)
    beta2 = tl.load(f + 6)
    own2 = tl.load(f + 7)

    row32 = inside.to(tl.int32) // chunks.to(tl.int32)
    start = (inside - row32 * chunks) * (TILE * LOOPS)  # in the row
    row = row32.to(tl.int64)
    limit = tl.minimum(row_length - start, TILE * LOOPS).to(tl.int32)
    base = row * row_length + start
    byte_base = row * ((row_length + 1) // 2) + start // 2
    block_base = row * ((row_length + BLOCK - 1) // BLOCK) + start // BLOCK
    group_base = row * ((row_length + 127) // 128) + start // 128
    byte_limit = (limit + 1) // 2
    if ALIGNED:
        limit = tl.multiple_of(limit, 16)
        byte_limit = tl.multiple_of(byte_limit, 8)
        base = tl.multiple_of(base, 16)
        byte_base = tl.multiple_of(byte_base, 8)
    ROWS: tl.constexpr = TILE // BLOCK
    for i in range(0, (limit + TILE - 1) // TILE):
        block = i * ROWS + tl.arange(0, ROWS)
        local = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        byte_local = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        mask = local < limit
        byte_mask = byte_local < byte_limit
        blocks = block_base + block
        block_mask = block * BLOCK < limit

        g = tl.load(pointer_to(grad_address, GRAD, ALIGNED) + base + local, mask, 0.0).to(tl.float32)
        if WEIGHT == 0:
            p = tl.load(pointer_to(weight_address, tl.float32, ALIGNED) + base + local, mask, 0.0)
        elif WEIGHT == 1:
            p = tl.load(pointer_to(weight_address, tl.bfloat16, ALIGNED) + base + local, mask, 0.0).to(tl.float32)
        elif WEIGHT == 2:
            p = tl.load(pointer_to(extra_address, tl.float32, ALIGNED) + base + local, mask, 0.0)
        elif WEIGHT == 3:
            code = tl.load(pointer_to(weight_address, tl.int8, ALIGNED) + base + local, mask, 0)
            p = code.to(tl.float32) * tl.load(extra_address.to(tl.pointer_type(tl.float32)) + row)
        else:
            packed = tl.load(pointer_to(weight_address, tl.uint8, ALIGNED) + byte_base + byte_local, byte_mask, 0)
            group = tl.load(extra_address.to(tl.pointer_type(tl.float32)) + group_base + local // 128, mask, 0.0)
            p = (bits_to_float(unpack_nibbles(packed.to(tl.int32)) ^ 8) - 8388616.0) * group

        bits = 0
        if SR_WEIGHT or SR_M or SR_V or WEIGHT >= 3:
            if ALIGNED:
                draws = tl.arange(0, BLOCK // 8)[None, :] + block[:, None] * (BLOCK // 8)
                bits = philox_bits((first_element + base) // 8 + draws, keys_ptr + owner * 3, role, N_ROLES)
            else:
                bits = element_bits(first_element + base + local, keys_ptr + owner * 3, role, N_ROLES)
            bits = bits.to(tl.int32)

        root = 0.0
        if M != 0:
            m = load_state(  # lion needs it with two factors
                m_address, m_scale_address, base, byte_base, local, byte_local, mask, byte_mask, blocks, block_mask,
                1.0 if RULE == 1 else beta1, M, True, ALIGNED,
            )  # fmt: skip
        if RULE == 0:
            v = load_state(
                v_address, v_scale_address, base, byte_base, local, byte_local, mask, byte_mask, blocks, block_mask,
                beta2, V, False, ALIGNED,
            )  # fmt: skip
            m = m + g * own1
            v = v + g * g * own2
            root = tl.sqrt(v)
            inverse = tl.rsqrt(root * correction + eps)  # its square is the reciprocal, at a third of a division's cost
            u = m * inverse * inverse
            store_state(
                v, root, (bits * MIX_V) & 0xFFFF, v_address, v_scale_address, base, byte_base, local, byte_local,
                mask, byte_mask, blocks, block_mask, V, False, SR_V, ALIGNED,
            )  # fmt: skip
        elif RULE == 1:
            c = m * beta1 + g * own1
            u = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))
            m = m * beta2 + g * own2
        elif RULE == 4:
            u = g * own1
        else:
            m = m + g * own1
            u = m
            if RULE == 3:
                u = m * beta1 + g * own1
        if M != 0:
            store_state(
                m, root, (bits * MIX_M) & 0xFFFF, m_address, m_scale_address, base, byte_base, local, byte_local,
                mask, byte_mask, blocks, block_mask, M, True, SR_M, ALIGNED,
            )  # fmt: skip

        p = p * decay - u * size
        if WEIGHT == 0:
            tl.store(pointer_to(weight_address, tl.float32, ALIGNED) + base + local, p, mask)
        elif WEIGHT <= 2:
            if WEIGHT == 2:
                tl.store(pointer_to(extra_address, tl.float32, ALIGNED) + base + local, p, mask)
            tl.store(pointer_to(weight_address, tl.bfloat16, ALIGNED) + base + local, to_bf16(p, bits, SR_WEIGHT), mask)
        else:
            p = tl.where(mask, p, 0.0)
            noise = (bits.to(tl.float32) + 0.5) * (1.0 / 65536.0)
            if WEIGHT == 3:  # the tile is the whole row
                absmax = tl.max(tl.max(tl.abs(p), 1), 0)
                scale = tl.maximum(absmax * (1.0 / 127.0), 1e-12)
                code = tl.minimum(tl.maximum(tl.floor(p * tl.div_rn(1.0, scale) + noise), -127.0), 127.0)
                tl.store(pointer_to(weight_address, tl.int8, ALIGNED) + base + local, code.to(tl.int8), mask)
                tl.store(extra_address.to(tl.pointer_type(tl.float32)) + row, scale)
            else:  # groups of 128 elements
                groups = tl.reshape(p, (TILE // 128, 128))
                scale = tl.maximum(tl.max(tl.abs(groups), 1) * (1.0 / 7.0), 1e-12)
                scaled = tl.reshape(groups * tl.div_rn(1.0, scale)[:, None], (ROWS, BLOCK))
                code = tl.minimum(tl.maximum(tl.floor(scaled + noise), -7.0), 7.0)
                nibble = (code + 12582912.0).to(tl.int32, bitcast=True) & 15
                tl.store(
                    pointer_to(weight_address, tl.uint8, ALIGNED) + byte_base + byte_local,
                    pack_nibbles(tl.where(mask, nibble, 0)),
                    byte_mask,
                )
                number = i * (TILE // 128) + tl.arange(0, TILE // 128)
                tl.store(
                    extra_address.to(tl.pointer_type(tl.float32)) + group_base + number, scale, number * 128 < limit
                )

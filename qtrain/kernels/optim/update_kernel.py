"""The kernels of `fused_update`: one works out every tensor's factors, the other updates elements."""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.packed_words import (
    bf16_to_float,
    bytes_to_float,
    load_words,
    nibbles_to_float,
    one_a_thread,
    pack_bytes,
    pack_nibbles,
    reciprocal,
    store_words,
)
from qtrain.kernels.numerics.philox import philox_key, philox_words
from qtrain.kernels.optim.state_kernels import (
    decode_state,
    draw_each,
    half_of_each,
    load_state,
    store_bf16,
    store_state,
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
    MIX_M: tl.constexpr, MIX_V: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A program updates up to LOOPS tiles of [TILE // BLOCK, BLOCK // 8, 8] elements, all of one row of one tensor.

    With a thread for every eight elements, a block of 256 lies in one warp, and the only step that leaves a thread is
    the maximum over a block. Nothing is read ahead: other programs work while one waits. Which product a sum is rounded
    with is said here (fma), not left to the compiler: a tensor has the same result however it is cut and aligned.
    """
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
    block_base = (row * ((row_length + BLOCK - 1) // BLOCK) + start // BLOCK) * 4
    last_block = (limit - 1) // BLOCK
    G_WORDS: tl.constexpr = 8 if GRAD == 1 else 4
    grad_address += base * (G_WORDS // 2)
    m_address += byte_base if M == 5 else base * (0, 4, 2, 1, 1, 0)[M]
    v_address += byte_base if V == 5 else base * (0, 4, 2, 1, 1, 0)[V]
    m_scale_address += block_base
    v_scale_address += block_base
    P_WORDS: tl.constexpr = (8, 4, 8, 2, 1)[WEIGHT]
    p_address = extra_address if WEIGHT == 2 else weight_address
    p_address += byte_base if WEIGHT == 4 else base * (P_WORDS // 2)
    if WEIGHT == 2:
        weight_address += base * 2
    scales = extra_address.to(tl.pointer_type(tl.float32))  # of a stored weight
    if WEIGHT == 3:
        scales += row
    if WEIGHT == 4:
        scales += row * ((row_length + 127) // 128) + start // 128
    seed, step, tensor = philox_key(keys_ptr + owner * 3, role, N_ROLES)

    ROWS: tl.constexpr = TILE // BLOCK
    for i in range(0, (limit + TILE - 1) // TILE):
        block = i * ROWS + tl.arange(0, ROWS)[:, None]
        group = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
        g_words = load_words(grad_address, group, limit, G_WORDS, ALIGNED)
        p_words = load_words(p_address, group, limit, P_WORDS, ALIGNED)
        m_words, m_scale = load_state(m_address, m_scale_address, group, block, limit, last_block, M, ALIGNED)
        v_words, v_scale = load_state(v_address, v_scale_address, group, block, limit, last_block, V, ALIGNED)

        element = group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        number = first_element + base + element
        g = g_words.to(tl.float32, bitcast=True) if GRAD == 1 else bf16_to_float(g_words)
        if WEIGHT == 0 or WEIGHT == 2:
            p = p_words.to(tl.float32, bitcast=True)
        elif WEIGHT == 1:
            p = bf16_to_float(p_words)
        elif WEIGHT == 3:
            p = bytes_to_float(p_words ^ -2139062144, 128.0, PTX) * tl.load(scales)
        else:
            p = nibbles_to_float(p_words ^ -2004318072, 8.0, PTX)
            p *= tl.load(one_a_thread(scales + tl.minimum(group, (limit - 1) // 8) // 16))[:, :, None]

        if M != 0:  # lion needs it with two factors
            m = decode_state(m_words, m_scale, 1.0 if RULE == 1 else beta1, M, True, PTX)
        if V != 0:
            v = decode_state(v_words, v_scale, beta2, V, False, PTX)

        random = 0
        if SR_WEIGHT or SR_M or SR_V or WEIGHT >= 3:
            if ALIGNED:
                random = philox_words((first_element + base) // 8 + group, seed, step, tensor, PTX)
            else:
                random = draw_each(number, seed, step, tensor, PTX)

        root = 0.0
        bits = 0
        if RULE == 0:
            m = tl.fma(g, own1, m)
            v = tl.fma(g * g, own2, v)
            root = tl.sqrt(v)
            u = m * reciprocal(tl.fma(root, correction, eps), PTX)
            if SR_V:
                bits = half_of_each(random, number, MIX_V, ALIGNED, False, PTX)
            store_state(
                v, root, bits, v_address, v_scale_address, group, block, limit, last_block, V, False, SR_V, ALIGNED, PTX
            )
        elif RULE == 1:
            c = tl.fma(g, own1, m * beta1)
            u = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))
            m = tl.fma(g, own2, m * beta2)
        elif RULE == 4:
            u = g * own1
        else:
            m = tl.fma(g, own1, m)
            u = m
            if RULE == 3:
                u = tl.fma(m, beta1, g * own1)
        if M != 0:
            if SR_M:
                bits = half_of_each(random, number, MIX_M, ALIGNED, M == 5, PTX)
            store_state(
                m, root, bits, m_address, m_scale_address, group, block, limit, last_block, M, True, SR_M, ALIGNED, PTX
            )

        p = tl.fma(p, decay, -(u * size))
        if SR_WEIGHT or WEIGHT >= 3:
            bits = half_of_each(random, number, 1, ALIGNED, False, PTX)
        if WEIGHT == 0 or WEIGHT == 2:
            store_words(p_address, group, limit, p.to(tl.int32, bitcast=True), 8, ALIGNED)
        if WEIGHT == 1 or WEIGHT == 2:
            store_bf16(weight_address if WEIGHT == 2 else p_address, group, limit, p, bits, SR_WEIGHT, ALIGNED, PTX)
        if WEIGHT >= 3:
            noise = (bits.to(tl.float32) + 0.5) * (1.0 / 65536.0)
            if WEIGHT == 3:  # the tile is the whole row
                scale = tl.maximum(tl.max(tl.max(tl.max(tl.abs(p), 2), 1), 0) * (1.0 / 127.0), 1e-12)
                code = tl.minimum(tl.maximum(tl.floor(p * tl.div_rn(1.0, scale) + noise), -127.0), 127.0)
                code = (code + 12582912.0).to(tl.int32, bitcast=True)
                store_words(p_address, group, limit, pack_bytes(code, 0, PTX), 2, ALIGNED)
                tl.store(scales, scale)
            else:  # groups of 128 elements
                groups = tl.reshape(p, (TILE // 128, 16, 8))
                scale = tl.maximum(tl.max(tl.max(tl.abs(groups), 2), 1) * (1.0 / 7.0), 1e-12)[:, None]
                scaled = tl.reshape(groups * tl.div_rn(1.0, scale)[:, :, None], (ROWS, BLOCK // 8, 8))
                code = tl.minimum(tl.maximum(tl.floor(scaled + noise), -7.0), 7.0)
                nibbles = pack_nibbles((code + 12582912.0).to(tl.int32, bitcast=True) << 16, PTX)
                store_words(p_address, group, limit, nibbles, 1, ALIGNED)
                lane = tl.arange(0, 16)[None, :]
                place = i * (TILE // 128) + tl.arange(0, TILE // 128)[:, None] + lane * 0
                scale = tl.broadcast_to(scale, (TILE // 128, 16))
                tl.store(one_a_thread(scales + place), scale, (lane == 0) & (place * 128 < limit))

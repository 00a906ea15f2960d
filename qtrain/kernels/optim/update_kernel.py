"""The kernels of `fused_update.py`: one computes every tensor's factors, the other updates elements.

RULE is a name of `update_rules.SIGNED_STATES`; WEIGHT is "fp32", "bf16", "bf16 and master", or "int8" or "int4" for a
weight stored as codes; GRAD is "fp32" or "bf16"; M and V are formats of states as in `state_kernels.py`.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import bf16_bits
from qtrain.kernels.numerics.packed_words import (
    bf16_to_float,
    bytes_to_float,
    load_words,
    nibbles_to_float,
    pack_bytes,
    pack_nibbles,
    reciprocal,
    store_words,
    without_contiguity,
)
from qtrain.kernels.numerics.philox import philox_key, philox_words
from qtrain.kernels.optim.state_kernels import (
    decode_state,
    draw_unaligned,
    load_state,
    random_halves,
    state_address,
    store_bf16,
    store_state,
    tile_amax,
)

TABLE = (
    "weight", "m", "m_scale", "v", "v_scale", "extra", "row_length", "chunks", "first_cta", "first_element", "group",
    "amax",
)  # fmt: skip
"""Columns of the table of tensors, int64, in the order in which the kernels load them: addresses, then sizes. extra:
scales of a weight stored as codes, or its master copy. amax: the address that receives the weight's absmax, or 0."""
COLUMNS = tl.constexpr(len(TABLE))


@triton.jit
def factors_kernel(
    # int64 [n, COLUMNS] (`TABLE`); int64 [n], addresses of the gradients, 0 for a tensor without one.
    table_ptr, grads_ptr,
    # fp64 [groups, 5] (`update_rules.HYPER`); scale of the gradients, any float dtype, or None; not finite: no
    # update.
    hyper_ptr, scale_ptr,
    # fp32 [n]; int64 [n, 3] (seed, step, tensor number); fp32 [n, 8].
    steps_ptr, keys_ptr, factors_ptr, n,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Increments the step of every tensor that has a gradient, zeroes its absmax, and computes the factors of its
    update. One thread per tensor: the elements' kernel reads eight numbers, and no hyperparameter recompiles it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    grad = tl.load(grads_ptr + i, inside, 0)
    row = hyper_ptr + tl.load(table_ptr + i * COLUMNS + 10, inside, 0) * 5
    lr = tl.load(row, inside, 0.0)  # fp64, and all below: 1 - beta**step would lose half its digits in fp32
    # lr * 0 + 1: an fp64 tensor like lr, for a variable keeps the type of its first value.
    scale = lr * 0.0 + 1.0
    if scale_ptr is not None:
        scale = lr * 0.0 + tl.load(scale_ptr).to(tl.float64)
    active = inside & (grad != 0) & (scale - scale == 0.0)
    step = tl.load(steps_ptr + i, inside, 0.0) + 1.0
    tl.store(steps_ptr + i, step, active)
    tl.store(keys_ptr + i * 3 + 1, step.to(tl.int64), active)  # the step of its Philox key
    amax_address = tl.load(table_ptr + i * COLUMNS + 11, inside, 0)
    tl.store(amax_address.to(tl.pointer_type(tl.int32)), 0, active & (amax_address != 0))
    decay = tl.load(row + 1, inside, 0.0)
    beta1 = tl.load(row + 2, inside, 0.0)
    beta2 = tl.load(row + 3, inside, 0.0)
    eps = tl.load(row + 4, inside, 0.0)
    step_size = lr
    correction = lr * 0.0 + 1.0
    grad_factor1 = scale
    grad_factor2 = scale
    if RULE == "adamw":
        power1 = lr * 0.0 + 1.0  # beta**step by squaring
        power2 = lr * 0.0 + 1.0
        square1 = beta1
        square2 = beta2
        remaining = step.to(tl.int32)
        for _ in range(24):  # an fp32 step counts to 2**24
            odd = (remaining & 1) == 1
            power1 = tl.where(odd, power1 * square1, power1)
            power2 = tl.where(odd, power2 * square2, power2)
            square1 = square1 * square1
            square2 = square2 * square2
            remaining = remaining >> 1
        step_size = lr / (1.0 - power1)
        correction = 1.0 / tl.sqrt(1.0 - power2)
        # Of g and of g²: clipping scales the gradient before it is squared.
        grad_factor1 = scale * (1.0 - beta1)
        grad_factor2 = scale * scale * (1.0 - beta2)
    if RULE == "lion":
        grad_factor1 = scale * (1.0 - beta1)
        grad_factor2 = scale * (1.0 - beta2)
    out = factors_ptr + i * 8
    # The elements' kernel sees by a NaN here that there is no update.
    tl.store(out, ((1.0 - lr * decay) + (scale - scale)).to(tl.float32), inside)
    tl.store(out + 1, step_size.to(tl.float32), inside)
    tl.store(out + 2, correction.to(tl.float32), inside)
    tl.store(out + 3, eps.to(tl.float32), inside)
    tl.store(out + 4, beta1.to(tl.float32), inside)
    tl.store(out + 5, grad_factor1.to(tl.float32), inside)
    tl.store(out + 6, beta2.to(tl.float32), inside)
    tl.store(out + 7, grad_factor2.to(tl.float32), inside)


@triton.jit
def _decode_weight(words, scales, group, limit, WEIGHT: tl.constexpr, PTX: tl.constexpr):
    """Words of a weight, or of its master copy -> fp32 [R, C, 8]."""
    if WEIGHT == "bf16":
        return bf16_to_float(words)
    elif WEIGHT == "int8":
        # 0x80808080 flips the sign bits: two's complement becomes code + 128, which needs no sign extension.
        return bytes_to_float(words ^ -2139062144, 128.0, PTX) * tl.load(scales)
    elif WEIGHT == "int4":
        p = nibbles_to_float(words ^ -2004318072, 8.0, PTX)  # 0x88888888: code + 8
        # 16 groups of eight share a scale; past the end of the row the last scale is read.
        p *= tl.load(without_contiguity(scales + tl.minimum(group, (limit - 1) // 8) // 16))[:, :, None]
        return p
    else:
        return words.to(tl.float32, bitcast=True)


@triton.jit
def _store_int8_weight(p, noise, address, scales, group, limit, ALIGNED: tl.constexpr, PTX: tl.constexpr):
    """A tile that is a whole row, with one scale."""
    # floor(p / scale + noise), noise from 0 to 1: stochastic rounding, as `quantize_ref` at rowwise.
    scale = tl.maximum(tl.max(tl.max(tl.max(tl.abs(p), 2), 1), 0) * (1.0 / 127.0), 1e-12)
    code = tl.minimum(tl.maximum(tl.floor(p * tl.div_rn(1.0, scale) + noise), -127.0), 127.0)
    # 1.5 * 2**23: an integer added to it stands in the low bits, in two's complement.
    code = (code + 12582912.0).to(tl.int32, bitcast=True)
    store_words(address, group, limit, pack_bytes(code, 0, PTX), 2, ALIGNED)
    tl.store(scales, scale)


@triton.jit
def _store_int4_weight(p, noise, address, scales, group, limit, tile, ALIGNED: tl.constexpr, PTX: tl.constexpr):
    """Tile number `tile` of a row, with one scale per 128 elements."""
    # 16 threads of eight elements share a scale; the tile is regrouped so that a reduction is over whole axes.
    GROUPS: tl.constexpr = p.shape[0] * p.shape[1] // 16
    by_group = tl.reshape(p, (GROUPS, 16, 8))
    scale = tl.maximum(tl.max(tl.max(tl.abs(by_group), 2), 1) * (1.0 / 7.0), 1e-12)[:, None]
    scaled = tl.reshape(by_group * tl.div_rn(1.0, scale)[:, :, None], p.shape)
    code = tl.minimum(tl.maximum(tl.floor(scaled + noise), -7.0), 7.0)
    nibbles = pack_nibbles((code + 12582912.0).to(tl.int32, bitcast=True) << 16, PTX)
    store_words(address, group, limit, nibbles, 1, ALIGNED)
    lane = tl.arange(0, 16)[None, :]
    index = tile * GROUPS + tl.arange(0, GROUPS)[:, None] + lane * 0
    scale = tl.broadcast_to(scale, (GROUPS, 16))
    tl.store(without_contiguity(scales + index), scale, (lane == 0) & (index * 128 < limit))


@triton.jit
def _apply_rule(g, m, v, factors, RULE: tl.constexpr, PTX: tl.constexpr):
    """The gradient, and states that are decayed already (but lion's) -> the direction u, new states, the root of v; all
    fp32 [R, C, 8]. factors: those of `factors_kernel` from the third on."""
    correction, eps, beta1, grad_factor1, beta2, grad_factor2 = factors
    root = 0.0
    # Explicit FMAs: the compiler may not choose where to fuse, so every launch rounds alike.
    if RULE == "adamw":
        m = tl.fma(g, grad_factor1, m)
        v = tl.fma(g * g, grad_factor2, v)
        root = tl.sqrt(v)
        u = m * reciprocal(tl.fma(root, correction, eps), PTX)
    elif RULE == "lion":
        c = tl.fma(g, grad_factor1, m * beta1)
        u = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))
        m = tl.fma(g, grad_factor2, m * beta2)
    elif RULE == "apply":
        u = g * grad_factor1
    else:
        m = tl.fma(g, grad_factor1, m)
        u = m
        if RULE == "sgd_nesterov":
            u = tl.fma(m, beta1, g * grad_factor1)
    return u, m, v, root


@triton.jit
def update_kernel(
    # int32 [CTAs]: the tensor of each; the tables of `factors_kernel`, which are read only.
    owner_ptr, table_ptr, grads_ptr, factors_ptr, keys_ptr, role,
    # What the tensors of a launch have in common: rule, formats, what is rounded stochastically.
    RULE: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    SR_WEIGHT: tl.constexpr, SR_M: tl.constexpr, SR_V: tl.constexpr,
    # Some tensors want the absmax of the new weight; rows and addresses are multiples of 16 elements and bytes.
    AMAX: tl.constexpr, ALIGNED: tl.constexpr,
    # Elements of a state's scale, of a tile; tiles of a CTA.
    BLOCK: tl.constexpr, TILE: tl.constexpr, LOOPS: tl.constexpr,
    # Multipliers of the random words (`update_rules.py`); the encoding of FP8 states.
    MIX_M: tl.constexpr, MIX_V: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """A CTA updates up to LOOPS tiles of [TILE // BLOCK, BLOCK // 8, 8] elements, all of one row of one tensor.

    A thread has eight elements, so a block of 256 lies in one warp, and only the maximum over a block leaves a thread.
    No software pipelining: high occupancy hides the latency of loads. Explicit FMAs make the result bitwise independent
    of how a tensor is sharded and aligned.
    """
    HAS_MASTER: tl.constexpr = WEIGHT == "bf16 and master"
    STORED: tl.constexpr = WEIGHT == "int8" or WEIGHT == "int4"  # as codes
    pid = tl.program_id(0)
    owner = tl.load(owner_ptr + pid).to(tl.int64)
    row_ptr = table_ptr + owner * COLUMNS
    grad_address = tl.load(grads_ptr + owner)
    f = factors_ptr + owner * 8
    decay = tl.load(f)
    if (grad_address == 0) | (decay != decay):
        return
    # A row of TABLE. Addresses are int64 and become pointers where the format is known.
    weight_address = tl.load(row_ptr)
    m_address, m_scale_address = tl.load(row_ptr + 1), tl.load(row_ptr + 2)
    v_address, v_scale_address = tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    extra_address = tl.load(row_ptr + 5)
    row_length, chunks = tl.load(row_ptr + 6), tl.load(row_ptr + 7)
    chunk = pid - tl.load(row_ptr + 8)
    first_element = tl.load(row_ptr + 9)
    step_size = tl.load(f + 1)
    correction, eps = tl.load(f + 2), tl.load(f + 3)
    beta1, grad_factor1 = tl.load(f + 4), tl.load(f + 5)
    beta2, grad_factor2 = tl.load(f + 6), tl.load(f + 7)

    # Where this CTA's elements are: row and start in it; `limit` of them. Offsets within a chunk fit in int32.
    row32 = chunk.to(tl.int32) // chunks.to(tl.int32)
    start = (chunk - row32 * chunks) * (TILE * LOOPS)  # in the row
    row = row32.to(tl.int64)
    limit = tl.minimum(row_length - start, TILE * LOOPS).to(tl.int32)
    base = row * row_length + start
    # 4-bit codes and scales begin anew at each row, padded: their offsets are not those of the elements.
    byte_base = row * ((row_length + 1) // 2) + start // 2
    block_base = (row * ((row_length + BLOCK - 1) // BLOCK) + start // BLOCK) * 4
    last_block = (limit - 1) // BLOCK
    G_WORDS: tl.constexpr = 8 if GRAD == "fp32" else 4
    grad_address += base * (G_WORDS // 2)  # bytes: eight elements are G_WORDS words
    m_address = state_address(m_address, base, byte_base, M)
    v_address = state_address(v_address, base, byte_base, V)
    m_scale_address += block_base
    v_scale_address += block_base
    P_WORDS: tl.constexpr = 4 if WEIGHT == "bf16" else 2 if WEIGHT == "int8" else 1 if WEIGHT == "int4" else 8
    p_address = extra_address if HAS_MASTER else weight_address
    p_address += byte_base if WEIGHT == "int4" else base * (P_WORDS // 2)
    if HAS_MASTER:
        weight_address += base * 2
    scales = extra_address.to(tl.pointer_type(tl.float32))  # of a weight stored as codes
    if WEIGHT == "int8":
        scales += row
    if WEIGHT == "int4":
        scales += row * ((row_length + 127) // 128) + start // 128
    seed, step, tensor = philox_key(keys_ptr + owner * 3, role)

    ROWS: tl.constexpr = TILE // BLOCK
    amax = tl.zeros((ROWS, BLOCK // 8), tl.int32)
    for i in range(0, (limit + TILE - 1) // TILE):
        block = i * ROWS + tl.arange(0, ROWS)[:, None]
        group = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
        # All loads of a tile are issued before the first use: five streams in flight per thread.
        g_words = load_words(grad_address, group, limit, G_WORDS, ALIGNED)
        p_words = load_words(p_address, group, limit, P_WORDS, ALIGNED)
        m_words, m_scale = load_state(m_address, m_scale_address, group, block, limit, last_block, M, ALIGNED)
        v_words, v_scale = load_state(v_address, v_scale_address, group, block, limit, last_block, V, ALIGNED)

        # The number in the whole tensor keys the random bits, so a shard draws what the unsharded tensor would.
        element = group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        number = first_element + base + element
        g = g_words.to(tl.float32, bitcast=True) if GRAD == "fp32" else bf16_to_float(g_words)
        p = _decode_weight(p_words, scales, group, limit, WEIGHT, CODE.ptx)
        m = decode_state(m_words, m_scale, 1.0 if RULE == "lion" else beta1, M, True, CODE)  # lion has two factors
        v = decode_state(v_words, v_scale, beta2, V, False, CODE)

        rng_words = 0
        if SR_WEIGHT or SR_M or SR_V or STORED:
            if ALIGNED:
                # A thread's eight elements are those of one draw.
                rng_words = philox_words((first_element + base) // 8 + group, seed, step, tensor, CODE.ptx)
            else:
                rng_words = draw_unaligned(number, seed, step, tensor, CODE.ptx)

        factors = correction, eps, beta1, grad_factor1, beta2, grad_factor2
        u, m, v, root = _apply_rule(g, m, v, factors, RULE, CODE.ptx)
        bits = 0
        if V != "":
            if SR_V:
                bits = random_halves(rng_words, number, MIX_V, ALIGNED, False, CODE.ptx)
            at = v_address, v_scale_address, group, block, limit, last_block
            store_state(v, root, bits, at, V, False, SR_V, ALIGNED, CODE)
        if M != "":
            if SR_M:
                bits = random_halves(rng_words, number, MIX_M, ALIGNED, M == "int4", CODE.ptx)
            at = m_address, m_scale_address, group, block, limit, last_block
            store_state(m, root, bits, at, M, True, SR_M, ALIGNED, CODE)

        p = tl.fma(p, decay, -(u * step_size))
        if SR_WEIGHT or STORED:
            bits = random_halves(rng_words, number, 1, ALIGNED, False, CODE.ptx)
        if STORED:
            # pyrefly: ignore[missing-attribute]  # a tensor, which was drawn above
            noise = (bits.to(tl.float32) + 0.5) * (1.0 / 65536.0)  # above 0 and below 1: a whole number stays
            if WEIGHT == "int8":
                _store_int8_weight(p, noise, p_address, scales, group, limit, ALIGNED, CODE.ptx)
            else:
                _store_int4_weight(p, noise, p_address, scales, group, limit, i, ALIGNED, CODE.ptx)
        elif WEIGHT == "bf16":
            store_bf16(p_address, group, limit, p, bits, SR_WEIGHT, ALIGNED, CODE.ptx)
        else:
            store_words(p_address, group, limit, p.to(tl.int32, bitcast=True), 8, ALIGNED)
            if HAS_MASTER:
                store_bf16(weight_address, group, limit, p, bits, SR_WEIGHT, ALIGNED, CODE.ptx)
        if AMAX:
            amax = tl.maximum(amax, tile_amax(p, bits, group, limit, SR_WEIGHT, ALIGNED, CODE.ptx))

    if AMAX:
        amax_address = tl.load(row_ptr + 11)
        amax = tl.max(tl.max(amax, 1), 0)
        if not SR_WEIGHT:  # rounding to nearest keeps the order of numbers
            amax = bf16_bits(amax.to(tl.float32, bitcast=True)) & -65536
        tl.atomic_max(amax_address.to(tl.pointer_type(tl.int32)), amax, amax_address != 0, sem="relaxed")

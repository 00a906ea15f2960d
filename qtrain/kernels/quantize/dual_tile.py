"""A tile that `dual_bf16x2.py` quantizes in both layouts: how it is loaded, and its scales.

What is quantized is a matrix, rows gathered from it, the gradient of logits, y = swiglu(x), or the gradient of x from
dy. Words are of two bf16, neighbors in a row ("pairs"), and a thread holds those of four consecutive rows.
"""

from qtrain.kernels.column_sums import sum_rows
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    abs_bf16x2,
    fast_inv_scale,
    halves_f32,
    high_half,
    low_half,
    max_bf16x2,
    max_of_halves,
    reduce_max_bf16x2,
)
from qtrain.kernels.numerics.encode import scale_from_amax
from qtrain.kernels.numerics.silu import gate_grad_bf16x2, sum_of_pairs, swiglu_bf16x2, up_grad_bf16x2
from qtrain.kernels.quantize.gather_rows import load_token, load_weight, times_weight
from qtrain.kernels.quantize.logit_rows import TWO_INF, load_logit_rows, softmax_grad_bf16x2


@triton.jit
def load_four_rows(ptrs, stride, inside, OUTSIDE: tl.constexpr = 0):
    """Words at `ptrs` and at the same places of the three rows below; OUTSIDE where not inside."""
    first, second = tl.load(ptrs, inside, OUTSIDE), tl.load(ptrs + stride, inside, OUTSIDE)
    return first, second, tl.load(ptrs + 2 * stride, inside, OUTSIDE), tl.load(ptrs + 3 * stride, inside, OUTSIDE)


@triton.jit
def _load_gathered_rows(
    x_ptr, token_ptr, weight_ptr, row, column, words, inside_rows, inside_columns, PTX: tl.constexpr
):
    """Columns `column` of the gathered row `row` and of the three below; 0 outside. All loads are issued before the
    first product."""
    # int32 [BLOCK / 4] each: the tokens of a thread's four rows, -1 for a row of zeros.
    token0, token1 = tl.load(token_ptr + row, inside_rows, -1), tl.load(token_ptr + row + 1, inside_rows, -1)
    token2, token3 = tl.load(token_ptr + row + 2, inside_rows, -1), tl.load(token_ptr + row + 3, inside_rows, -1)
    column, inside = column[None, :], inside_columns[None, :]
    x0 = load_token(x_ptr, token0[:, None], column, words, inside)
    x1 = load_token(x_ptr, token1[:, None], column, words, inside)
    x2 = load_token(x_ptr, token2[:, None], column, words, inside)
    x3 = load_token(x_ptr, token3[:, None], column, words, inside)
    if weight_ptr is not None:
        weight0, weight1 = load_weight(weight_ptr, row, token0), load_weight(weight_ptr, row + 1, token1)
        weight2, weight3 = load_weight(weight_ptr, row + 2, token2), load_weight(weight_ptr, row + 3, token3)
        x0, x1 = times_weight(x0, weight0[:, None], PTX), times_weight(x1, weight1[:, None], PTX)
        x2, x3 = times_weight(x2, weight2[:, None], PTX), times_weight(x3, weight3[:, None], PTX)
    return x0, x1, x2, x3


@triton.jit
def _load_softmax_grads(ptrs, logit_rows, row, column, words, inside_rows, inside, PTX: tl.constexpr):
    """Four rows of the gradient of logits at `ptrs`, in rows `row` on and words `column` of theirs."""
    x0, x1, x2, x3 = load_four_rows(ptrs, words, inside, TWO_INF)
    x0 = softmax_grad_bf16x2(x0, column, load_logit_rows(logit_rows, row, inside_rows), PTX)
    x1 = softmax_grad_bf16x2(x1, column, load_logit_rows(logit_rows, row + 1, inside_rows), PTX)
    x2 = softmax_grad_bf16x2(x2, column, load_logit_rows(logit_rows, row + 2, inside_rows), PTX)
    x3 = softmax_grad_bf16x2(x3, column, load_logit_rows(logit_rows, row + 3, inside_rows), PTX)
    return x0, x1, x2, x3


@triton.jit
def _load_swiglu(gate_ptrs, words, inside, PTX: tl.constexpr):
    """Four rows of y = swiglu(x), whose rows of `words` words are gate, then up, in x."""
    # A row of x is 2 * words words: gate, and up at a distance of words.
    x0, x1, x2, x3 = load_four_rows(gate_ptrs, 2 * words, inside)
    up0, up1, up2, up3 = load_four_rows(gate_ptrs + words, 2 * words, inside)
    y0, y1 = swiglu_bf16x2(x0, up0, PTX), swiglu_bf16x2(x1, up1, PTX)
    return y0, y1, swiglu_bf16x2(x2, up2, PTX), swiglu_bf16x2(x3, up3, PTX)


@triton.jit
def _store_row_dots(dots0, dots1, dots2, dots3, dots_ptr, first, m, block, blocks):
    """Sums `sum_of_pairs` over a block of columns, of the rows first + 4 * i + r in the r-th vector ->
    `router_dots`, fp32 [m, blocks]. All in one store, for which the compiler changes the layout once."""
    # Row 4 * i + r at 4 * i + r.
    dots = tl.reshape(tl.join(tl.join(dots0, dots2), tl.join(dots1, dots3)), (4 * dots0.shape[0],))
    row = first + tl.arange(0, 4 * dots0.shape[0])
    tl.store(dots_ptr + row.to(tl.int64) * blocks + block, dots, row < m)


@triton.jit
def _load_swiglu_grad(gate_ptrs, dy_ptrs, words, half, block, blocks, inside, dots, PTX: tl.constexpr):
    """Four rows of the gradient of gate, or from block number `blocks` on of up, in x [*, words], with gate and up of
    `half` words each. dots: as for `_gate_grad`."""
    x0, x1, x2, x3 = load_four_rows(gate_ptrs, words, inside)
    dy0, dy1, dy2, dy3 = load_four_rows(dy_ptrs, half, inside)
    gate, dy = (x0, x1, x2, x3), (dy0, dy1, dy2, dy3)
    if block >= blocks:  # a scalar branch: a CTA's tile is of gate or of up, and only gate's reads up
        x0, x1, x2, x3 = _up_grad(dy, gate, PTX)
    else:
        up = load_four_rows(gate_ptrs + half, words, inside)
        x0, x1, x2, x3 = _gate_grad(dy, gate, up, block, blocks, dots, PTX)
    return x0, x1, x2, x3


@triton.jit
def _up_grad(dy, gate, PTX: tl.constexpr):
    """Four rows of the gradient of up."""
    x0, x1 = up_grad_bf16x2(dy[0], gate[0], PTX), up_grad_bf16x2(dy[1], gate[1], PTX)
    return x0, x1, up_grad_bf16x2(dy[2], gate[2], PTX), up_grad_bf16x2(dy[3], gate[3], PTX)


@triton.jit
def _gate_grad(dy, gate, up, block, blocks, dots, PTX: tl.constexpr):
    """Four rows of the gradient of gate. With it come the `router_dots` of the block of columns number `block` of
    `blocks`: dots are their pointer or None, the first row, and the rows in all."""
    dots_ptr, first, m = dots
    x0, dots0 = gate_grad_bf16x2(dy[0], gate[0], up[0], PTX)
    x1, dots1 = gate_grad_bf16x2(dy[1], gate[1], up[1], PTX)
    x2, dots2 = gate_grad_bf16x2(dy[2], gate[2], up[2], PTX)
    x3, dots3 = gate_grad_bf16x2(dy[3], gate[3], up[3], PTX)
    if dots_ptr is not None:
        # Summed in one order in all kernels that produce router_dots: fp32 sums that are equal bit for bit.
        dots0, dots1 = sum_of_pairs(dots0), sum_of_pairs(dots1)
        dots2, dots3 = sum_of_pairs(dots2), sum_of_pairs(dots3)
        _store_row_dots(dots0, dots1, dots2, dots3, dots_ptr, first, m, block, blocks)
    return x0, x1, x2, x3


@triton.jit
def rows_inside(tile_m, m, EVEN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which fours of a tile's rows are above m, a multiple of 4. EVEN: all of them."""
    if EVEN:
        return tl.full((BLOCK_M // 4,), True, tl.int1)
    else:
        return tile_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4) < m // 4


@triton.jit
def words_inside(tile_k, k, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Which of a tile's words are left of k, a multiple of 2. EVEN: all of them."""
    if EVEN:
        return tl.full((BLOCK_K // 2,), True, tl.int1)
    else:
        return tile_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2) < k // 2


@triton.jit
def inside_of_tile(tile_m, tile_k, m, k, CODE: tl.constexpr):
    """The mask of a tile's words, by fours of rows."""
    rows = rows_inside(tile_m, m, CODE.even, CODE.block_m)
    return rows[:, None] & words_inside(tile_k, k, CODE.even, CODE.block_k)[None, :]


@triton.jit
def offset_of_tile(tile_m, tile_k, words, CODE: tl.constexpr):
    """Where a tile begins, and where in it a thread's first row of four is; `words` per row."""
    # The start is int64 and scalar; offsets within a tile fit in int32, at half the registers.
    i, j = tl.arange(0, CODE.block_m // 4), tl.arange(0, CODE.block_k // 2)
    start = tile_m.to(tl.int64) * CODE.block_m * words + tile_k * (CODE.block_k // 2)
    return start, i[:, None] * (4 * words) + j[None, :]


@triton.jit
def load_tile(x_ptrs, at, sizes, CODE: tl.constexpr):
    """A tile of the matrix [m, k] that is quantized, of which x and dy hold words of two elements: row 4 * i + r in the
    r-th result, int32 [block_m / 4, block_k / 2].

    x_ptrs: x, token_of_row, weight_of_row, dy, router_dots, `LogitRows`, of which all but x may be None. CODE.swiglu:
    "" is x, m rows gathered from it unless token_ptr is None, or the gradient of logits x unless logit_rows is None;
    "forward" is y = swiglu(x), x [m, 2 * k]; "backward" the gradient of x [m, k] from dy [m, k / 2], with `router_dots`
    unless dots_ptr is None.
    """
    x_ptr, token_ptr, weight_ptr, dy_ptr, dots_ptr, logit_rows = x_ptrs
    tile_m, tile_k = at
    m, k = sizes
    PTX: tl.constexpr = CODE.ptx
    BLOCK_M: tl.constexpr = CODE.block_m
    BLOCK_K: tl.constexpr = CODE.block_k
    i, j, words = tl.arange(0, BLOCK_M // 4), tl.arange(0, BLOCK_K // 2), tl.multiple_of(k // 2, 8)
    inside = inside_of_tile(tile_m, tile_k, m, k, CODE)
    start, offset = offset_of_tile(tile_m, tile_k, words, CODE)
    if CODE.swiglu == "forward":
        # Rows of x are twice as long as those of y: the row's offset counts twice.
        gate_ptrs = x_ptr + start + offset + (tile_m.to(tl.int64) * BLOCK_M + 4 * i)[:, None] * words
        return _load_swiglu(gate_ptrs, words, inside, PTX)
    elif CODE.swiglu == "backward":
        # A row of x is gate, then up, half words each; a tile is in one of them. It reads gate at the same place in
        # either case, and dy, whose rows are half as long.
        half = tl.multiple_of(words // 2, BLOCK_K // 2)
        left = tl.multiple_of(tile_k * (BLOCK_K // 2) % half, BLOCK_K // 2)
        # The tile's column in dx becomes its column within a half, at which gate is read.
        gate_ptrs = x_ptr + (start - tile_k * (BLOCK_K // 2) + left) + offset
        dy_ptrs = dy_ptr + tile_m.to(tl.int64) * BLOCK_M * half + left + i[:, None] * (4 * half) + j[None, :]
        blocks = half // (BLOCK_K // 2)  # tiles across gate; those after it are of up
        dots = dots_ptr, tile_m * BLOCK_M, m
        return _load_swiglu_grad(gate_ptrs, dy_ptrs, words, half, tile_k, blocks, inside, dots, PTX)
    elif token_ptr is not None:
        rows = rows_inside(tile_m, m, CODE.even, BLOCK_M)
        row, column = tile_m * BLOCK_M + 4 * i, tile_k * (BLOCK_K // 2) + j
        columns = words_inside(tile_k, k, CODE.even, BLOCK_K)
        return _load_gathered_rows(x_ptr, token_ptr, weight_ptr, row, column, words, rows, columns, PTX)
    elif logit_rows is not None:
        rows = rows_inside(tile_m, m, CODE.even, BLOCK_M)
        row, column = tile_m * BLOCK_M + 4 * i, tile_k * (BLOCK_K // 2) + j
        return _load_softmax_grads(x_ptr + start + offset, logit_rows, row, column, words, rows, inside, PTX)
    else:
        return load_four_rows(x_ptr + start + offset, words, inside)


@triton.jit
def load_swiglu_grads(x_ptrs, at, sizes, CODE: tl.constexpr):
    """The tile at the same place of the gradients of gate and of up, four rows each, as `load_tile` returns one: gate
    and dy are read once for both. at: in a half of x. The rest as for `load_tile`."""
    x_ptr, _, _, dy_ptr, dots_ptr, _ = x_ptrs
    tile_m, tile_k = at
    m, k = sizes
    words = tl.multiple_of(k // 2, 8)
    half = tl.multiple_of(words // 2, CODE.block_k // 2)
    start, offset = offset_of_tile(tile_m, tile_k, words, CODE)
    start_dy, offset_dy = offset_of_tile(tile_m, tile_k, half, CODE)
    inside = inside_of_tile(tile_m, tile_k, m, k, CODE)
    gate = load_four_rows(x_ptr + start + offset, words, inside)
    up = load_four_rows(x_ptr + half + start + offset, words, inside)
    dy = load_four_rows(dy_ptr + start_dy + offset_dy, half, inside)
    dots = dots_ptr, tile_m * CODE.block_m, m
    gate_grad = _gate_grad(dy, gate, up, tile_k, half // (CODE.block_k // 2), dots, CODE.ptx)
    return gate_grad, _up_grad(dy, gate, CODE.ptx)


@triton.jit
def store_column_sums(x, sums_ptr, at, k, CODE: tl.constexpr):
    """Sums of the columns of a tile x, as `load_tile` returns it -> row tile_m of fp32 [tiles of rows, k]."""
    tile_m, tile_k = at
    # Numbers 2j of a row are in the low halves, 2j + 1 in the high ones.
    low0, high0 = halves_f32(x[0])
    low1, high1 = halves_f32(x[1])
    low2, high2 = halves_f32(x[2])
    low3, high3 = halves_f32(x[3])
    first, second = sum_rows((low0 + low1) + (low2 + low3)), sum_rows((high0 + high1) + (high2 + high3))
    across = tile_k * CODE.block_k + tl.arange(0, CODE.block_k)
    sums = tl.reshape(tl.join(first, second), (CODE.block_k,))
    tl.store(sums_ptr + tile_m.to(tl.int64) * k + across, sums, across < k)


@triton.jit
def max_of_four(a, b, c, d, PTX: tl.constexpr):
    """Pairs -> the elementwise maximum of their absolute values, as a pair."""
    a, b, c, d = abs_bf16x2(a), abs_bf16x2(b), abs_bf16x2(c), abs_bf16x2(d)
    return max_bf16x2(max_bf16x2(a, b, PTX), max_bf16x2(c, d, PTX), PTX)


@triton.jit
def max_of_tile(x0, x1, x2, x3, PTX: tl.constexpr):
    """The absmax of four rows [R, C], as bits of fp32."""
    amax = max_of_four(x0, x1, x2, x3, PTX)  # [R, C] pairs: the halves meet only in the last, scalar step
    return max_of_halves(reduce_max_bf16x2(reduce_max_bf16x2(amax, 1, PTX), 0, PTX))


@triton.jit
def row_amax(bf16x2, PTX: tl.constexpr):
    """Pairs [R, C] -> the absmax of their rows [R], as bits of fp32."""
    return max_of_halves(reduce_max_bf16x2(abs_bf16x2(bf16x2), 1, PTX))


@triton.jit
def whole_row_scales(source_ptrs, scale_ptrs, down, across, sizes, at, CODE: tl.constexpr):
    """Scales of rows `down` and columns `across` from bits of their absmax, stored by the first tile of each (those of
    columns unless scale_t_ptr is None) -> inverse scales of the four rows of a thread, of the first and the second
    numbers of pairs, nonfinite."""
    source_ptr, source_t_ptr = source_ptrs
    scale_ptr, scale_t_ptr = scale_ptrs
    m, k = sizes
    tile_m, tile_k = at
    R: tl.constexpr = down.shape[0] // 4
    C: tl.constexpr = across.shape[0] // 2
    tl.debug_barrier()  # or the compiler issues the loads of x only after these have arrived
    bits, bits_t = tl.load(source_ptr + down, down < m, 0), tl.load(source_t_ptr + across, across < k, 0)
    nonfinite = tl.max(tl.maximum(bits, bits_t), 0) >= 0x7F800000
    scale, scale_t = scale_from_amax(bits, CODE), scale_from_amax(bits_t, CODE)
    tl.store(scale_ptr + down, scale, (down < m) & (tile_k == 0))
    if scale_t_ptr is not None:
        tl.store(scale_t_ptr + across, scale_t, (across < k) & (tile_m == 0))
    # [4 * R] -> the inverse scales of rows 4 * i + r for r = 0 to 3, [R] each: split halves the last axis of 2.
    even, odd = tl.split(tl.reshape(fast_inv_scale(scale, True, CODE.ptx), (R, 2, 2)))
    inv0, inv2 = tl.split(even)
    inv1, inv3 = tl.split(odd)
    inv_first, inv_second = tl.split(tl.reshape(fast_inv_scale(scale_t, True, CODE.ptx), (C, 2)))
    inv = inv0[:, None], inv1[:, None], inv2[:, None], inv3[:, None]
    return inv, inv_first[None, :], inv_second[None, :], nonfinite


@triton.jit
def block_row_scales(amax0, amax1, amax2, amax3, nonfinite, scale_ptr, down, m, tile_k, CODE: tl.constexpr):
    """1x128: scales of the tile's rows `down` from their absmax, stored -> inverse scales of the four rows of a
    thread."""
    scale0, scale1, scale2, scale3 = (
        scale_from_amax(amax0, CODE), scale_from_amax(amax1, CODE),
        scale_from_amax(amax2, CODE), scale_from_amax(amax3, CODE),
    )  # fmt: skip
    # Back into the order of rows, for one coalesced store; scales are column-major [m, k / 128], as cuBLAS reads them.
    scale = tl.reshape(tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3)), (down.shape[0],))
    tl.store(scale_ptr + tile_k.to(tl.int64) * m + down, scale, down < m)
    return (
        fast_inv_scale(scale0, nonfinite, CODE.ptx)[:, None], fast_inv_scale(scale1, nonfinite, CODE.ptx)[:, None],
        fast_inv_scale(scale2, nonfinite, CODE.ptx)[:, None], fast_inv_scale(scale3, nonfinite, CODE.ptx)[:, None],
    )  # fmt: skip


@triton.jit
def block_column_scales(column_amax, nonfinite, scale_t_ptr, across, k, tile_m, CODE: tl.constexpr):
    """1x128: scales of the tile's columns `across` from their absmax as pairs, stored -> inverse scales of the first
    and of the second numbers of pairs."""
    # column_amax int32 [BLOCK / 2]: columns 2j in the low halves, 2j + 1 in the high ones; joined they are in order.
    first, second = scale_from_amax(low_half(column_amax), CODE), scale_from_amax(high_half(column_amax), CODE)
    scale = tl.reshape(tl.join(first, second), (across.shape[0],))
    tl.store(scale_t_ptr + tile_m.to(tl.int64) * k + across, scale, across < k)
    inv_first = fast_inv_scale(first, nonfinite, CODE.ptx)[None, :]
    return inv_first, fast_inv_scale(second, nonfinite, CODE.ptx)[None, :]


@triton.jit
def record_tile_amax(x0, x1, x2, x3, inv_scale, amax_ptr, known_amax, CODE: tl.constexpr):
    """Stores the tile's absmax, if it exceeds the known one -> whether it exceeds the range of a given scale."""
    amax = max_of_tile(x0, x1, x2, x3, CODE.ptx)
    overflow = (amax.to(tl.float32, bitcast=True) * inv_scale <= CODE.fmt.max) == 0  # true of a NaN
    if amax_ptr is not None and amax > known_amax:  # a scalar branch; a maximum does not depend on the order of CTAs
        tl.atomic_max(amax_ptr, amax, sem="relaxed")
    return overflow

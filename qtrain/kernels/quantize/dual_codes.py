"""Codes and scales of a tile in both layouts, from its words in registers (`dual_tile.py`).

CODE is a `DualCode` of `dual_bf16x2.py`, which has the kernel.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    draw_bf16x2,
    fast_inv_scale,
    max_of_halves,
    pack_four_codes,
    pack_two_codes,
    pack_two_halves,
    pack_two_rows,
    reduce_max_bf16x2,
    scale_bf16x2,
    zero_nonfinite_bf16x2,
)
from qtrain.kernels.numerics.encode import inv_scale_of, scale_from_amax
from qtrain.kernels.numerics.philox import philox_key
from qtrain.kernels.quantize.dual_tile import (
    block_column_scales,
    block_row_scales,
    inside_of_tile,
    max_of_four,
    max_of_tile,
    offset_of_tile,
    record_tile_amax,
    row_amax,
    rows_inside,
    whole_row_scales,
    words_inside,
)


@triton.jit
def _store_row_codes(ptrs, inside, x, inv, inv_t, overflow, block, key, SAME: tl.constexpr, CODE: tl.constexpr):
    """Stores the row codes of pairs x int32 [BLOCK_M / 4, BLOCK_K / 2]. Returns what column codes are packed from if
    they are stochastic or the SAME. inv: inverse scales of the rows; inv_t: of first and second numbers of pairs.
    block, key: as for `draw_bf16x2`."""
    rng_words, half_unit = None, 0
    if CODE.stochastic or CODE.stochastic_t:
        # One draw for both layouts: they never meet in one product, and Philox is most of the cost of rounding.
        rng_words, half_unit = draw_bf16x2(block, key, CODE.ptx)
    a, b = scale_bf16x2(x, inv, inv, rng_words, half_unit, overflow, CODE.stochastic, CODE)
    tl.store(ptrs, pack_two_codes(a, b, CODE.stochastic, CODE), inside)
    if CODE.stochastic_t and not SAME:
        a, b = scale_bf16x2(x, inv_t[0], inv_t[1], rng_words, half_unit, overflow, True, CODE)
    return a, b


@triton.jit
def _store_rows_pack_columns(
    ptrs, words, inside, x, inv, inv_t, overflow, draw, SAME: tl.constexpr, CODE: tl.constexpr
):
    """Stores the row codes of four rows x, `words` words apart. Returns the column codes of the first and of the second
    numbers of pairs, four rows to an int32. draw: a row's blocks, how many a row has, and the key."""
    block, draws, key = draw
    # Row after row, and stochastic codes are packed after every two: eight unpacked tensors would not fit in registers.
    a0, b0 = _store_row_codes(ptrs, inside, x[0], inv[0], inv_t, overflow, block, key, SAME, CODE)
    a1, b1 = _store_row_codes(ptrs + words, inside, x[1], inv[1], inv_t, overflow, block + draws, key, SAME, CODE)
    if CODE.stochastic_t:
        a0, b0 = pack_two_rows(a0, a1, CODE), pack_two_rows(b0, b1, CODE)
    ptrs_2 = ptrs + 2 * words
    a2, b2 = _store_row_codes(ptrs_2, inside, x[2], inv[2], inv_t, overflow, block + 2 * draws, key, SAME, CODE)
    ptrs_3 = ptrs + 3 * words
    a3, b3 = _store_row_codes(ptrs_3, inside, x[3], inv[3], inv_t, overflow, block + 3 * draws, key, SAME, CODE)
    if CODE.stochastic_t:
        a0 = pack_two_halves(a0, pack_two_rows(a2, a3, CODE), CODE.ptx)
        b0 = pack_two_halves(b0, pack_two_rows(b2, b3, CODE), CODE.ptx)
    else:
        if not SAME:  # to nearest under the columns' own scales; x is still in registers
            a0, b0 = scale_bf16x2(x[0], inv_t[0], inv_t[1], None, 0, False, False, CODE)
            a1, b1 = scale_bf16x2(x[1], inv_t[0], inv_t[1], None, 0, False, False, CODE)
            a2, b2 = scale_bf16x2(x[2], inv_t[0], inv_t[1], None, 0, False, False, CODE)
            a3, b3 = scale_bf16x2(x[3], inv_t[0], inv_t[1], None, 0, False, False, CODE)
        a0, b0 = pack_four_codes(a0, a1, a2, a3, CODE), pack_four_codes(b0, b1, b2, b3, CODE)
    return a0, b0


@triton.jit
def quantize_tile(x, at, out_ptrs, source_ptrs, given, amax, random, sizes, CODE: tl.constexpr):
    """Stores codes and scales of a tile x, as `load_tile` returns it, at (tile_m, tile_k).

    out_ptrs: codes, codes_t, scale, scale_t; source_ptrs, random, sizes: as the arguments of `_dual_kernel`, with
    source_t_ptr that of the tile's group. given: the scale, if it is. amax: amax_ptr, and no more than what is there.
    """
    x0, x1, x2, x3 = x
    tile_m, tile_k = at
    codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr = out_ptrs
    source_ptr, _ = source_ptrs
    amax_ptr, known_amax = amax
    m, k, stride, stride_t = sizes
    BLOCK_M: tl.constexpr = CODE.block_m
    BLOCK_K: tl.constexpr = CODE.block_k
    # Rows in words of two codes, columns in words of four codes. The hints let Triton vectorize loads and stores.
    words, words_t = tl.multiple_of(k // 2, 8), tl.multiple_of(m // 4, 4)
    i, j = tl.arange(0, BLOCK_M // 4), tl.arange(0, BLOCK_K // 2)
    down, across = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    overflow = False
    # ---- scales: all branches below are on constexprs
    if CODE.scales == "rowwise":
        inv, inv_first, inv_second, nonfinite = whole_row_scales(
            source_ptrs, (scale_ptr, scale_t_ptr), down, across, (m, k), at, CODE
        )
    elif CODE.scales == "1x128":
        if CODE.scales_t == "1x128":
            column_amax = reduce_max_bf16x2(max_of_four(x0, x1, x2, x3, CODE.ptx), 0, CODE.ptx)
            amax = tl.max(max_of_halves(column_amax), 0)
        amax0, amax1 = row_amax(x0, CODE.ptx), row_amax(x1, CODE.ptx)
        amax2, amax3 = row_amax(x2, CODE.ptx), row_amax(x3, CODE.ptx)
        if CODE.scales_t == "128x128":
            amax = tl.max(tl.maximum(tl.maximum(amax0, amax1), tl.maximum(amax2, amax3)), 0)
        nonfinite = amax >= 0x7F800000  # bits of |x|: Inf and NaN are the largest
        inv = block_row_scales(amax0, amax1, amax2, amax3, nonfinite, scale_ptr, down, m, tile_k, CODE)
    else:  # one scale for the tile, in both layouts
        if CODE.scales == "given":
            scale = given
        else:
            if CODE.scales == "tensorwise":
                amax = tl.load(source_ptr)
            else:  # 128x128
                amax = max_of_tile(x0, x1, x2, x3, CODE.ptx)
            nonfinite = amax >= 0x7F800000
            scale = scale_from_amax(amax, CODE)
        if CODE.scales == "128x128":
            tl.store(scale_ptr + tile_m * stride + tile_k, scale)
            tl.store(scale_t_ptr + tile_k * stride_t + tile_m, scale)
        else:
            tl.store(scale_ptr, scale, (tile_m == 0) & (tile_k == 0))
            tl.store(scale_t_ptr, scale, (tile_m == 0) & (tile_k == 0))
        if CODE.scales == "given":
            nonfinite: tl.constexpr = False  # a NaN has a code of FP8, and the rest saturates
            inv_scale = inv_scale_of(scale, False)
            if amax_ptr is not None or CODE.stochastic or CODE.stochastic_t:
                overflow = record_tile_amax(x0, x1, x2, x3, inv_scale, amax_ptr, known_amax, CODE)
        else:
            inv_scale = fast_inv_scale(scale, nonfinite, CODE.ptx)
        inv, inv_first, inv_second = (inv_scale, inv_scale, inv_scale, inv_scale), inv_scale, inv_scale

    # A group with a NaN or an Inf has a non-finite scale already; its codes are zero. A scalar branch, rarely taken.
    x0, x1 = zero_nonfinite_bf16x2(x0, nonfinite), zero_nonfinite_bf16x2(x1, nonfinite)
    x2, x3 = zero_nonfinite_bf16x2(x2, nonfinite), zero_nonfinite_bf16x2(x3, nonfinite)
    if CODE.scales_t == "1x128":
        inv_first, inv_second = block_column_scales(column_amax, nonfinite, scale_t_ptr, across, k, tile_m, CODE)
    elif CODE.scales == "1x128":  # scales_t is 128x128: the tile has one scale, and its absmax is that of its rows
        scale_t = scale_from_amax(amax, CODE)
        tl.store(scale_t_ptr + tile_k * stride_t + tile_m, scale_t)
        inv_scale_t = fast_inv_scale(scale_t, nonfinite, CODE.ptx)
        inv_first, inv_second = inv_scale_t, inv_scale_t

    # ---- codes
    # Stores of 8 codes per thread, not of 16: half the registers to gather them in.
    start, offset = offset_of_tile(tile_m, tile_k, words, CODE)
    ptrs, inside = codes_ptr + start + tl.max_contiguous(offset, (1, 4)), inside_of_tile(tile_m, tile_k, m, k, CODE)
    # One scale for both layouts and one rounding: the row codes are the column codes, and only packing differs.
    SAME: tl.constexpr = CODE.stochastic == CODE.stochastic_t and CODE.scales != "1x128" and CODE.scales != "rowwise"
    block, draws, key = 0, words // 4, None  # draws: of a row of x, one per eight elements
    if CODE.stochastic or CODE.stochastic_t:
        key_ptr, role = random
        seed, step, tensor = philox_key(key_ptr, role)
        key = seed, step, tensor, tl.minimum(m, 1)  # a runtime 1: keeps the draws in a loop and limits live registers
        first_of_row = (tile_m.to(tl.int64) * BLOCK_M + 4 * i) * draws + tile_k * (BLOCK_K // 8)
        block = first_of_row[:, None] + tl.arange(0, BLOCK_K // 8)[None, :]
    a, b = _store_rows_pack_columns(
        ptrs, words, inside, (x0, x1, x2, x3), inv, (inv_first, inv_second), overflow, (block, draws, key), SAME, CODE
    )
    # a, b int32 [BLOCK_M / 4, BLOCK_K / 2]: column codes 2j and 2j + 1 of four rows each. Transposed through shared
    # memory as words, a quarter of the bytes' instructions, and stored to rows 2j and 2j + 1 of codes_t.
    rows, columns = rows_inside(tile_m, m, CODE.even, BLOCK_M), words_inside(tile_k, k, CODE.even, BLOCK_K)
    start_t = tile_k.to(tl.int64) * BLOCK_K * words_t + tile_m * (BLOCK_M // 4)
    ptrs_t = codes_t_ptr + start_t + j[:, None] * (2 * words_t) + i[None, :]
    inside_t = None if CODE.even else columns[:, None] & rows[None, :]
    tl.store(ptrs_t, tl.trans(a), inside_t)
    tl.store(ptrs_t + words_t, tl.trans(b), inside_t)

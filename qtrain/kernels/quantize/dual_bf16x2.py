"""Quantizes bf16 in both layouts to 8 bits (FP8 or INT8): weights, inputs and gradients, also those of a SwiGLU.

The same codes as `tiled.py`, in few instructions and registers, so that three CTAs share an SM and overlap loads with
compute. Two neighbors of a row stay in the 32-bit word that they were read in, their absmax is taken of both at once,
and a thread holds words of four consecutive rows: four codes of a column are a word again, and only words go through
shared memory to be transposed. Either layout may be rounded stochastically: a Philox draw's four words belong to four
words of x side by side, which one thread holds.

A scale belongs to a CTA's block of 128 (1x128, 128x128, or 1x128 of row codes and 128x128 of transposed codes); to
whole rows and columns, or to the tensor, whose absmax a pass before has left; or it is given for the tensor.

What is quantized can be computed from x as it is read: y = swiglu(x), the gradient of x from dy, or rows gathered from
x.
"""

import torch
from torch import Tensor

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
from qtrain.kernels.numerics.encode import encoding, inv_scale_of, scale_from_amax
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_scale
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_key
from qtrain.kernels.quantize.absmax import launch_absmax
from qtrain.kernels.quantize.column_groups import BlockGroups, group_of_row, launch_group_scales
from qtrain.kernels.quantize.dual_tile import (
    block_column_scales,
    block_row_scales,
    inside_of_tile,
    load_tile,
    max_of_four,
    max_of_tile,
    offset_of_tile,
    record_amax,
    row_amax,
    rows_inside,
    whole_row_scales,
    words_inside,
)
from qtrain.kernels.quantize.gather_rows import EVERY_ROW, RowIndex

BLOCK = 128
BLOCK_PAIRS = (("128x128", "128x128"), ("1x128", "1x128"), ("1x128", "128x128"))
"""Granularities of row codes and of transposed codes whose scales a CTA computes from its own block."""
PAIRS = (*BLOCK_PAIRS, ("rowwise", "rowwise"), ("tensorwise", "tensorwise"))
"""All that the kernel computes, in 8-bit formats; the last two after an absmax pass."""
WARPS, REGISTERS = 4, 168
"""Warps of a CTA, registers of a thread: three CTAs, with 96 KiB of loads in flight, share an SM of an H200."""
WARPS_OF_GRADIENT, REGISTERS_OF_GRADIENT = 8, 128
"""The same for a SwiGLU's gradient, which is computed from three tensors: more warps, each with less live state."""


@triton.jit
def _store_row_codes(
    ptrs, inside, x, inv, inv_first, inv_second, overflow, block, key,
    STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, SAME: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Stores the row codes of pairs. Returns what column codes are packed from if they are stochastic (STOCHASTIC_T)
    or the SAME. block, key: as for `draw_bf16x2`."""
    rng_words, half_unit = None, 0
    if STOCHASTIC or STOCHASTIC_T:
        rng_words, half_unit = draw_bf16x2(block, key, CODE.ptx)
    a, b = scale_bf16x2(x, inv, inv, rng_words, half_unit, overflow, STOCHASTIC, CODE)
    tl.store(ptrs, pack_two_codes(a, b, STOCHASTIC, CODE), inside)
    if STOCHASTIC_T and not SAME:
        a, b = scale_bf16x2(x, inv_first, inv_second, rng_words, half_unit, overflow, True, CODE)
    return a, b


@triton.jit
def _store_rows_pack_columns(
    ptrs, words, inside, x, inv, inv_first, inv_second, overflow, block, draws, key,
    STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, SAME: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Stores the row codes of four rows x. Returns the column codes of the first and of the second numbers of pairs,
    four rows to an int32. Stochastic codes are packed after every two rows, which limits live registers."""
    a0, b0 = _store_row_codes(
        ptrs, inside, x[0], inv[0], inv_first, inv_second, overflow, block, key, STOCHASTIC, STOCHASTIC_T, SAME, CODE
    )
    a1, b1 = _store_row_codes(
        ptrs + words, inside, x[1], inv[1], inv_first, inv_second, overflow, block + draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, CODE,
    )  # fmt: skip
    if STOCHASTIC_T:
        a0, b0 = pack_two_rows(a0, a1, CODE), pack_two_rows(b0, b1, CODE)
    a2, b2 = _store_row_codes(
        ptrs + 2 * words, inside, x[2], inv[2], inv_first, inv_second, overflow, block + 2 * draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, CODE,
    )  # fmt: skip
    a3, b3 = _store_row_codes(
        ptrs + 3 * words, inside, x[3], inv[3], inv_first, inv_second, overflow, block + 3 * draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, CODE,
    )  # fmt: skip
    if STOCHASTIC_T:
        a0 = pack_two_halves(a0, pack_two_rows(a2, a3, CODE), CODE.ptx)
        b0 = pack_two_halves(b0, pack_two_rows(b2, b3, CODE), CODE.ptx)
    else:
        if not SAME:
            a0, b0 = scale_bf16x2(x[0], inv_first, inv_second, None, 0, False, False, CODE)
            a1, b1 = scale_bf16x2(x[1], inv_first, inv_second, None, 0, False, False, CODE)
            a2, b2 = scale_bf16x2(x[2], inv_first, inv_second, None, 0, False, False, CODE)
            a3, b3 = scale_bf16x2(x[3], inv_first, inv_second, None, 0, False, False, CODE)
        a0, b0 = pack_four_codes(a0, a1, a2, a3, CODE), pack_four_codes(b0, b1, b2, b3, CODE)
    return a0, b0


@triton.jit
def quantize_tile(
    x0, x1, x2, x3, tile_m, tile_k, codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr, source_ptr, source_t_ptr, amax_ptr,
    given, known_amax, key_ptr, role, m, k, stride, stride_t,
    STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, SCALES: tl.constexpr, SCALES_T: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores codes and scales of a tile, as `load_tile` returns it. Arguments as for `_dual_kernel`, but source_t_ptr
    is that of the tile's group; given: the scale, if it is; known_amax: no more than what is at amax_ptr."""
    words, quads = tl.multiple_of(k // 2, 8), tl.multiple_of(m // 4, 4)  # of a row of x, of a row of codes_t
    i, j, lane = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK)
    down, across = tile_m * BLOCK + lane, tile_k * BLOCK + lane
    overflow = False
    if SCALES == "rowwise":
        inv, inv_first, inv_second, nonfinite = whole_row_scales(
            source_ptr, source_t_ptr, scale_ptr, scale_t_ptr, down, across, m, k, tile_m, tile_k, CODE
        )
    elif SCALES == "1x128":
        if SCALES_T == "1x128":
            column_amax = reduce_max_bf16x2(max_of_four(x0, x1, x2, x3, CODE.ptx), 0, CODE.ptx)
            amax = tl.max(max_of_halves(column_amax), 0)
        amax0, amax1 = row_amax(x0, CODE.ptx), row_amax(x1, CODE.ptx)
        amax2, amax3 = row_amax(x2, CODE.ptx), row_amax(x3, CODE.ptx)
        if SCALES_T == "128x128":
            amax = tl.max(tl.maximum(tl.maximum(amax0, amax1), tl.maximum(amax2, amax3)), 0)
        nonfinite = amax >= 0x7F800000
        inv = block_row_scales(amax0, amax1, amax2, amax3, nonfinite, scale_ptr, down, m, tile_k, CODE)
    else:
        if SCALES == "given":
            scale = given
        else:
            if SCALES == "tensorwise":
                amax = tl.load(source_ptr)
            else:  # 128x128
                amax = max_of_tile(x0, x1, x2, x3, CODE.ptx)
            nonfinite = amax >= 0x7F800000
            scale = scale_from_amax(amax, CODE)
        if SCALES == "128x128":
            tl.store(scale_ptr + tile_m * stride + tile_k, scale)
            tl.store(scale_t_ptr + tile_k * stride_t + tile_m, scale)
        else:
            tl.store(scale_ptr, scale, (tile_m == 0) & (tile_k == 0))
            tl.store(scale_t_ptr, scale, (tile_m == 0) & (tile_k == 0))
        if SCALES == "given":
            nonfinite: tl.constexpr = False  # a NaN has a code of FP8, and the rest saturates
            inv_scale = inv_scale_of(scale, False)
            if amax_ptr is not None or STOCHASTIC or STOCHASTIC_T:
                overflow = record_amax(x0, x1, x2, x3, inv_scale, amax_ptr, known_amax, CODE)
        else:
            inv_scale = fast_inv_scale(scale, nonfinite, CODE.ptx)
        inv, inv_first, inv_second = (inv_scale, inv_scale, inv_scale, inv_scale), inv_scale, inv_scale

    x0, x1 = zero_nonfinite_bf16x2(x0, nonfinite), zero_nonfinite_bf16x2(x1, nonfinite)
    x2, x3 = zero_nonfinite_bf16x2(x2, nonfinite), zero_nonfinite_bf16x2(x3, nonfinite)
    if SCALES_T == "1x128":
        inv_first, inv_second = block_column_scales(column_amax, nonfinite, scale_t_ptr, across, k, tile_m, CODE)
    elif SCALES == "1x128":  # SCALES_T is 128x128: the tile has one scale, and its absmax is that of its rows
        scale_t = scale_from_amax(amax, CODE)
        tl.store(scale_t_ptr + tile_k * stride_t + tile_m, scale_t)
        inv_scale_t = fast_inv_scale(scale_t, nonfinite, CODE.ptx)
        inv_first, inv_second = inv_scale_t, inv_scale_t

    # Stores of 8 codes per thread, not of 16: half the registers to gather them in.
    start, offset = offset_of_tile(tile_m, tile_k, words, BLOCK)
    ptrs, inside = (
        codes_ptr + start + tl.max_contiguous(offset, (1, 4)),
        inside_of_tile(tile_m, tile_k, m, k, EVEN, BLOCK),
    )
    SAME: tl.constexpr = STOCHASTIC == STOCHASTIC_T and SCALES != "1x128" and SCALES != "rowwise"
    block, draws, key = 0, words // 4, None  # draws: of a row of x
    if STOCHASTIC or STOCHASTIC_T:
        seed, step, tensor = philox_key(key_ptr, role)
        key = seed, step, tensor, tl.minimum(m, 1)
        first_of_row = (tile_m.to(tl.int64) * BLOCK + 4 * i) * draws + tile_k * (BLOCK // 8)
        block = first_of_row[:, None] + tl.arange(0, BLOCK // 8)[None, :]
    a, b = _store_rows_pack_columns(
        ptrs, words, inside, (x0, x1, x2, x3), inv, inv_first, inv_second, overflow, block, draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, CODE,
    )  # fmt: skip
    rows, columns = rows_inside(tile_m, m, EVEN, BLOCK), words_inside(tile_k, k, EVEN, BLOCK)
    start_t = tile_k.to(tl.int64) * BLOCK * quads + tile_m * (BLOCK // 4)
    ptrs_t = codes_t_ptr + start_t + j[:, None] * (2 * quads) + i[None, :]
    inside_t = None if EVEN else columns[:, None] & rows[None, :]
    tl.store(ptrs_t, tl.trans(a), inside_t)
    tl.store(ptrs_t + quads, tl.trans(b), inside_t)


@triton.jit
def stripe_of_tile(tile_k, tiles_k, SWIGLU: tl.constexpr):
    """The block of columns of a tile's number: in a SwiGLU's gradient, tiles of gate and of up that read the same words
    are neighbors."""
    return tile_k % 2 * (tiles_k // 2) + tile_k // 2 if SWIGLU == "backward" else tile_k


@triton.jit(do_not_specialize=["role", "stride", "stride_t"])
def _dual_kernel(
    x_ptr, token_ptr, weight_ptr, dy_ptr, dots_ptr, codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr, source_ptr,
    source_t_ptr, amax_ptr, group_ptr, key_ptr, role, m, k, stride, stride_t,
    SWIGLU: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, SCALES: tl.constexpr,
    SCALES_T: tl.constexpr, CODE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, codes and codes_t as words of two elements, two codes and four codes; m, k: elements, multiples of 16.

    SCALES, SCALES_T: the granularities, of `PAIRS`, or "given" for one scale at source_ptr; amax_ptr then receives the
    bits of the absmax, if it is not None. Otherwise source_ptr (tensorwise, rowwise) and source_t_ptr (rowwise) hold
    bits of absmaxes. group_ptr: groups of rows whose columns have maxima of their own at source_t_ptr (rowwise;
    scale_t_ptr is None), or None. stride, stride_t: of the scales of blocks, down (128x128). EVEN: m and k are
    multiples of BLOCK. SWIGLU, and what x and dy are: see `load_tile`.
    """
    tile = tl.program_id(0)
    if SCALES == "rowwise" or SCALES == "tensorwise":  # reversed: the absmax pass read the last tiles last
        tile = tl.num_programs(0) - 1 - tile
    tiles_k = tl.cdiv(k, BLOCK)
    tile_m, tile_k = tile // tiles_k, stripe_of_tile(tile % tiles_k, tiles_k, SWIGLU)
    if group_ptr is not None:
        source_t_ptr += group_of_row(group_ptr, tile_m * BLOCK) * k
    given, known_amax = None, 0
    if SCALES == "given":
        given = tl.load(source_ptr)
    if amax_ptr is not None:
        known_amax = tl.load(amax_ptr)  # a stale value is as good, and few CTAs exceed it
    x0, x1, x2, x3 = load_tile(
        x_ptr, token_ptr, weight_ptr, dy_ptr, dots_ptr, tile_m, tile_k, m, k, SWIGLU, CODE.ptx, EVEN, BLOCK
    )
    quantize_tile(
        x0, x1, x2, x3, tile_m, tile_k, codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr, source_ptr, source_t_ptr,
        amax_ptr, given, known_amax, key_ptr, role, m, k, stride, stride_t,
        STOCHASTIC, STOCHASTIC_T, SCALES, SCALES_T, CODE, EVEN, BLOCK,
    )  # fmt: skip


def supports_dual_bf16x2(
    x: Tensor,
    fmt: str,
    granularity: str,
    given: bool = False,
    index: RowIndex = EVERY_ROW,
    granularity_t: str | None = None,
) -> bool:
    """Whether `launch_dual_bf16x2` takes these arguments. It reads words, so x must be aligned to them.

    given: the scale is, so that codes must saturate, as FP8's conversions do.
    """
    pair = granularity, granularity_t or granularity
    if x.dtype is not torch.bfloat16 or any(number % 16 for number in (*index.shape(x), x.storage_offset())):
        return False
    if given:
        return fmt in ("e4m3", "e5m2") and pair == ("tensorwise", "tensorwise")
    return fmt in EIGHT_BITS and pair in PAIRS


def launch_dual_bf16x2(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    *,
    granularity_t: str | None = None,
    swiglu: bool = False,
    dy: Tensor | None = None,
    row_dots: Tensor | None = None,
    tensor_amax: Tensor | None = None,
    row_column_amax: tuple[Tensor, Tensor] | None = None,
    groups: BlockGroups | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    index: RowIndex = EVERY_ROW,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel for `quantize_ref` and `quantize_transposed_ref` at once: codes, scale, codes_t, scale_t.

    x contiguous, not empty, `supports_dual_bf16x2`. scale: fp32 [1], given. amax: int32 [1] of zeros, receives the fp32
    bits of x's absmax; only with `scale`. granularity_t: of codes_t, if it is not granularity. swiglu: quantizes
    swiglu(x) or, with dy, the gradient of x; x [M, 2I], I a multiple of BLOCK. row_dots: fp32 [M, I / BLOCK], receives
    `swiglu.row_dots_ref`; with dy. tensor_amax, row_column_amax: fp32 bits of the absmax of x (tensorwise), or of its
    rows and of its columns (rowwise), int32, if known. groups: of rows with column scales of their own (rowwise). out:
    memory for the result. index: the rows of what is quantized are gathered from x [T, K]; without swiglu.
    """
    granularity_t = granularity_t or granularity
    m, k = index.shape(x)
    k = k // 2 if swiglu and dy is None else k
    given, source, source_t = scale is not None, scale, None
    assert not swiglu or given or (granularity, granularity_t) in BLOCK_PAIRS, "no absmax pass for that scale"
    if granularity == "rowwise":
        source, source_t = row_column_amax or launch_absmax(x, rows=True, columns=True, groups=groups, index=index)[1:]
    elif granularity == "tensorwise" and not given:
        source = launch_absmax(x, tensor=True, index=index.values)[0] if tensor_amax is None else tensor_amax
    if out is None:
        codes, codes_t = (x.new_empty(shape, dtype=FORMATS[fmt].dtype) for shape in ((m, k), (k, m)))
        scale, scale_t = empty_scale(granularity, m, k, x), empty_scale(granularity_t, k, m, x)
    else:
        codes, scale, codes_t, scale_t = out
    grouped = groups is not None
    if grouped:
        scale_t = launch_group_scales(source_t, fmt, power_of_two)
    _dual_kernel[(triton.cdiv(m, BLOCK) * triton.cdiv(k, BLOCK),)](
        x.view(torch.int32), *index, None if dy is None else dy.view(torch.int32), row_dots,
        codes.view(torch.int16), codes_t.view(torch.int32), scale, None if grouped else scale_t,
        source, source_t, amax, groups.of_block if grouped else None, rounding.key, rounding.role, m, k,
        scale.stride(0), scale_t.stride(0),
        "" if not swiglu else "forward" if dy is None else "backward",
        rounding.row_key is not None, rounding.column_key is not None,
        *(("given", "given") if given else (granularity, granularity_t)),
        encoding(fmt, x.device, power_of_two), m % BLOCK == k % BLOCK == 0, BLOCK,
        num_warps=WARPS if dy is None else WARPS_OF_GRADIENT,
        maxnreg=REGISTERS if dy is None else REGISTERS_OF_GRADIENT,
        enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, codes_t, scale_t

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

from dataclasses import dataclass
from typing import NamedTuple

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
from qtrain.kernels.numerics.encode import Encoding, encoding, inv_scale_of, scale_from_amax
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_scale
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_key
from qtrain.kernels.quantize.absmax import launch_absmax
from qtrain.kernels.quantize.column_groups import BlockGroups, group_of_row, launch_group_scales
from qtrain.kernels.quantize.dual_tile import (
    block_column_scales,
    block_row_scales,
    inside_of_tile,
    load_swiglu_grads,
    load_tile,
    max_of_four,
    max_of_tile,
    offset_of_tile,
    record_tile_amax,
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


class Tile(NamedTuple):
    """What a CTA quantizes."""

    rows: int
    columns: int
    warps: int
    registers: int | None
    """Of a thread; None: as many as the compiler takes."""


def tile_of(swiglu: str, scales: str) -> Tile:
    """Of what is quantized and the row codes' scales, as in `DualCode`. Measured on an H200, to nearest and stochastic:
    with eight warps of few registers a SwiGLU's arithmetic hides behind loads, 95% of the copy bandwidth; with four of
    168 registers it took a fifth longer."""
    if swiglu == "both":
        return Tile(64, 64, 4, None)
    if scales == "given":
        return Tile(64, BLOCK, 8 if swiglu else 4, None)
    if scales == "1x128" and swiglu:
        return Tile(BLOCK, BLOCK, 8, 128)
    if scales in ("1x128", "rowwise"):
        return Tile(BLOCK, BLOCK, 4, 168)
    return Tile(BLOCK, BLOCK, 8, None if swiglu == "forward" else 80)


@dataclass(frozen=True)
class DualCode(Encoding):
    """Both layouts' codes, as one constexpr: their encoding, scales and rounding."""

    scales: str
    """Granularity of the row codes' scales, of `PAIRS`; "given": one scale in memory for both layouts."""
    scales_t: str
    """The same of the transposed codes."""
    stochastic: bool
    stochastic_t: bool
    even: bool
    """m and k are multiples of the tile: no masks."""
    swiglu: str
    """What is quantized: "": x; "forward": swiglu(x); "backward": the gradient of x, a tile of gate's or of up's a CTA;
    "both": of both, which read the same gate and dy."""
    block_m: int
    block_k: int


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


@triton.jit
def column_block(tile_k, tiles_k, CODE: tl.constexpr):
    """The block of columns of a tile's number: in a SwiGLU's gradient, tiles of gate and of up that read the same words
    are neighbors."""
    return tile_k % 2 * (tiles_k // 2) + tile_k // 2 if CODE.swiglu == "backward" else tile_k


@triton.jit(do_not_specialize=["role", "stride", "stride_t"])
def _dual_kernel(
    # What is quantized, an [m, k] bf16 in words of two: x, or rows gathered from it (token_ptr int32 [m], weight_ptr
    # fp32 [m], or None), or of a SwiGLU (x [m, 2k] forward; dy [m, k / 2] backward), as `load_tile` says.
    # dots_ptr fp32 [m, k / 2 / BLOCK]: receives a SwiGLU's `router_dots`, or None.
    x_ptrs,  # (x_ptr, token_ptr, weight_ptr, dy_ptr, dots_ptr)
    # int16 words of two codes [m, k / 2]; int32 words of four codes [k, m / 4]; their fp32 scales, laid out as
    # `empty_scale`; scale_t_ptr None: the columns of groups have theirs already.
    out_ptrs,  # (codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr)
    # int32 bits of absmaxes: [1] tensorwise, [m] and [groups * k] rowwise; or fp32 [1] given; else not read. amax_ptr
    # int32 [1]: receives the bits of the absmax of what is quantized under a given scale, or None.
    source_ptrs,  # (source_ptr, source_t_ptr, amax_ptr)
    # int32 [m / 128], or None: the group of each block of rows, whose columns have maxima of their own at source_t_ptr;
    # under a given scale blocks of no group are left out.
    group_ptr,
    # int64 [3] (seed, step, tensor), or None if neither layout is stochastic.
    key_ptr, role,
    # (m, k), multiples of 16; of the scales of blocks, from one row of blocks to the next.
    sizes, stride, stride_t, CODE: tl.constexpr,
):  # fmt: skip
    """A tile of block_m x block_k elements per CTA, or two of them. CODE: a `DualCode`."""
    source_ptr, source_t_ptr, amax_ptr = source_ptrs
    m, k = sizes
    tile = tl.program_id(0)
    if CODE.scales == "rowwise" or CODE.scales == "tensorwise":  # reversed: the absmax pass read the last tiles last
        tile = tl.num_programs(0) - 1 - tile
    # Across x, or of both gradients across a half of it.
    tiles_k = tl.cdiv(k // 2 if CODE.swiglu == "both" else k, CODE.block_k)
    at = tile // tiles_k, column_block(tile % tiles_k, tiles_k, CODE)
    if group_ptr is not None:
        if CODE.scales == "given":
            # The first block stores the scale.
            first = at[0] * CODE.block_m
            if (tl.load(group_ptr + first // 128) < 0) & (first >= 128):
                return
        else:
            source_t_ptr += group_of_row(group_ptr, at[0] * CODE.block_m) * k
    # Scalars that a tile's end waits for are loaded before the tile.
    given, known_amax = None, 0
    if CODE.scales == "given":
        given = tl.load(source_ptr)
    if amax_ptr is not None:
        known_amax = tl.load(amax_ptr)  # a stale value is as good, and few CTAs exceed it
    scales, amax, random = (source_ptr, source_t_ptr), (amax_ptr, known_amax), (key_ptr, role)
    sizes_out = m, k, stride, stride_t
    if CODE.swiglu == "both":
        gate, up = load_swiglu_grads(x_ptrs, at, sizes, CODE)
        quantize_tile(gate, at, out_ptrs, scales, given, amax, random, sizes_out, CODE)
        quantize_tile(up, (at[0], tiles_k + at[1]), out_ptrs, scales, given, amax, random, sizes_out, CODE)
    else:
        x = load_tile(x_ptrs, at, sizes, CODE)
        quantize_tile(x, at, out_ptrs, scales, given, amax, random, sizes_out, CODE)


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
    router_dots: Tensor | None = None,
    tensor_amax: Tensor | None = None,
    row_column_amax: tuple[Tensor, Tensor] | None = None,
    groups: BlockGroups | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    index: RowIndex = EVERY_ROW,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel for `quantize_ref` and `quantize_transposed_ref` at once: codes, scale, codes_t, scale_t.

    x contiguous, not empty, `supports_dual_bf16x2`. scale: fp32 [1], given. amax: int32 [1] of zeros, receives the fp32
    bits of x's absmax; only with `scale`. granularity_t: of codes_t, if it is not granularity. swiglu: quantizes
    swiglu(x) or, with dy, the gradient of x; x [M, 2I], I a multiple of BLOCK. router_dots: fp32 [M, I / BLOCK],
    receives `swiglu.router_dots_ref`; with dy. tensor_amax, row_column_amax: fp32 bits of the absmax of x (tensorwise),
    or of its rows and of its columns (rowwise), int32, if known. groups: of rows with column scales of
    their own (rowwise). out: memory for the result. index: the rows of what is quantized are gathered from x [T, K];
    without swiglu. held: `group_of_block` of rows of which those of no group are not written; with `scale`.
    """
    granularity_t = granularity_t or granularity
    m, k = index.shape(x)
    k = k // 2 if swiglu and dy is None else k  # of what is quantized: y is half as wide as x
    given, source, source_t = scale is not None, scale, None  # source: what the kernel derives scales from
    assert not swiglu or given or (granularity, granularity_t) in BLOCK_PAIRS, "no absmax pass for that scale"
    assert held is None or given, "rows are left out under a given scale alone"
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
        assert source_t is not None
        scale_t = launch_group_scales(source_t, fmt, power_of_two)  # fp32 [groups * K], also of groups without rows
    source_of_codes = "" if not swiglu else "forward" if dy is None else "both" if given else "backward"
    tile = tile_of(source_of_codes, "given" if given else granularity)
    if router_dots is not None:  # those of BLOCK columns
        tile = tile._replace(columns=BLOCK)
    code = DualCode(
        **vars(encoding(fmt, x.device, power_of_two)),
        scales="given" if given else granularity,
        scales_t="given" if given else granularity_t,
        stochastic=rounding.row_key is not None,
        stochastic_t=rounding.column_key is not None,
        even=m % tile.rows == k % tile.columns == 0,
        swiglu=source_of_codes,
        block_m=tile.rows,
        block_k=tile.columns,
    )
    tiles_k = triton.cdiv(k, tile.columns) // (2 if source_of_codes == "both" else 1)
    _dual_kernel[(triton.cdiv(m, tile.rows) * tiles_k,)](
        (x.view(torch.int32), *index, None if dy is None else dy.view(torch.int32), router_dots),
        (codes.view(torch.int16), codes_t.view(torch.int32), scale, None if grouped else scale_t),
        (source, source_t, amax), groups.group_of_block if grouped else held, rounding.key, rounding.role,
        (m, k), scale.stride(0), scale_t.stride(0), CODE=code,
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, codes_t, scale_t

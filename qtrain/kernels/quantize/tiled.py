"""Quantizes by tiles, in any format: row codes, transposed column codes, or both, from one read of a tile.

A scale whose group fits in a tile (1x128, 128x128, 32x32, in either layout) is computed in the tile. Scales of whole
rows, of whole columns or of the tensor take an absmax pass first; the tiles are then processed in reverse order, to
start with what that pass read last, which may still be in cache.

Both layouts are described in coordinates of x: group_m rows by group_k columns of a tile share a scale, and the scale
of group (i, j) of x is at i * stride_i + j * stride_j.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import (
    Encoding,
    abs_bits,
    encode,
    encoding,
    inv_scale_of,
    pack_codes,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.numerics.formats import GRANULARITIES, empty_codes, empty_scale
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_bits
from qtrain.kernels.quantize.absmax import launch_absmax
from qtrain.kernels.quantize.column_groups import BlockGroups, group_of_row, launch_group_scales


@dataclass(frozen=True)
class TileLayout(Encoding):
    """One layout's codes, as a constexpr: their encoding, and which elements of a tile share a scale."""

    in_tile: bool
    """A scale's group fits in a tile."""
    group_m: int
    group_k: int


@triton.jit
def _expand_groups(values, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr):
    """One value per group [DOWN, ACROSS] -> one per element [DOWN * GROUP_M, ACROSS * GROUP_K]."""
    DOWN: tl.constexpr = values.shape[0]
    ACROSS: tl.constexpr = values.shape[1]
    if (DOWN == 1 or GROUP_M == 1) and (ACROSS == 1 or GROUP_K == 1):
        return tl.broadcast_to(values, (DOWN * GROUP_M, ACROSS * GROUP_K))
    else:
        # Two axes more, of the elements of a group; merged with the groups they are rows and columns again.
        wide = tl.broadcast_to(values[:, None, :, None], (DOWN, GROUP_M, ACROSS, GROUP_K))
        return tl.reshape(wide, (DOWN * GROUP_M, ACROSS * GROUP_K))


@triton.jit
def _group_max(bits, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr):
    """Bits of |x| of a tile -> the maximum of each group [DOWN, ACROSS]."""
    DOWN: tl.constexpr = bits.shape[0] // GROUP_M
    ACROSS: tl.constexpr = bits.shape[1] // GROUP_K
    if DOWN == 1 and ACROSS == 1:
        return tl.zeros((1, 1), tl.int32) + tl.max(tl.max(bits, 1), 0)
    elif GROUP_M == 1 and ACROSS == 1:
        return tl.max(bits, 1)[:, None]
    elif GROUP_K == 1 and DOWN == 1:
        return tl.max(bits, 0)[None, :]
    else:
        return tl.max(tl.max(tl.reshape(bits, (DOWN, GROUP_M, ACROSS, GROUP_K)), 3), 1)


@triton.jit
def _tile_scales(bits, source_ptr, scale_ptr, at, sizes, strides, GIVEN: tl.constexpr, LAYOUT: tl.constexpr):
    """One layout's scales of the tile at (tile_m, tile_k), [I, J], which are stored too (unless scale_ptr is None), and
    whether one of them is NaN or Inf.

    bits: of |x|, int32 [BLOCK_M, BLOCK_K]. source_ptr: the given scale, or bits of the absmax of whole rows, columns or
    the tensor. strides: of the scales, in coordinates of x.
    """
    tile_m, tile_k = at
    m, k = sizes
    stride_i, stride_j = strides
    BLOCK_M: tl.constexpr = bits.shape[0]
    BLOCK_K: tl.constexpr = bits.shape[1]
    GROUP_M: tl.constexpr = LAYOUT.group_m
    GROUP_K: tl.constexpr = LAYOUT.group_k
    i = (tile_m * (BLOCK_M // GROUP_M) + tl.arange(0, BLOCK_M // GROUP_M))[:, None]
    j = (tile_k * (BLOCK_K // GROUP_K) + tl.arange(0, BLOCK_K // GROUP_K))[None, :]
    index, inside = i * stride_i + j * stride_j, (i * GROUP_M < m) & (j * GROUP_K < k)
    if GIVEN:
        scale = tl.load(source_ptr + index, inside, 1.0)
        nonfinite = False
    else:
        if LAYOUT.in_tile:
            amax = _group_max(bits, GROUP_M, GROUP_K)
        else:
            amax = tl.load(source_ptr + index, inside, 0)
        nonfinite = tl.max(tl.max(amax, 0), 0) >= 0x7F800000
        scale = scale_from_amax(amax, LAYOUT)
    if scale_ptr is not None:
        # Where tiles share a scale, the first one stores it.
        first = inside & ((stride_i != 0) | (i == 0)) & ((stride_j != 0) | (j == 0))
        tl.store(scale_ptr + index, scale, first)
    return scale, nonfinite


@triton.jit
def _store_codes(ptr, codes, tile_i, tile_j, m, n, PACKING: tl.constexpr):
    """Stores codes [R, C] as tile (i, j) of a matrix [m, n] whose rows are packed."""
    i = tile_i * codes.shape[0] + tl.arange(0, codes.shape[0])
    byte = tile_j * (codes.shape[1] // PACKING) + tl.arange(0, codes.shape[1] // PACKING)
    inside = (i < m)[:, None] & (byte * PACKING < n)[None, :]
    ptrs = ptr + i.to(tl.int64)[:, None] * tl.cdiv(n, PACKING) + byte[None, :]
    tl.store(ptrs, pack_codes(codes, PACKING), inside)


@triton.jit(do_not_specialize=["role", "stride_i", "stride_j", "stride_i_t", "stride_j_t"])
def _tiles_kernel(
    # fp32 or bf16 [m, k], contiguous.
    x_ptr,
    # int8 [m, ceil(k / packing)] and [k, ceil(m / packing)]; None for a layout that is not requested.
    codes_ptr, codes_t_ptr,
    # fp32 scales; scale_t_ptr None: the columns of groups have theirs already.
    scale_ptr, scale_t_ptr,
    # Where a scale is larger than a tile: int32 bits of the absmaxes, or the fp32 scales themselves (GIVEN).
    source_ptr, source_t_ptr,
    # int32 [1]: receives the bits of x's absmax; or None.
    amax_ptr,
    # int32 [m / 128]: the group of each block of rows, whose columns have theirs at source_t_ptr; or None.
    group_ptr,
    # int64 [3] (seed, step, tensor), or None.
    key_ptr, role, m, k,
    # Of the scales, in coordinates of x; 0 where all rows or all columns share one.
    stride_i, stride_j, stride_i_t, stride_j_t,
    # The layouts (TileLayout), None for one that is not requested. SAME: both have the same codes.
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SAME: tl.constexpr, GIVEN: tl.constexpr, STOCHASTIC: tl.constexpr,
    # RELOAD: the tile is read again, from cache, after its absmax: fewer live registers, higher occupancy.
    REVERSED: tl.constexpr, RELOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x per CTA: scales, then codes, of one layout or of both from one read."""
    tiles_k = tl.cdiv(k, BLOCK_K)
    tile = tl.program_id(0)
    if REVERSED:
        tile = tl.num_programs(0) - 1 - tile
    tile_m, tile_k = tile // tiles_k, tile % tiles_k
    rows, columns = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * k + columns[None, :]
    x = tl.load(x_ptrs, inside, 0.0)
    bits = abs_bits(x)
    if amax_ptr is not None:
        amax = tl.max(tl.max(bits, 1), 0)
        if amax > tl.load(amax_ptr):  # a stale value is as good, and few CTAs exceed it
            tl.atomic_max(amax_ptr, amax, sem="relaxed")
    nonfinite = False
    if group_ptr is not None:
        source_t_ptr += group_of_row(group_ptr, tile_m * BLOCK_M) * k  # [groups, k]
    if COLUMNS is not None:
        scale_t, nonfinite = _tile_scales(
            bits, source_t_ptr, scale_t_ptr, (tile_m, tile_k), (m, k), (stride_i_t, stride_j_t), GIVEN, COLUMNS
        )
    if ROWS is not None:
        scale, nonfinite_row = _tile_scales(
            bits, source_ptr, scale_ptr, (tile_m, tile_k), (m, k), (stride_i, stride_j), GIVEN, ROWS
        )
        nonfinite = nonfinite | nonfinite_row
    noise = 0
    if STOCHASTIC:  # k is a multiple of 8 here, so the eight elements of a draw share a row
        first = tile_k * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
        # Without PTX: mul.wide would take the registers that let one more CTA share an SM.
        noise = philox_bits(rows.to(tl.int64)[:, None] * (k // 8) + first[None, :], key_ptr, role, False)
    if RELOAD:
        x = tl.load(x_ptrs, inside, 0.0)
    # A group with a NaN or an Inf has a non-finite scale, and codes of zero, so that products with it are NaN.
    x = zero_nonfinite(x, nonfinite)
    if ROWS is not None:
        inv_scale = _expand_groups(inv_scale_of(scale, nonfinite), ROWS.group_m, ROWS.group_k)
        codes = encode(x, inv_scale, noise, STOCHASTIC, GIVEN, ROWS)
        _store_codes(codes_ptr, codes, tile_m, tile_k, m, k, ROWS.fmt.packing)
    if COLUMNS is not None:
        if SAME:
            codes_t = codes
        else:
            inv_scale_t = _expand_groups(inv_scale_of(scale_t, nonfinite), COLUMNS.group_m, COLUMNS.group_k)
            codes_t = encode(x, inv_scale_t, noise, STOCHASTIC, GIVEN, COLUMNS)
        _store_codes(codes_t_ptr, tl.trans(codes_t), tile_k, tile_m, k, m, COLUMNS.fmt.packing)


@dataclass(frozen=True)
class Tile:
    """Rows and columns of x per CTA, its warps, and RELOAD of the kernel."""

    block_m: int
    block_k: int
    warps: int
    reload: bool = False


def _tile(fmt: str, granularity: str | None, granularity_t: str | None, stochastic: bool) -> Tile:
    """Tuned on an H200. A scale's group must fit; otherwise tiles are small, for occupancy."""
    if "128x128" in (granularity, granularity_t):
        return Tile(128, 128, 8)
    if "1x128" in (granularity, granularity_t):
        return Tile(128, 128, 4, True) if stochastic or fmt == "int8" else Tile(128, 128, 8)
    if stochastic and granularity == granularity_t == "rowwise":
        return Tile(128, 64, 4)
    return Tile(64, 128, 4)


def _layout(
    code: Encoding, granularity: str, shape: tuple[int, int], block: tuple[int, int], transposed: bool
) -> tuple[TileLayout, tuple[int, ...]]:
    """The layout, and strides (i, j) of its scales, of a matrix of this shape in tiles of this block.

    transposed: shape and block are those of the transpose of x; the result is in coordinates of x.
    """
    # A scale without a limit along a side (None) is shared by the whole tile there.
    group = [size or side for size, side in zip(GRANULARITIES[granularity], block, strict=True)]
    strides = {"tensorwise": (0, 0), "rowwise": (1, 0)}.get(granularity)
    in_tile = strides is None  # blocks: the tile has the whole of each
    # The strides that cuBLAS wants, read off a meta tensor: nothing is allocated.
    strides = strides or empty_scale(granularity, *shape, torch.empty(0, device="meta")).stride()
    order = -1 if transposed else 1
    group_m, group_k = group[::order]
    return TileLayout(**vars(code), in_tile=in_tile, group_m=group_m, group_k=group_k), strides[::order]


def launch_tiled(
    x: Tensor,
    fmt: str,
    granularity: str | None,
    granularity_t: str | None,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    fmt_t: str | None = None,
    scale_t: Tensor | MaybeNone = None,
    amax: Tensor | None = None,
    *,
    groups: BlockGroups | None = None,
    tile: Tile | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """The kernels for `quantize_ref` and `quantize_transposed_ref`: a list of codes and scale of each granularity that
    is given. out: memory for those of `granularity`.

    x contiguous, not empty; K % 8 == 0 with a key; two layouts are rounded the same way. scale, scale_t: given scales.
    amax: int32 [1] of zeros, receives the fp32 bits of x's absmax. groups: of rows with scales of their own along
    columns (granularity_t rowwise).
    """
    m, k = x.shape
    assert rounding.same or not (granularity and granularity_t), "the kernel rounds both layouts the same way"
    key = rounding.row_key if granularity else rounding.column_key
    tile = tile or _tile(fmt, granularity, granularity_t, key is not None)
    block_m, block_k = tile.block_m, tile.block_k
    fmt_t, given = fmt_t or fmt, scale is not None or scale_t is not None
    source, source_t = scale, scale_t
    absmax_pass = not given and bool({"tensorwise", "rowwise"} & {granularity, granularity_t})
    if absmax_pass:
        tensor_amax, row_amax, column_amax = launch_absmax(
            x,
            "tensorwise" in (granularity, granularity_t),
            granularity == "rowwise",
            granularity_t == "rowwise",
            groups,
        )
        # int32 bits; where one layout is tensorwise and the other rowwise, the same pass found both.
        source = tensor_amax if granularity == "tensorwise" else row_amax
        source_t = tensor_amax if granularity_t == "tensorwise" else column_amax
    group_scale = None
    if groups is not None:
        group_scale = scale_t.clone() if given else launch_group_scales(source_t, fmt_t, power_of_two)
    rows = columns = strides = strides_t = codes = scale = codes_t = scale_t = None
    if granularity:  # rows: [m, k] in tiles of (block_m, block_k)
        code = encoding(fmt, x.device, power_of_two)
        rows, strides = _layout(code, granularity, (m, k), (block_m, block_k), False)
        codes, scale = empty_codes(x, fmt, granularity) if out is None else out
    if granularity_t:  # columns: the transpose [k, m] in transposed tiles, described in coordinates of x
        code = encoding(fmt_t, x.device, power_of_two)
        columns, strides_t = _layout(code, granularity_t, (k, m), (block_k, block_m), True)
        codes_t, scale_t = empty_codes(x, fmt_t, granularity_t, transposed=True)
    if groups is not None:
        scale_t = None
    same = rows is not None and rows == columns and (source is source_t or rows.in_tile)
    # Triton 3.6 stores wrong transposed codes where FP8 codes under a scale of the tile are stored twice.
    same = same and not (rows is not None and rows.in_tile and rows.fmt.is_float)
    # A layout that is not requested gets the other's strides: integers, which the kernel does not read.
    strides, strides_t = strides or strides_t or (0, 0), strides_t or strides or (0, 0)
    _tiles_kernel[(triton.cdiv(m, block_m) * triton.cdiv(k, block_k),)](
        x,
        codes_ptr=None if codes is None else codes.view(torch.int8),
        codes_t_ptr=None if codes_t is None else codes_t.view(torch.int8),
        scale_ptr=scale, scale_t_ptr=scale_t, source_ptr=source, source_t_ptr=source_t, amax_ptr=amax,
        group_ptr=None if groups is None else groups.group_of_block, key_ptr=key, role=rounding.role, m=m, k=k,
        stride_i=strides[0], stride_j=strides[1], stride_i_t=strides_t[0], stride_j_t=strides_t[1],
        ROWS=rows, COLUMNS=columns, SAME=same, GIVEN=given, STOCHASTIC=key is not None,
        REVERSED=absmax_pass, RELOAD=tile.reload, BLOCK_M=block_m, BLOCK_K=block_k,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    scale_t = scale_t if group_scale is None else group_scale
    return [t for t in (codes, scale, codes_t, scale_t) if t is not None]

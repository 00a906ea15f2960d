"""Quantizes by tiles: codes along rows, transposed codes along columns, or both, from one read of a tile.

A scale whose group fits in a tile (1x128, 128x128, 32x32, on either side) is computed there. Scales of whole rows, of
whole columns or of the tensor come from a pass before it, which leaves their absmax; this pass then starts with the
tiles that the first one read last, which may still be in cache.

Both sides are told to the kernel in the same words, in coordinates of x: GROUP_M rows by GROUP_K columns of the tile
share a scale, and group (i, j) of x has its scale at i * stride_i + j * stride_j.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import (
    abs_bits,
    casts_to_fp8,
    encode,
    inv_scale_of,
    packed,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, Format, codes_shape, empty_scale
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, philox_bits
from qtrain.kernels.numerics.rounding import NEAREST, Rounding
from qtrain.kernels.quantize.absmax import launch_absmax


@triton.jit
def _spread(values, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr):
    """One value a group [DOWN, ACROSS] -> one an element [DOWN * GROUP_M, ACROSS * GROUP_K]."""
    DOWN: tl.constexpr = values.shape[0]
    ACROSS: tl.constexpr = values.shape[1]
    if (DOWN == 1 or GROUP_M == 1) and (ACROSS == 1 or GROUP_K == 1):
        return tl.broadcast_to(values, (DOWN * GROUP_M, ACROSS * GROUP_K))
    else:
        wide = tl.broadcast_to(values[:, None, :, None], (DOWN, GROUP_M, ACROSS, GROUP_K))
        return tl.reshape(wide, (DOWN * GROUP_M, ACROSS * GROUP_K))


@triton.jit
def _group_max(bits, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr):
    """Bits of |x| of a tile -> the largest of each group [DOWN, ACROSS]."""
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
def _scales(
    bits, source_ptr, scale_ptr, tile_m, tile_k, m, k, stride_i, stride_j,
    IN_TILE: tl.constexpr, GIVEN: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    GROUP_M: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One side's scales of this tile [I, J], stored too, and whether one of them is NaN or Inf."""
    i = (tile_m * (BLOCK_M // GROUP_M) + tl.arange(0, BLOCK_M // GROUP_M))[:, None]
    j = (tile_k * (BLOCK_K // GROUP_K) + tl.arange(0, BLOCK_K // GROUP_K))[None, :]
    index, inside = i * stride_i + j * stride_j, (i * GROUP_M < m) & (j * GROUP_K < k)
    if GIVEN:
        scale = tl.load(source_ptr + index, inside, 1.0)
        bad = False
    else:
        if IN_TILE:
            absmax = _group_max(bits, GROUP_M, GROUP_K)
        else:
            absmax = tl.load(source_ptr + index, inside, 0)
        bad = tl.max(tl.max(absmax, 0), 0) >= 0x7F800000
        scale = scale_from_amax(absmax, LARGEST, POWER_OF_TWO)
    # Where many tiles share a scale, the first one stores it.
    once = inside & ((stride_i != 0) | (i == 0)) & ((stride_j != 0) | (j == 0))
    tl.store(scale_ptr + index, scale, once)
    return scale, bad


@triton.jit(do_not_specialize=["role", "stride_i", "stride_j", "stride_i_t", "stride_j_t"])
def _tiles_kernel(
    x_ptr, codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr, source_ptr, source_t_ptr, absmax_ptr, key_ptr, role, m, k,
    stride_i, stride_j, stride_i_t, stride_j_t,
    FMT: tl.constexpr, LARGEST: tl.constexpr, PACKING: tl.constexpr,
    IN_TILE: tl.constexpr, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr,
    FMT_T: tl.constexpr, LARGEST_T: tl.constexpr, PACKING_T: tl.constexpr,
    IN_TILE_T: tl.constexpr, GROUP_M_T: tl.constexpr, GROUP_K_T: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SAME: tl.constexpr, ABSMAX: tl.constexpr,
    GIVEN: tl.constexpr, POWER_OF_TWO: tl.constexpr, STOCHASTIC: tl.constexpr, N_ROLES: tl.constexpr,
    CAST: tl.constexpr, BACKWARDS: tl.constexpr, RELOAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ROWS, COLUMNS: the sides that are wanted. SAME: both have the same scales and format. ABSMAX: wanted too.

    RELOAD: read the tile again, from cache, after its absmax: fewer registers, so that more programs run at a time.
    """
    tiles_k = tl.cdiv(k, BLOCK_K)
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = tl.num_programs(0) - 1 - tile
    tile_m, tile_k = tile // tiles_k, tile % tiles_k
    rows, columns = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * k + columns[None, :]
    x = tl.load(x_ptrs, inside, 0.0)
    bits = abs_bits(x)
    if ABSMAX:
        largest = tl.max(tl.max(bits, 1), 0)
        if largest > tl.load(absmax_ptr):  # an old value is as good, and hardly any program has more to say
            tl.atomic_max(absmax_ptr, largest, sem="relaxed")
    bad = False
    if COLUMNS:
        scale_t, bad = _scales(
            bits, source_t_ptr, scale_t_ptr, tile_m, tile_k, m, k, stride_i_t, stride_j_t,
            IN_TILE_T, GIVEN, LARGEST_T, POWER_OF_TWO, GROUP_M_T, GROUP_K_T, BLOCK_M, BLOCK_K,
        )  # fmt: skip
    if ROWS:
        scale, bad_row = _scales(
            bits, source_ptr, scale_ptr, tile_m, tile_k, m, k, stride_i, stride_j,
            IN_TILE, GIVEN, LARGEST, POWER_OF_TWO, GROUP_M, GROUP_K, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        bad = bad | bad_row
    noise = 0
    if STOCHASTIC:  # k is a multiple of 8 here, so that the eight elements of a draw share a row
        first = tile_k * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
        # The GPU's own product would take a program's last registers here, and one fewer would share a multiprocessor.
        noise = philox_bits(rows.to(tl.int64)[:, None] * (k // 8) + first[None, :], key_ptr, role, N_ROLES, False)
    if RELOAD:
        x = tl.load(x_ptrs, inside, 0.0)
    x = zero_nonfinite(x, bad)
    if ROWS:
        reciprocal = _spread(inv_scale_of(scale, bad), GROUP_M, GROUP_K)
        codes = encode(x, reciprocal, noise, FMT, LARGEST, STOCHASTIC, GIVEN, CAST)
        byte = tile_k * (BLOCK_K // PACKING) + tl.arange(0, BLOCK_K // PACKING)
        stored = (rows < m)[:, None] & (byte * PACKING < k)[None, :]
        ptrs = codes_ptr + rows.to(tl.int64)[:, None] * tl.cdiv(k, PACKING) + byte[None, :]
        tl.store(ptrs, packed(codes, PACKING), stored)
    if COLUMNS:
        if SAME:
            codes_t = codes
        else:
            reciprocal_t = _spread(inv_scale_of(scale_t, bad), GROUP_M_T, GROUP_K_T)
            codes_t = encode(x, reciprocal_t, noise, FMT_T, LARGEST_T, STOCHASTIC, GIVEN, CAST)
        byte = tile_m * (BLOCK_M // PACKING_T) + tl.arange(0, BLOCK_M // PACKING_T)
        stored = (columns < k)[:, None] & (byte * PACKING_T < m)[None, :]
        ptrs = codes_t_ptr + columns.to(tl.int64)[:, None] * tl.cdiv(m, PACKING_T) + byte[None, :]
        tl.store(ptrs, packed(tl.trans(codes_t), PACKING_T), stored)


@dataclass(frozen=True)
class Tile:
    """What a program takes of x, and how."""

    block_m: int
    block_k: int
    warps: int
    reload: bool = False


def _tile(fmt: str, granularity: str | None, granularity_t: str | None, stochastic: bool) -> Tile:
    """The fastest on an H200. A scale's group must fit; what is left free is small, so that many programs are at it."""
    if "128x128" in (granularity, granularity_t):
        return Tile(128, 128, 8)
    if "1x128" in (granularity, granularity_t):
        return Tile(128, 128, 4, True) if stochastic or fmt == "int8" else Tile(128, 128, 8)
    if stochastic and granularity == granularity_t == "rowwise":
        return Tile(128, 64, 4)
    return Tile(64, 128, 4)


@dataclass(frozen=True)
class _Side:
    """What the kernel is told of the codes along rows, or of those along columns, of x [M, K]."""

    fmt: Format
    shape: tuple[int, int]  # of what is coded: x or its transpose
    granularity: str
    in_tile: bool  # the scale's group fits in a tile
    group: tuple[int, int]  # rows and columns of x in a tile that share a scale
    strides: tuple[int, int]  # of the scale, in groups down and across x

    @classmethod
    def of(cls, fmt: str, granularity: str, shape: tuple[int, int], block: tuple[int, int]) -> "_Side":
        """The side along rows of a matrix of this shape in tiles of this block."""
        rows, columns = (size or side for size, side in zip(GRANULARITIES[granularity], block, strict=True))
        strides = {"tensorwise": (0, 0), "rowwise": (1, 0)}.get(granularity)
        in_tile = strides is None
        strides = strides or empty_scale(granularity, *shape, torch.empty(0, device="meta")).stride()
        return cls(FORMATS[fmt], shape, granularity, in_tile, (rows, columns), strides)

    def transposed(self) -> "_Side":
        """As seen in coordinates of the transpose."""
        return _Side(self.fmt, self.shape, self.granularity, self.in_tile, self.group[::-1], self.strides[::-1])

    @property
    def constants(self) -> tuple:
        return self.fmt.name, self.fmt.max, self.fmt.packing, self.in_tile, *self.group

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, scale, on the device of x."""
        codes = x.new_empty(codes_shape(self.fmt.name, *self.shape), dtype=self.fmt.dtype)
        return codes, empty_scale(self.granularity, *self.shape, x)


def launch_tiled(
    x: Tensor,
    fmt: str,
    granularity: str | None,
    granularity_t: str | None,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    fmt_t: str | None = None,
    scale_t: Tensor | None = None,
    absmax: Tensor | None = None,
    *,
    tile: Tile | None = None,
    absmax_options: dict | None = None,
) -> list[Tensor]:
    """The kernels for `quantize_ref` and `quantize_transposed_ref`: (codes, scale) of each granularity that is given.

    x contiguous, not empty; K % 8 == 0 with a key; two layouts are rounded the same way. scale, scale_t: given.
    absmax: int32 [1] of zeros, to receive the bits of x's.
    """
    m, k = x.shape
    assert rounding.same or not (granularity and granularity_t), "the kernel rounds both layouts the same way"
    key = rounding.row_key if granularity else rounding.column_key
    tile = tile or _tile(fmt, granularity, granularity_t, key is not None)
    block_m, block_k = tile.block_m, tile.block_k
    rows = granularity and _Side.of(fmt, granularity, (m, k), (block_m, block_k))
    columns = granularity_t and _Side.of(fmt_t or fmt, granularity_t, (k, m), (block_k, block_m)).transposed()
    given = scale is not None or scale_t is not None
    source, source_t, backwards = scale, scale_t, False
    found = {g: g in (granularity, granularity_t) for g in ("tensorwise", "rowwise")}
    if not given and any(found.values()):
        of_tensor, of_rows, of_columns = launch_absmax(
            x, found["tensorwise"], granularity == "rowwise", granularity_t == "rowwise", **(absmax_options or {})
        )
        source = of_tensor if granularity == "tensorwise" else of_rows
        source_t = of_tensor if granularity_t == "tensorwise" else of_columns
        backwards = True
    codes, scale = rows.outputs(x) if rows else (None, None)
    codes_t, scale_t = columns.outputs(x) if columns else (None, None)
    told, told_t = rows or columns, columns or rows
    same = bool(rows and columns) and rows.fmt == columns.fmt and rows.group == columns.group
    same = same and rows.in_tile == columns.in_tile and (source is source_t or rows.in_tile)
    # Triton 3.6 stores wrong transposed codes where FP8 codes under a scale of the tile's own are stored twice.
    same = same and not (rows.in_tile and rows.fmt.is_float)
    _tiles_kernel[(triton.cdiv(m, block_m) * triton.cdiv(k, block_k),)](
        x,
        None if codes is None else codes.view(torch.int8),
        None if codes_t is None else codes_t.view(torch.int8),
        scale, scale_t, source, source_t, absmax, key, rounding.role, m, k, *told.strides, *told_t.strides,
        *told.constants, *told_t.constants, rows is not None, columns is not None, same, absmax is not None,
        given, power_of_two, key is not None, len(ROUNDED_TENSORS), casts_to_fp8(x.device), backwards, tile.reload,
        block_m, block_k, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return [t for t in (codes, scale, codes_t, scale_t) if t is not None]

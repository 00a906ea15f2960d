"""2 to 64 rows times a weight on tensor cores, on tiles of BLOCK_N rows of the weight.

A small weight's K is split among CTAs, of which the last adds the parts, in a fixed order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.arrivals import arrival_counters, arrives_last
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.decode.dependent_launch import start_next, wait_for_previous
from qtrain.kernels.decode.operands import (
    Fused,
    Weight,
    field_values,
    finish,
    group_scales,
    in_words,
    kernel_spec,
    named,
    read_early,
    scale_of,
    strides_of,
    units_of,
)
from qtrain.kernels.decode.quantize_normed import normed, quantize_normed

MOST_PARTS = 16
"""CTAs along K, whose parts the last one adds."""


class Tile(NamedTuple):
    """BLOCK_N and bytes of a row; warps, stages; CTAs an SM for which K is split, 0: it is not split."""

    block_n: int
    bytes: int
    warps: int
    stages: int
    per_sm: int = 0

    def split(self, tiles: int, device: torch.device) -> int:
        """CTAs along K of each of `tiles` tiles."""
        return max(1, min(self.per_sm * sm_count(device) // tiles, MOST_PARTS))


@triton.jit
def _values(units, scales, FIELD: tl.constexpr, SPEC: tl.constexpr, DTYPE: tl.constexpr):
    """Units [rows, UNITS] as values in DTYPE, times the scales [rows, groups] of their groups."""
    value = field_values(units, FIELD, SPEC)
    if SPEC.group:
        ROWS: tl.constexpr = units.shape[0]
        UNITS: tl.constexpr = units.shape[1]
        GROUPS: tl.constexpr = scales.shape[1]
        repeated = tl.broadcast_to(scales[:, :, None], (ROWS, GROUPS, UNITS // GROUPS))
        value *= tl.reshape(repeated, (ROWS, UNITS))
    return value.to(DTYPE)


@triton.jit
def _tile_kernel(
    # As in _gemv_kernel, with x [m, k], where codes are packed [packing, m, k / packing], residual and y [m, n]; x is
    # normed already. Where x is codes, its scales, one a row, or one a row and group of K.
    x_ptr, x_scale_ptr, codes_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr,
    # fp32 or int32 [SPLIT, tiles, BLOCK_N, BLOCK_M]: sums over parts of K. int32 [tiles], zero: CTAs that have stored.
    parts_ptr, arrived_ptr,
    m, n, k, x_scale_row, x_scale_column, scale_row, scale_column,
    SPEC: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of y [m, n], transposed: the weight's rows are those of the accumulators, split over warps.
    SPLIT CTAs take a part of K each, and the last to arrive adds the parts."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    SUM: tl.constexpr = tl.int32 if tl.int8 == DTYPE and SPEC.group == 0 else tl.float32
    PACKING: tl.constexpr = SPEC.packing
    GROUPS: tl.constexpr = UNITS * PACKING // SPEC.group if SPEC.group else 1
    tile, part = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(columns, n - 1)  # of the weight
    width, groups = k // SPEC.packing, tl.cdiv(k, SPEC.group if SPEC.group else 1)
    each = tl.cdiv(tl.cdiv(width, UNITS), SPLIT) * UNITS
    row_ptr = codes_ptr + row.to(tl.int64) * width
    row_up_ptr = row_ptr + n.to(tl.int64) * width
    first, end = part * each, min(part * each + each, width)
    row_scale, row_bias, up_scale, up_bias = read_early(
        codes_ptr, scale_ptr, bias_ptr, row, columns < n, n, first, end, width, scale_row, SPEC
    )
    wait_for_previous(SPEC.prefetched > 0)
    offset = rows[None] * n + columns[:, None]
    inside = (columns < n)[:, None] & (rows < m)[None]
    residual = row_bias[:, None]
    if SPEC.residual:
        residual = tl.load(residual_ptr + offset, inside, 0.0)
    row_factor = row_scale[:, None]
    up_factor = up_scale[:, None]
    if SPEC.native and SPEC.group == 0:
        x_scale = tl.load(x_scale_ptr + rows * x_scale_row, rows < m, 0.0)[None]
        row_factor *= x_scale
        up_factor *= x_scale
    total = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    for start in tl.range(first, end, UNITS, num_stages=STAGES):
        place = start + tl.arange(0, UNITS)
        within = place < width
        units = tl.load(row_ptr[:, None] + place[None], within[None], 0.0)
        scales = units
        if SPEC.group:
            scales = group_scales(scale_ptr, row, start, groups, scale_row, scale_column, SPEC, GROUPS)
        if SPEC.swiglu:
            units_up = tl.load(row_up_ptr[:, None] + place[None], within[None], 0.0)
            scales_up = units_up
            if SPEC.group:
                scales_up = group_scales(scale_ptr, row + n, start, groups, scale_row, scale_column, SPEC, GROUPS)
        for field in tl.static_range(PACKING):
            x_row = x_ptr + (field * m + rows)[:, None] * width
            x = tl.load(x_row + place[None], (rows < m)[:, None] & within[None], 0.0)
            if SPEC.native and SPEC.group:
                group_ptr = x_scale_ptr + rows * x_scale_row + start // SPEC.group * x_scale_column
                group_scale = tl.load(group_ptr, rows < m, 0.0)[None]
                total += tl.dot(units, x.T).to(tl.float32) * scales * group_scale
                if SPEC.swiglu:
                    total_up += tl.dot(units_up, x.T).to(tl.float32) * scales_up * group_scale
            elif SPEC.native:
                total = tl.dot(units, x.T, total, out_dtype=SUM)
                if SPEC.swiglu:
                    total_up = tl.dot(units_up, x.T, total_up, out_dtype=SUM)
            else:
                total = tl.dot(_values(units, scales, field, SPEC, DTYPE), x.T, total, input_precision=PRECISION)
                if SPEC.swiglu:
                    value = _values(units_up, scales_up, field, SPEC, DTYPE)
                    total_up = tl.dot(value, x.T, total_up, input_precision=PRECISION)
    start_next(SPEC.prefetched > 0)
    last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + rows[None]
        size: tl.constexpr = BLOCK_M * BLOCK_N
        tl.store(parts_ptr + (part * tiles + tile) * size + offsets, total)
        last = arrives_last(arrived_ptr + tile, SPLIT)
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), SUM)
            for other in tl.static_range(SPLIT):
                total += tl.load(parts_ptr + (other * tiles + tile) * size + offsets, cache_modifier=".cg")
    if last:
        y = total.to(tl.float32) * row_factor + row_bias[:, None]
        up = total_up.to(tl.float32) * up_factor + up_bias[:, None]
        finish(y, up, residual, y_ptr, offset, inside, SPEC)


TILES: dict[str, Tile] = named(
    [
        Tile(64, 128, 4, 3),
        Tile(64, 256, 4, 4),
        Tile(32, 256, 2, 4),
        Tile(64, 256, 4, 3, 2),
        Tile(64, 256, 4, 3, 3),
        Tile(64, 128, 4, 4, 3),
    ]
)


def launch_tiles(x: Tensor, weight: Weight, fused: Fused, name: str) -> Tensor:
    """`weight_only_mm` of two rows or more by the kernel of this name in `TILES`."""
    (m, k), tile, spec = x.shape, TILES[name], kernel_spec(x, weight, fused)
    n = len(weight.codes) // 2 if fused.swiglu else len(weight.codes)
    y, x_scale = x.new_empty(m, n), x
    if spec.native and weight.fmt is not None:
        x, x_scale = quantize_normed(x, fused.norm, fused.eps, weight.fmt, "1x128" if spec.group else "rowwise")
    elif fused.norm is not None:
        x = normed(x, fused.norm, fused.eps)
    x, codes = in_words(x, weight.codes, spec)
    scale, strides = scale_of(weight, x)
    bias, residual = (x if t is None else t for t in (fused.bias, fused.residual))
    tiles = triton.cdiv(n, tile.block_n)
    parts, split = x, tile.split(tiles, x.device)
    if split > 1:
        dtype = torch.int32 if x.dtype == torch.int8 and not spec.group else torch.float32
        parts = x.new_empty(split, tiles, tile.block_n, spec.block_m, dtype=dtype)
    _tile_kernel[(tiles, split)](
        x, x_scale, codes, scale, bias, residual, y, parts, arrival_counters(x.device), m, n, k,
        *(strides_of(x_scale) if spec.native else (0, 0)), *strides,
        SPEC=spec, BLOCK_N=tile.block_n, UNITS=units_of(tile.bytes, codes, spec), SPLIT=split,
        STAGES=tile.stages, num_warps=tile.warps, launch_pdl=spec.prefetched > 0,
    )  # fmt: skip
    return y

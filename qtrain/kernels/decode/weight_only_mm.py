"""Products of a few rows with a weight's codes, for generation: y = x · (codes * scale)ᵀ, x in the model's dtype.

A step of generation multiplies one row a sequence with every weight, so it reads each weight once for a few FLOPs a
byte: its time is that of the weight's bytes, and codes of 8, 4 or 2 bits take a half, a quarter or an eighth of bf16's.
One row is not quantized: that would save nothing, and codes of 8 bits are exact in fp32. From two rows on x is
quantized as in training where tensor cores multiply such codes: to convert every code of the weight would take longer
than to read it. Values are summed in fp32, or in int32.

What stands between two weights is fused, because a launch of its own takes as long as a small weight does: the RMSNorm
of x before (its factor 1 / rms is the row's, so the sum over x² is taken on the way and applied to the result), a bias,
SwiGLU, and the residual stream that the result is added to.

    one row         a CTA takes a few rows of the weight; each thread multiplies and adds its part of K, and the threads
                    add their parts at the end (GEMV)
    2 to 64 rows    tensor cores, on tiles of BLOCK_N rows of the weight; a small weight's K is split among CTAs, of
                    which the last adds the parts, in a fixed order

More rows (a prompt) compute for longer than they read: the weight is dequantized, and cuBLAS multiplies.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.core.hardware import has_dependent_launch, has_fp8, has_ptx, sm_count
from qtrain.kernels.arrivals import arrival_counters, arrives_last
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.decode.dependent_launch import prefetch_rows, start_next, wait_for_previous
from qtrain.kernels.decode.quantize_normed import normed, quantize_normed
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, dequantize

MOST_ROWS = 64
"""Of x, that the kernels take."""
FORMATS_READ = ("int8", "e4m3", "e5m2", "int4", "ternary")
MOST_PARTS = 16
"""CTAs along K, whose parts the last one adds."""
PREFETCHED = 256
"""Bytes of each row of a CTA's part of the weight that are loaded into L2 while the kernel before still runs: of all
resident CTAs some 8 MB, what is read in 2 us."""


class Weight(NamedTuple):
    """A weight [N, K]: its values, or codes of a format of `FORMATS_READ` in a granularity of `GRANULARITIES`."""

    codes: Tensor
    """[N, K / packing], contiguous; without a format the values themselves, in x's dtype."""
    scale: Tensor | None = None
    """fp32, shaped as `scale_shape`."""
    fmt: str | None = None
    granularity: str = "tensorwise"

    def values(self, dtype: torch.dtype) -> Tensor:
        """[N, K], dequantized in fp32 and rounded once."""
        if self.fmt is None or self.scale is None:
            return self.codes.to(dtype)
        shape = (len(self.codes), self.codes.shape[1] * FORMATS[self.fmt].packing)
        return dequantize(self.codes, self.scale, self.fmt, self.granularity, shape, dtype)


class Fused(NamedTuple):
    """What is computed with a product, in this order: norm of x, bias, SwiGLU, residual."""

    norm: Tensor | None = None
    """RMSNorm's weight [K]; None: x is not normed."""
    eps: float = 0.0
    bias: Tensor | None = None
    """[N]."""
    swiglu: bool = False
    """The weight's rows are those of gate, then of up: y is [M, N / 2]."""
    residual: Tensor | None = None
    """Added to the result, in its shape."""


PLAIN = Fused()


def weight_only_mm_ref(x: Tensor, weight: Weight, fused: Fused = PLAIN) -> Tensor:
    """x [M, K] · weight [N, K]ᵀ with what is fused, in x's dtype; computed in fp32, rounded once."""
    value = x.float()
    if fused.norm is not None:
        value = F.rms_norm(value, value.shape[-1:], fused.norm.float(), fused.eps)
    y = F.linear(value, weight.values(torch.float32), None if fused.bias is None else fused.bias.float())
    if fused.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return (y if fused.residual is None else y + fused.residual.float()).to(x.dtype)


def weight_only_mm(x: Tensor, weight: Weight, fused: Fused = PLAIN) -> Tensor:
    """`weight_only_mm_ref` of contiguous operands by the fastest kernel."""
    if not x.is_cuda or forced() == "ref":
        return weight_only_mm_ref(x, weight, fused)
    if len(x) > MOST_ROWS:
        return _long(x, weight, fused)
    spec = _spec(x, weight, fused)
    names = list(GEMV if len(x) == 1 else (name for name, tile in TILES.items() if not (tile.per_sm and spec.swiglu)))
    n = len(weight.codes)
    key = (1 if len(x) == 1 else spec.block_m, n, x.shape[1], x.dtype, *spec.about)
    name = choose("weight_only_mm", key, names, lambda name: launch_weight_only_mm(x, weight, fused, name))
    return launch_weight_only_mm(x, weight, fused, name)


def _long(x: Tensor, weight: Weight, fused: Fused) -> Tensor:
    if fused.norm is not None:
        x = F.rms_norm(x, x.shape[-1:], fused.norm, fused.eps)
    y = F.linear(x, weight.values(x.dtype), fused.bias)
    if fused.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if fused.residual is None else fused.residual + y


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """What both kernels are compiled for, as one constexpr."""

    packing: int
    """Codes of a unit: of an int32 word of packed codes, else 1."""
    group: int
    """Elements of K that share a scale; 0: all of them, or the weight has no scales."""
    group_rows: int
    coded: bool
    native: bool
    """x is codes too, whose products tensor cores add without converting either."""
    int8_ptx: bool
    """Codes are int8, and inline PTX is allowed."""
    prefetched: int
    """Units of each row of the weight, while the kernel before still runs; 0: the launch is not a dependent one."""
    norm: bool
    bias: bool
    swiglu: bool
    residual: bool
    block_m: int
    about: tuple[str, ...]
    """Names of format and granularity, and of what is fused."""


INT8_TO_FLOAT: tl.constexpr = tl.constexpr("""
{
    .reg .b32 biased;
    xor.b32 biased, $4, 0x80808080;
    prmt.b32 $0, biased, 0x4B000000, 0x7540;
    prmt.b32 $1, biased, 0x4B000000, 0x7541;
    prmt.b32 $2, biased, 0x4B000000, 0x7542;
    prmt.b32 $3, biased, 0x4B000000, 0x7543;
    add.f32 $0, $0, 0fCB000080;
    add.f32 $1, $1, 0fCB000080;
    add.f32 $2, $2, 0fCB000080;
    add.f32 $3, $3, 0fCB000080;
}
""")
"""Four codes of a word, with 128 added, as the low bits of 2^23, less 2^23 + 128: the compiler's conversion of bytes to
fp32 is an instruction of a slower pipe."""


@triton.jit
def _field(units, FIELD: tl.constexpr, SPEC: tl.constexpr):
    """Code number FIELD of each unit, in fp32."""
    if SPEC.int8_ptx:
        return tl.inline_asm_elementwise(INT8_TO_FLOAT, "=r,=r,=r,=r,r", [units], tl.float32, is_pure=True, pack=4)
    if SPEC.packing > 1:
        BITS: tl.constexpr = 32 // SPEC.packing
        # To the top of the word, and back as a signed number, which extends its sign.
        units = (units << (32 - BITS * (FIELD + 1))) >> (32 - BITS)
    return units.to(tl.float32)


@triton.jit
def _row_factors(scale_ptr, bias_ptr, row, scale_row, SPEC: tl.constexpr):
    """Scales and biases of rows of the weight."""
    scale = tl.full(row.shape, 1.0, tl.float32)
    bias = tl.zeros(row.shape, tl.float32)
    if SPEC.coded and SPEC.group == 0:
        scale = tl.load(scale_ptr + row * scale_row)
    if SPEC.bias:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    return scale, bias


@triton.jit
def _read_early(codes_ptr, scale_ptr, bias_ptr, row, inside, n, start, end, width, scale_row, SPEC: tl.constexpr):
    """What no kernel of a step writes: the beginning of rows of the weight, from unit `start` on, into L2; scales and
    biases of `row`, and with SwiGLU of `up`. After the loop each of these loads would be waited for."""
    if SPEC.prefetched:
        row_ptr = codes_ptr + row.to(tl.int64) * width
        prefetch_rows(row_ptr, inside, start, end, SPEC.prefetched)
        if SPEC.swiglu:
            prefetch_rows(row_ptr + n.to(tl.int64) * width, inside, start, end, SPEC.prefetched)
    scale, bias = _row_factors(scale_ptr, bias_ptr, row, scale_row, SPEC)
    up_scale, up_bias = scale, bias
    if SPEC.swiglu:
        up_scale, up_bias = _row_factors(scale_ptr, bias_ptr, row + n, scale_row, SPEC)
    return scale, bias, up_scale, up_bias


@triton.jit
def _finish(total, up, residual, y_ptr, offset, inside, SPEC: tl.constexpr):
    """SwiGLU, residual, and the store."""
    if SPEC.swiglu:
        total = total / (1.0 + tl.exp(-total)) * up
    if SPEC.residual:
        total += residual.to(tl.float32)
    tl.store(y_ptr + offset, total.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _group_scales(
    scale_ptr, row, start, groups_in_all, scale_row, scale_column, SPEC: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Scales [rows, GROUPS] of the groups from unit `start` on."""
    group = start * SPEC.packing // SPEC.group + tl.arange(0, GROUPS)
    address = scale_ptr + (row // SPEC.group_rows)[:, None] * scale_row + group[None] * scale_column
    return tl.load(address, (group < groups_in_all)[None], 0.0)


@triton.jit
def _gemv_kernel(
    # x [k], where codes are packed [packing, k / packing]; units of codes [N, k / packing]; RMSNorm's weight [k];
    # bias [N]; residual and y [n].
    x_ptr, codes_ptr, scale_ptr, norm_ptr, bias_ptr, residual_ptr, y_ptr,
    # n: width of y, half of N with SwiGLU. Strides of the scales.
    n, k, scale_row, scale_column, eps,
    SPEC: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS numbers of y. A tile is [ROWS, GROUPS, units of a group]: groups share a scale."""
    PACKING: tl.constexpr = SPEC.packing
    GROUPS: tl.constexpr = UNITS * PACKING // SPEC.group if SPEC.group else 1
    EACH: tl.constexpr = UNITS // GROUPS
    # Rows beyond the weight repeat its last one: loads then need no mask along N.
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(out_row, n - 1)
    place = tl.arange(0, GROUPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    width, groups = k // SPEC.packing, tl.cdiv(k, SPEC.group if SPEC.group else 1)
    address = codes_ptr + row.to(tl.int64)[:, None, None] * width + place[None]
    address_up = address + n.to(tl.int64) * width
    row_scale, row_bias, up_scale, up_bias = _read_early(
        codes_ptr, scale_ptr, bias_ptr, row, out_row < n, n, 0, width, width, scale_row, SPEC
    )
    wait_for_previous(SPEC.prefetched > 0)
    residual = row_bias
    if SPEC.residual:
        residual = tl.load(residual_ptr + row)
    total = tl.zeros((ROWS, GROUPS, EACH), tl.float32)
    total_up = tl.zeros((ROWS, GROUPS, EACH), tl.float32)
    squares = tl.zeros((GROUPS, EACH), tl.float32)
    for start in tl.range(0, width, UNITS, num_stages=STAGES):
        within = place < width - start
        units = tl.load(address + start, within[None], 0.0)
        # Without groups a product is added to the total at once.
        part = tl.zeros((ROWS, GROUPS, EACH), tl.float32) if SPEC.group else total
        if SPEC.swiglu:
            units_up = tl.load(address_up + start, within[None], 0.0)
            part_up = tl.zeros((ROWS, GROUPS, EACH), tl.float32) if SPEC.group else total_up
        for field in tl.static_range(PACKING):
            x = tl.load(x_ptr + field * width + start + place, within, 0.0).to(tl.float32)
            if SPEC.norm:
                squares += x * x
                x *= tl.load(norm_ptr + start + place, within, 0.0).to(tl.float32)
            part += _field(units, field, SPEC) * x[None]
            if SPEC.swiglu:
                part_up += _field(units_up, field, SPEC) * x[None]
        if SPEC.group:
            scales = _group_scales(scale_ptr, row, start, groups, scale_row, scale_column, SPEC, GROUPS)
            part = total + part * scales[:, :, None]
            if SPEC.swiglu:
                scales = _group_scales(scale_ptr, row + n, start, groups, scale_row, scale_column, SPEC, GROUPS)
                part_up = total_up + part_up * scales[:, :, None]
        total = part
        if SPEC.swiglu:
            total_up = part_up
    start_next(SPEC.prefetched > 0)
    y = tl.sum(tl.sum(total, 2), 1) * row_scale
    up = tl.sum(tl.sum(total_up, 2), 1) * up_scale if SPEC.swiglu else y
    if SPEC.norm:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / k + eps)
        y *= factor
        up *= factor
    _finish(y + row_bias, up + up_bias, residual, y_ptr, out_row, out_row < n, SPEC)


@triton.jit
def _values(units, scales, FIELD: tl.constexpr, SPEC: tl.constexpr, DTYPE: tl.constexpr):
    """Units [rows, UNITS] as values in DTYPE, times the scales [rows, groups] of their groups."""
    value = _field(units, FIELD, SPEC)
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
    """BLOCK_N columns of y [m, n], transposed: the weight's rows are those of the accumulators, which warps divide.
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
    row_scale, row_bias, up_scale, up_bias = _read_early(
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
            scales = _group_scales(scale_ptr, row, start, groups, scale_row, scale_column, SPEC, GROUPS)
        if SPEC.swiglu:
            units_up = tl.load(row_up_ptr[:, None] + place[None], within[None], 0.0)
            scales_up = units_up
            if SPEC.group:
                scales_up = _group_scales(scale_ptr, row + n, start, groups, scale_row, scale_column, SPEC, GROUPS)
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
        _finish(y, up, residual, y_ptr, offset, inside, SPEC)


# ---- launch ----------------------------------------------------------------------------------------------------------


class Gemv(NamedTuple):
    """Rows of the weight and bytes of a row that a CTA reads at once; its warps; stages of the loads' pipeline."""

    rows: int
    bytes: int
    warps: int
    stages: int = 1


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


def _named(tiles: list) -> dict:
    return {" ".join(["triton", *map(str, tile)]): tile for tile in tiles}


# Few: each is compiled and timed for each weight's shape when a model first generates on a machine.
GEMV: dict[str, Gemv] = _named(
    [Gemv(4, 512, 1, 4), Gemv(8, 512, 4, 4), Gemv(4, 512, 2, 4), Gemv(4, 1024, 2, 3), Gemv(4, 1024, 4, 3)]
)
TILES: dict[str, Tile] = _named(
    [
        Tile(64, 128, 4, 3),
        Tile(64, 256, 4, 4),
        Tile(32, 256, 2, 4),
        Tile(64, 256, 4, 3, 2),
        Tile(64, 256, 4, 3, 3),
        Tile(64, 128, 4, 4, 3),
    ]
)


def _spec(x: Tensor, weight: Weight, fused: Fused) -> Spec:
    packing, group, rows, about = 1, 0, 1, ["plain"]
    if weight.fmt is not None:
        sizes, fields = GRANULARITIES[weight.granularity], FORMATS[weight.fmt].packing
        packing, group, rows = 4 * fields if fields > 1 else 1, sizes[1] or 0, sizes[0] or 1
        about = [weight.fmt, weight.granularity]
    flags = {
        "norm": fused.norm is not None and len(x) == 1 and packing == 1,
        "bias": fused.bias is not None,
        "swiglu": fused.swiglu,
        "residual": fused.residual is not None,
    }
    about += [name for name, present in flags.items() if present]
    size = 4 if packing > 1 else weight.codes.element_size()
    return Spec(
        packing, group, rows, weight.fmt is not None, _multiplies_codes(x, weight),
        int8_ptx=weight.fmt == "int8" and has_ptx(x.device),
        prefetched=PREFETCHED // size if has_dependent_launch(x.device) else 0, **flags,
        block_m=max(16, triton.next_power_of_2(len(x))), about=tuple(about),
    )  # fmt: skip


def _multiplies_codes(x: Tensor, weight: Weight) -> bool:
    """Whether x is quantized too: where tensor cores multiply codes of the weight's format, and its scales are those of
    rows or of blocks of 128."""
    if len(x) == 1 or weight.granularity not in ("tensorwise", "rowwise", "128x128"):
        return False
    return weight.fmt == "int8" or (weight.fmt == "e4m3" and has_fp8(x.device))


def launch_weight_only_mm(x: Tensor, weight: Weight, fused: Fused, name: str) -> Tensor:
    """`weight_only_mm` by the kernel of this name, in `GEMV` for one row, else in `TILES`."""
    (m, k), codes, like = x.shape, weight.codes, x
    spec, n = _spec(x, weight, fused), len(codes) // 2 if fused.swiglu else len(codes)
    x_scale = x
    if spec.native and weight.fmt is not None:
        granularity = "1x128" if spec.group else "rowwise"
        x, x_scale = quantize_normed(x, fused.norm, fused.eps, weight.fmt, granularity)
    elif fused.norm is not None and not spec.norm:
        x = normed(x, fused.norm, fused.eps)
    if spec.packing > 1:  # words of codes, and the elements of x apart that are multiplied with each field of a word
        codes = codes.view(torch.int32)
        x = x.view(m, -1, spec.packing).permute(2, 0, 1).contiguous()
    y, scale, strides, x_strides = like.new_empty(m, n), x, (0, 0), (0, 0)
    if weight.scale is not None:
        scale = weight.scale
        strides = (scale.stride(0) if scale.numel() > 1 else 0, scale.stride(1) if scale.ndim == 2 else 0)
    bias, residual = (x if t is None else t for t in (fused.bias, fused.residual))
    if m == 1:
        tile = GEMV[name]
        _gemv_kernel[(triton.cdiv(n, tile.rows),)](
            x, codes, scale, x if fused.norm is None else fused.norm, bias, residual, y, n, k, *strides, fused.eps,
            SPEC=spec, ROWS=tile.rows, UNITS=_units(tile.bytes, codes, spec), STAGES=tile.stages, num_warps=tile.warps,
            launch_pdl=spec.prefetched > 0,
        )  # fmt: skip
        return y
    tile, tiles = TILES[name], triton.cdiv(n, TILES[name].block_n)
    parts, split = x, tile.split(tiles, x.device)
    if split > 1:
        dtype = torch.int32 if x.dtype == torch.int8 and not spec.group else torch.float32
        parts = x.new_empty(split, tiles, tile.block_n, spec.block_m, dtype=dtype)
    if spec.native:
        x_strides = (x_scale.stride(0), x_scale.stride(1) if x_scale.ndim == 2 else 0)
    _tile_kernel[(tiles, split)](
        x, x_scale, codes, scale, bias, residual, y, parts, arrival_counters(x.device), m, n, k, *x_strides, *strides,
        SPEC=spec, BLOCK_N=tile.block_n, UNITS=_units(tile.bytes, codes, spec), SPLIT=split,
        STAGES=tile.stages, num_warps=tile.warps, launch_pdl=spec.prefetched > 0,
    )  # fmt: skip
    return y


def _units(count: int, codes: Tensor, spec: Spec) -> int:
    """Units of codes in `count` bytes, a whole group at least; just one where x's scales are those of groups too."""
    if spec.native and spec.group:
        return spec.group
    return max(count // codes.element_size(), spec.group // spec.packing, 16)

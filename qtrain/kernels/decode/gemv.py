"""One row times a weight: a CTA takes a few rows of the weight, each thread multiplies and adds its part of K, and the
threads add their parts at the end (GEMV)."""

from typing import NamedTuple

from torch import Tensor

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
    units_of,
)
from qtrain.kernels.decode.quantize_normed import normed


class Gemv(NamedTuple):
    """Rows of the weight and bytes of a row that a CTA reads at once; its warps; stages of the loads' pipeline."""

    rows: int
    bytes: int
    warps: int
    stages: int = 1


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
    row_scale, row_bias, up_scale, up_bias = read_early(
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
            part += field_values(units, field, SPEC) * x[None]
            if SPEC.swiglu:
                part_up += field_values(units_up, field, SPEC) * x[None]
        if SPEC.group:
            scales = group_scales(scale_ptr, row, start, groups, scale_row, scale_column, SPEC, GROUPS)
            part = total + part * scales[:, :, None]
            if SPEC.swiglu:
                scales = group_scales(scale_ptr, row + n, start, groups, scale_row, scale_column, SPEC, GROUPS)
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
    finish(y + row_bias, up + up_bias, residual, y_ptr, out_row, out_row < n, SPEC)


# Few: each is compiled and timed for each weight's shape when a model first generates on a machine.
GEMV: dict[str, Gemv] = named(
    [Gemv(4, 512, 1, 4), Gemv(8, 512, 4, 4), Gemv(4, 512, 2, 4), Gemv(4, 1024, 2, 3), Gemv(4, 1024, 4, 3)]
)


def launch_gemv(x: Tensor, weight: Weight, fused: Fused, name: str) -> Tensor:
    """`weight_only_mm` of one row by the kernel of this name in `GEMV`."""
    tile, k, spec = GEMV[name], x.shape[1], kernel_spec(x, weight, fused)
    n = len(weight.codes) // 2 if fused.swiglu else len(weight.codes)
    y = x.new_empty(1, n)
    norm = fused.norm
    if norm is not None and not spec.norm:
        x, norm = normed(x, norm, fused.eps), None
    x, codes = in_words(x, weight.codes, spec)
    scale, strides = scale_of(weight, x)
    norm, bias, residual = (x if t is None else t for t in (norm, fused.bias, fused.residual))
    _gemv_kernel[(triton.cdiv(n, tile.rows),)](
        x, codes, scale, norm, bias, residual, y, n, k, *strides, fused.eps,
        SPEC=spec, ROWS=tile.rows, UNITS=units_of(tile.bytes, codes, spec), STAGES=tile.stages, num_warps=tile.warps,
        launch_pdl=spec.prefetched > 0,
    )  # fmt: skip
    return y

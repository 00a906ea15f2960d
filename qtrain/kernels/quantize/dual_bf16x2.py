"""Quantizes bf16 in both layouts to 8 bits (FP8 or INT8): weights, inputs and gradients, also those of a SwiGLU.

The same codes as `tiled.py`, in few instructions and registers, so that several CTAs share an SM and overlap loads with
compute. Two neighbors of a row stay in the 32-bit word that they were read in, their absmax is taken of both at once,
and a thread holds words of four consecutive rows: four codes of a column are a word again, and only words go through
shared memory to be transposed. Either layout may be rounded stochastically: a Philox draw's four words belong to four
words of x side by side, which one thread holds.

A scale belongs to a CTA's block of 128 (1x128, 128x128, or 1x128 of row codes and 128x128 of transposed codes); to
whole rows and columns, or to the tensor, whose absmax a pass before has left; or it is given for the tensor.

What is quantized can be computed from x as it is read: y = swiglu(x), the gradient of x from dy, rows gathered from x,
or the gradient of logits x.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.column_sums import launch_column_sums
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import Encoding, encoding
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_scale
from qtrain.kernels.numerics.philox import NEAREST, Rounding
from qtrain.kernels.quantize.absmax import launch_absmax
from qtrain.kernels.quantize.column_groups import BlockGroups, group_of_row, launch_group_scales
from qtrain.kernels.quantize.dual_codes import quantize_tile
from qtrain.kernels.quantize.dual_tile import load_swiglu_grads, load_tile, store_column_sums
from qtrain.kernels.quantize.gather_rows import EVERY_ROW, RowIndex
from qtrain.kernels.quantize.logit_rows import LogitRows

BLOCK = 128
BLOCK_PAIRS = (("128x128", "128x128"), ("1x128", "1x128"), ("1x128", "128x128"))
"""Granularities of row codes and of transposed codes whose scales a CTA computes from its own block."""
PAIRS = (*BLOCK_PAIRS, ("rowwise", "rowwise"), ("tensorwise", "tensorwise"))
"""All that the kernel computes, in 8-bit formats; the last two after an absmax pass."""
GRADIENT_PAIRS = PAIRS[:-1]
"""Those of the gradient of logits. `softmax_grad.py` takes a scale of the tensor, where it is known before."""


class DualTiling(NamedTuple):
    """What a CTA quantizes."""

    rows: int
    columns: int
    warps: int
    registers: int | None
    """Of a thread; None: as many as the compiler takes."""


def dual_tiling(swiglu: str, scales: str, sums: bool = False, logits: bool = False) -> DualTiling:
    """Of what is quantized and the row codes' scales, as in `DualCode`. sums: whether columns are summed. logits:
    whether it is the gradient of logits.

    Measured on an H200, to nearest and stochastic: with eight warps of few registers a SwiGLU's arithmetic hides behind
    loads, 95% of the copy bandwidth; with four of 168 registers it took a fifth longer."""
    if swiglu == "both":
        return DualTiling(64, 64, 4, None)
    if scales == "given":
        # Sums take half as many registers again: with four warps a third of the CTAs would not fit.
        return DualTiling(64, BLOCK, 8 if swiglu or sums else 4, None)
    if logits or (scales == "1x128" and swiglu):
        return DualTiling(BLOCK, BLOCK, 8, 128)
    if scales in ("1x128", "rowwise"):
        return DualTiling(BLOCK, BLOCK, 4, 168)
    return DualTiling(BLOCK, BLOCK, 8, None if swiglu == "forward" else 80)


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
def column_block(tile_k, tiles_k, CODE: tl.constexpr):
    """The block of columns of a tile's number: in a SwiGLU's gradient, tiles of gate and of up that read the same words
    are neighbors."""
    return tile_k % 2 * (tiles_k // 2) + tile_k // 2 if CODE.swiglu == "backward" else tile_k


@triton.jit(do_not_specialize=["role", "stride", "stride_t"])
def _dual_kernel(
    # What is quantized, an [m, k] bf16 in words of two: x, or rows gathered from it (token_ptr int32 [m], weight_ptr
    # fp32 [m], or None), or the gradient of logits x (their `LogitRows`, or None), or of a SwiGLU (x [m, 2k] forward;
    # dy [m, k / 2] backward), as `load_tile` says. dots_ptr fp32 [m, k / 2 / BLOCK]: receives a SwiGLU's `router_dots`,
    # or None.
    x_ptrs,  # (x_ptr, token_ptr, weight_ptr, dy_ptr, dots_ptr, logit_rows)
    # int16 words of two codes [m, k / 2]; int32 words of four codes [k, m / 4]; their fp32 scales, laid out as
    # `empty_scale`; scale_t_ptr None: the columns of groups have theirs already.
    out_ptrs,  # (codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr)
    # int32 bits of absmaxes: [1] tensorwise, [m] and [groups * k] rowwise; or fp32 [1] given; else not read. amax_ptr
    # int32 [1]: receives the bits of the absmax of what is quantized under a given scale, or None.
    source_ptrs,  # (source_ptr, source_t_ptr, amax_ptr)
    # int32 [m / 128], or None: the group of each block of rows, whose columns have maxima of their own at source_t_ptr;
    # under a given scale blocks of no group are left out.
    group_ptr,
    # fp32 [tiles of rows, k]: receives the sums of the columns of each tile of rows, or None.
    sums_ptr,
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
        at_up = at[0], tiles_k + at[1]
        quantize_tile(gate, at, out_ptrs, scales, given, amax, random, sizes_out, CODE)
        if sums_ptr is not None:
            store_column_sums(gate, sums_ptr, at, k, CODE)
        quantize_tile(up, at_up, out_ptrs, scales, given, amax, random, sizes_out, CODE)
        if sums_ptr is not None:
            store_column_sums(up, sums_ptr, at_up, k, CODE)
    else:
        x = load_tile(x_ptrs, at, sizes, CODE)
        quantize_tile(x, at, out_ptrs, scales, given, amax, random, sizes_out, CODE)
        if sums_ptr is not None:
            store_column_sums(x, sums_ptr, at, k, CODE)


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
    logit_rows: LogitRows | None = None,
    held: Tensor | None = None,
    column_sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel for `quantize_ref` and `quantize_transposed_ref` at once: codes, scale, codes_t, scale_t.

    x contiguous, not empty, `supports_dual_bf16x2`. scale: fp32 [1], given. amax: int32 [1] of zeros, receives the fp32
    bits of x's absmax; only with `scale`. granularity_t: of codes_t, if it is not granularity. swiglu: quantizes
    swiglu(x) or, with dy, the gradient of x; x [M, 2I], I a multiple of BLOCK. router_dots: fp32 [M, I / BLOCK],
    receives `swiglu.router_dots_ref`; with dy. tensor_amax, row_column_amax: fp32 bits of the absmax of x (tensorwise),
    or of its rows and of its columns (rowwise), int32, if known. groups: of rows with column scales of
    their own (rowwise). out: memory for the result. index: the rows of what is quantized are gathered from x [T, K];
    without swiglu. logit_rows: of logits x, whose gradient is quantized, without index and swiglu, under scales of
    `GRADIENT_PAIRS`. held: `group_of_block` of rows of which those of no group are not written; with `scale`.
    column_sums: fp32 [columns of what is quantized], receives their sums; with `scale`, without held.
    """
    granularity_t = granularity_t or granularity
    m, k = index.shape(x)
    k = k // 2 if swiglu and dy is None else k  # of what is quantized: y is half as wide as x
    given, source, source_t = scale is not None, scale, None  # source: what the kernel derives scales from
    assert not swiglu or given or (granularity, granularity_t) in BLOCK_PAIRS, "no absmax pass for that scale"
    assert held is None or given, "rows are left out under a given scale alone"
    assert column_sums is None or (given and held is None), "columns are summed under a given scale alone, of all rows"
    if granularity == "rowwise":
        options = {"groups": groups, "index": index, "logit_rows": logit_rows}
        source, source_t = row_column_amax or launch_absmax(x, rows=True, columns=True, **options)[1:]
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
    quantized = "" if not swiglu else "forward" if dy is None else "both" if given else "backward"
    scales, scales_t = ("given", "given") if given else (granularity, granularity_t)
    tile = dual_tiling(quantized, scales, column_sums is not None, logit_rows is not None)
    if router_dots is not None:  # those of BLOCK columns
        tile = tile._replace(columns=BLOCK)
    code = DualCode(
        **vars(encoding(fmt, x.device, power_of_two)),
        scales=scales,
        scales_t=scales_t,
        stochastic=rounding.row_key is not None,
        stochastic_t=rounding.column_key is not None,
        even=m % tile.rows == k % tile.columns == 0,
        swiglu=quantized,
        block_m=tile.rows,
        block_k=tile.columns,
    )
    tiles_m, tiles_k = triton.cdiv(m, tile.rows), triton.cdiv(k, tile.columns) // (2 if quantized == "both" else 1)
    sums = None if column_sums is None else column_sums.new_empty(tiles_m, k)
    x_words, dy_words = x.view(torch.int32), None if dy is None else dy.view(torch.int32)
    _dual_kernel[(tiles_m * tiles_k,)](
        (x_words, *index, dy_words, router_dots, logit_rows and tuple(logit_rows)),
        (codes.view(torch.int16), codes_t.view(torch.int32), scale, None if grouped else scale_t),
        (source, source_t, amax), groups.group_of_block if grouped else held, sums, rounding.key, rounding.role,
        (m, k), scale.stride(0), scale_t.stride(0), CODE=code,
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if sums is not None:
        launch_column_sums(sums, column_sums)
    return codes, scale, codes_t, scale_t

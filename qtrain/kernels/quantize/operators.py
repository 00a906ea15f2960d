"""Quantizers as custom ops: bf16/fp32 -> low-bit codes and fp32 scales, along rows, along columns, or both.

A linear reads each operand in two GEMMs, once along its rows and once along its columns, and 8-bit tensor cores take
both operands K-major only: column codes are stored transposed. `quantize_dual` produces both layouts from one read of x
where a scale's group fits in a tile (1x128, 128x128, 32x32) or the scale is given: 4 bytes per element for bf16. Scales
of whole rows and columns need an absmax pass first, 2 bytes per element more; two quantizers and a transpose would move
12.

Here are the ops, their fakes and the choice of a kernel; the definition is in `reference.py`, kernels and launchers in
`rowwise.py`, `tiled.py` and `dual_bf16x2.py`.
"""

import torch
from torch import Tensor

from qtrain.kernels.column_sums import column_sums_if, empty_column_sums
from qtrain.kernels.compiler import operator
from qtrain.kernels.numerics.formats import empty_codes, empty_scale
from qtrain.kernels.numerics.philox import Rounding
from qtrain.kernels.quantize.absmax import absmax_ref
from qtrain.kernels.quantize.column_groups import BlockGroups, block_groups
from qtrain.kernels.quantize.delayed_scale import delayed_scale, launch_delayed_scale
from qtrain.kernels.quantize.dual_bf16x2 import launch_dual_bf16x2, supports_dual_bf16x2
from qtrain.kernels.quantize.gather_rows import EVERY_ROW, RowIndex
from qtrain.kernels.quantize.reference import (
    group_scale_ref,
    quantize_ref,
    quantize_transposed_ref,
    scale_from_amax_ref,
    scale_ref,
)
from qtrain.kernels.quantize.rowwise import (
    LONGEST_ROW,
    launch_rowwise,
    launch_rowwise_bf16x2,
    supports_rowwise_bf16x2,
)
from qtrain.kernels.quantize.tiled import launch_tiled

FEW_ROWS = 1024
"""Rows too long for a CTA's registers that are quantized by tiles, after a pass for their absmax."""


def _kernel_takes(x: Tensor, rounding: Rounding, index: RowIndex = EVERY_ROW) -> bool:
    """A draw of stochastic rounding serves eight elements, which must be of one row."""
    # An empty grid is a launch error.
    return x.is_cuda and x.numel() > 0 and index.shape(x)[0] > 0 and (rounding.key is None or x.shape[1] % 8 == 0)


def _given(
    x: Tensor,
    fmt: str,
    granularity: str,
    scale: Tensor | None,
    power_of_two: bool,
    transposed: bool = False,
    groups: BlockGroups | None = None,
) -> Tensor | None:
    """The scale that a kernel is given. The mean of ternary is computed by torch: its order of summation is fixed."""
    if fmt != "ternary" or scale is not None:
        return scale
    if groups is not None:
        return group_scale_ref(x, fmt, groups, power_of_two)  # of each group's rows alone
    return scale_ref(x.t() if transposed and granularity != "tensorwise" else x, fmt, granularity, power_of_two)


def _launch(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding,
    power_of_two: bool,
    given: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The fastest kernel for `quantize`. out: memory for the result."""
    if given is None and supports_rowwise_bf16x2(x, fmt, granularity, rounding.row_key is not None):
        return launch_rowwise_bf16x2(x, fmt, granularity, rounding, power_of_two, out=out)
    # Images of a convolution: a CTA per row would leave SMs idle, and loop over its row for long.
    few_long_rows = granularity == "rowwise" and x.shape[1] > 2 * LONGEST_ROW and x.shape[0] <= FEW_ROWS
    # A group along a row fits in registers: one read. Square blocks need a tile, given scales no maximum.
    if given is None and granularity in ("rowwise", "1x128", "1x32") and not few_long_rows:
        return launch_rowwise(x, fmt, granularity, rounding, power_of_two, out=out)
    return launch_tiled(x, fmt, granularity, None, rounding, power_of_two, given, out=out)


@operator("quantize", fake=lambda x, fmt, granularity: empty_codes(x, fmt, granularity))
def quantize(
    x: Tensor,
    fmt: str,
    granularity: str,
    key: Tensor | None = None,
    role: int = 0,
    power_of_two: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes [M, K] (packed formats [M, ceil(K / packing)]), scale fp32 (`scale_shape`).

    key, role: stochastic rounding with the bits of `random_bits_ref`; None: to nearest even. power_of_two: scales are
    rounded up to powers of two. scale: given (tensorwise or of blocks), laid out as `empty_scale`; returned as a copy.
    """
    rounding = Rounding(key, role)
    if not _kernel_takes(x, rounding):  # a CPU, an empty matrix, or rows of no multiple of eight with random bits
        codes, used = quantize_ref(x, fmt, granularity, rounding.bits(x.shape)[0], power_of_two, scale)
        return codes, used if scale is None else used.clone()  # an op may not return one of its inputs
    x = x.contiguous()
    return _launch(x, fmt, granularity, rounding, power_of_two, _given(x, fmt, granularity, scale, power_of_two))


def quantize_into(
    out: tuple[Tensor, Tensor], x: Tensor, fmt: str, granularity: str, rounding: Rounding, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`quantize` with the results in `out`, where a kernel runs and writes scales with its strides. Not for compiled
    code."""
    strides = empty_scale(granularity, x.shape[0], x.shape[1], torch.empty(0, device="meta")).stride()
    fits = x.is_contiguous() and out[0].is_contiguous() and out[1].stride() == strides
    if not (fits and _kernel_takes(x, rounding)):
        return quantize(x, fmt, granularity, rounding.row_key, rounding.role, power_of_two)
    given = _given(x, fmt, granularity, None, power_of_two)
    return _launch(x, fmt, granularity, rounding, power_of_two, given, out)


def _empty_quantize_transposed(x, fmt, granularity, groups):
    return empty_codes(x, fmt, granularity, transposed=True, groups=groups)


@operator("quantize_transposed", fake=_empty_quantize_transposed)
def quantize_transposed(
    x: Tensor,
    fmt: str,
    granularity: str,
    key: Tensor | None = None,
    role: int = 0,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    group_of_block: Tensor | None = None,
    groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """`quantize` of the transpose of x [M, K]: codes [K, M] and their scale ("1x128": 128 rows of x share one).

    Random bits belong to the elements of x: an element draws the same ones in `quantize`. group_of_block int32
    [M / 128]: each block of 128 rows belongs to one of `groups` groups (-1: none, its rows are zero), and a rowwise
    scale is one per group and column, fp32 [groups * K]; other granularities are not changed by it.
    """
    rounding, column_groups = Rounding(key, role), block_groups(x.shape[0], group_of_block, groups, granularity)
    if not _kernel_takes(x, rounding):
        bits = rounding.bits(x.shape)[1]
        codes, used = quantize_transposed_ref(x, fmt, granularity, bits, power_of_two, scale, column_groups)
        return codes, used if scale is None else used.clone()
    x, given = x.contiguous(), _given(x, fmt, granularity, scale, power_of_two, transposed=True, groups=column_groups)
    return launch_tiled(x, fmt, None, granularity, rounding, power_of_two, scale_t=given, groups=column_groups)


def _empty_quantize_dual(x, fmt, granularity, granularity_t, columns, fmt_t, groups, token_of_row):
    x = x.new_empty(RowIndex(token_of_row).shape(x))  # [M, K]; x is [T, K]
    columns = empty_codes(x, fmt_t or fmt, granularity_t, transposed=True, groups=groups)
    return *empty_codes(x, fmt, granularity), *columns


@operator("quantize_dual", fake=_empty_quantize_dual)
def quantize_dual(
    x: Tensor,
    fmt: str,
    granularity: str,
    granularity_t: str,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    fmt_t: str | None = None,
    group_of_block: Tensor | None = None,
    groups: int = 1,
    token_of_row: Tensor | None = None,
    weight_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` and `quantize_transposed` of x at once: codes, scale, codes_t, scale_t.

    key, role, rows, columns: a `Rounding`. fmt_t: the format of codes_t, if it is not fmt. group_of_block, groups: as
    for `quantize_transposed`. token_of_row, weight_of_row: a `RowIndex`; x is then [T, K], and its gathered rows [M, K]
    are quantized.
    """
    fmt_t, rounding, index = fmt_t or fmt, Rounding(key, role, rows, columns), RowIndex(token_of_row, weight_of_row)
    column_groups = block_groups(index.shape(x)[0], group_of_block, groups, granularity_t)
    if not _kernel_takes(x, rounding, index):
        x = index.gathered(x)
        row_bits, column_bits = rounding.bits(x.shape)
        codes, used = quantize_ref(x, fmt, granularity, row_bits, power_of_two, scale)
        codes_t, used_t = quantize_transposed_ref(
            x, fmt_t, granularity_t, column_bits, power_of_two, scale, column_groups
        )
        return (codes, used, codes_t, used_t) if scale is None else (codes, used.clone(), codes_t, used_t.clone())
    x = x.contiguous()
    # bf16 to 8 bits in both layouts, all that training asks of most tensors; the rest is for other formats and dtypes.
    if fmt == fmt_t and supports_dual_bf16x2(x, fmt, granularity, scale is not None, index, granularity_t):
        return launch_dual_bf16x2(
            x, fmt, granularity, rounding, power_of_two, scale, granularity_t=granularity_t, groups=column_groups,
            index=index,
        )  # fmt: skip
    x = index.gathered(x)  # [M, K] in memory: only the bf16x2 kernel gathers as it reads
    given = _given(x, fmt, granularity, scale, power_of_two)
    given_t = _given(x, fmt_t, granularity_t, scale, power_of_two, transposed=True, groups=column_groups)
    # The tiled kernel has one flag each for given scales and for rounding: where layouts differ, a launch for each.
    if (given is None) != (given_t is None) or not rounding.same:
        row_codes = _launch(x, fmt, granularity, rounding, power_of_two, given)
        column_codes = launch_tiled(
            x, fmt_t, None, granularity_t, rounding, power_of_two, scale_t=given_t, groups=column_groups
        )
        return row_codes[0], row_codes[1], *column_codes
    return launch_tiled(
        x, fmt, granularity, granularity_t, rounding, power_of_two, given, fmt_t, given_t, groups=column_groups
    )


def quantize_dual_into(
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding,
    power_of_two: bool,
    group_of_block: Tensor | None = None,
    groups: int = 1,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual` in one format and granularity, with the results in `out` where a kernel can write there: a copy
    of the codes would cost as much as their quantization. amax: what a tensorwise scale follows from, as fp32 bits in
    int32 [1]: that of x, if it is known, or of the tensor of which x is a part. Not for compiled code."""
    # The kernel writes words: into slices it could not, and results of another kernel would have to be copied.
    contiguous = all(t.is_contiguous() for t in (x, out[0], out[2]))
    if not (contiguous and _kernel_takes(x, rounding) and supports_dual_bf16x2(x, fmt, granularity)):
        scale = None
        if amax is not None:
            scale = scale_from_amax_ref(amax.view(torch.float32), fmt, granularity, x.shape, power_of_two)
        return quantize_dual(
            x, fmt, granularity, granularity, *rounding, power_of_two, scale, group_of_block=group_of_block,
            groups=groups,
        )  # fmt: skip
    # Its columns' scales go to memory of their own, and are copied.
    column_groups = block_groups(x.shape[0], group_of_block, groups, granularity)
    return launch_dual_bf16x2(
        x, fmt, granularity, rounding, power_of_two, groups=column_groups, out=out, tensor_amax=amax
    )


def _empty_quantize_dual_delayed(x, fmt, token_of_row, sums):
    x = x.new_empty(RowIndex(token_of_row).shape(x))  # [M, K]; x is [T, K]
    (codes, scale), codes_t = empty_codes(x, fmt, "tensorwise"), empty_codes(x, fmt, "tensorwise", transposed=True)[0]
    return codes, codes_t, scale, torch.empty_like(scale), empty_column_sums(x, x.shape[1] if sums else 0)


@operator("quantize_dual_delayed", fake=_empty_quantize_dual_delayed)
def quantize_dual_delayed(
    x: Tensor,
    fmt: str,
    known: Tensor,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
    token_of_row: Tensor | None = None,
    weight_of_row: Tensor | None = None,
    group_of_block: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> codes [M, K], codes_t [K, M], their scale fp32 [1], absmax fp32 [1] of x, and with `sums` the
    `column_sums` of x, fp32 [K]; from one read where the scale is `known`, fp32 [1] (`delayed_scale`).

    key, role, rows, columns: a `Rounding`. token_of_row, weight_of_row: as for `quantize_dual`. group_of_block int32
    [M / 128]: codes of blocks of no group (-1), whose rows are zero, need not be written.
    """
    rounding, index = Rounding(key, role, rows, columns), RowIndex(token_of_row, weight_of_row)
    if not _kernel_takes(x, rounding, index):
        scale, x = delayed_scale(x, known, fmt, power_of_two, *index), index.gathered(x)
        row_bits, column_bits = rounding.bits(x.shape)
        codes, _ = quantize_ref(x, fmt, "tensorwise", row_bits, scale=scale)
        codes_t, _ = quantize_transposed_ref(x, fmt, "tensorwise", column_bits, scale=scale)
        return codes, codes_t, scale, absmax_ref(x), column_sums_if(sums, x)
    x = x.contiguous()
    # fp32 [1], and a zero int32 [1] that the quantizer's atomics raise to the absmax.
    scale, amax = launch_delayed_scale(x, known, fmt, power_of_two, index.values)
    if supports_dual_bf16x2(x, fmt, "tensorwise", True, index):
        total = empty_column_sums(x, x.shape[1] if sums else 0)
        codes, _, codes_t, _ = launch_dual_bf16x2(
            x, fmt, "tensorwise", rounding, scale=scale, amax=amax, index=index, held=group_of_block,
            column_sums=total if sums else None,
        )  # fmt: skip
        return codes, codes_t, scale, amax.view(torch.float32), total
    x = index.gathered(x)
    if rounding.same:  # one read; otherwise the absmax is taken by the first of two launches
        codes, _, codes_t, _ = launch_tiled(
            x, fmt, "tensorwise", "tensorwise", rounding, scale=scale, scale_t=scale, amax=amax
        )
    else:
        codes, _ = launch_tiled(x, fmt, "tensorwise", None, rounding, scale=scale, amax=amax)
        codes_t, _ = launch_tiled(x, fmt, None, "tensorwise", rounding, scale_t=scale)  # the absmax is known already
    return codes, codes_t, scale, amax.view(torch.float32), column_sums_if(sums, x)

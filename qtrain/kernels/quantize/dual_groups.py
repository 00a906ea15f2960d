"""Quantizes bf16 in groups of rows in both layouts under scales of whole rows and of each group's columns.

`dual_bf16x2.py` after a pass for the absmaxes, both in one launch (`group_passes.py`): 4 bytes per element from and to
memory where a pass of its own moves 6.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import abs_bf16x2, max_bf16x2, reduce_max_bf16x2, row_max_bf16x2
from qtrain.kernels.numerics.encode import encoding
from qtrain.kernels.numerics.formats import FORMATS, empty_scale
from qtrain.kernels.numerics.rounding import NEAREST, Rounding
from qtrain.kernels.quantize.absmax import atomic_max_bf16x2
from qtrain.kernels.quantize.column_groups import BlockGroups, launch_group_scales
from qtrain.kernels.quantize.dual_bf16x2 import BLOCK, REGISTERS, WARPS, quantize_tile
from qtrain.kernels.quantize.dual_load import load_tile
from qtrain.kernels.quantize.gather_rows import EVERY_ROW, RowIndex
from qtrain.kernels.quantize.group_passes import launch_schedule, signal_tile, step_of_program, wait_for_tiles


@triton.jit
def _record_row(x, row_ptr, PTX: tl.constexpr):
    """Pairs [R, C] -> the atomic maxima of every fourth row from row_ptr on; the pairs without sign."""
    bf16x2 = abs_bf16x2(x)
    tl.atomic_max(row_ptr + 4 * tl.arange(0, x.shape[0]), row_max_bf16x2(bf16x2, PTX), sem="relaxed")
    return bf16x2


@triton.jit
def _record_absmax(x0, x1, x2, x3, row_ptr, column_ptr, tile_k, words, PTX: tl.constexpr):
    """Four rows of pairs each [R, C] -> atomic maxima of the tile's rows at row_ptr and columns at column_ptr."""
    x0, x1 = _record_row(x0, row_ptr, PTX), _record_row(x1, row_ptr + 1, PTX)
    x2, x3 = _record_row(x2, row_ptr + 2, PTX), _record_row(x3, row_ptr + 3, PTX)
    amax = max_bf16x2(max_bf16x2(x0, x1, PTX), max_bf16x2(x2, x3, PTX), PTX)
    word = tile_k * x0.shape[1] + tl.arange(0, x0.shape[1])
    atomic_max_bf16x2(column_ptr, word, words, reduce_max_bf16x2(amax, 0, PTX))


@triton.jit(do_not_specialize=["role"])
def _dual_groups_kernel(
    x_ptr, token_ptr, weight_ptr, codes_ptr, codes_t_ptr, scale_ptr, row_ptr, column_ptr, done_ptr, steps_ptr,
    group_ptr, key_ptr, role, m, k,
    STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, CODE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_dual_kernel`, m a multiple of BLOCK. row_ptr [m], column_ptr [groups * k], done_ptr [groups + 1]: int32,
    zeros; receive bits of absmaxes, and counts of tiles whose absmaxes are there."""
    tiles_k = tl.cdiv(k, BLOCK)
    tile_m, group, to_codes, awaited, tile_k = step_of_program(steps_ptr, group_ptr, tiles_k)
    column_ptr += tl.maximum(group, 0) * k
    x0, x1, x2, x3 = load_tile(
        x_ptr, token_ptr, weight_ptr, None, None, tile_m, tile_k, m, k, "", CODE.ptx, EVEN, BLOCK
    )
    if to_codes:
        wait_for_tiles(done_ptr, group, awaited * tiles_k)
        quantize_tile(
            x0, x1, x2, x3, tile_m, tile_k, codes_ptr, codes_t_ptr, scale_ptr, None, row_ptr, column_ptr,
            None, None, 0, key_ptr, role, m, k, 0, 0, STOCHASTIC, STOCHASTIC_T, "rowwise", CODE, EVEN, BLOCK,
        )  # fmt: skip
    else:
        _record_absmax(x0, x1, x2, x3, row_ptr + tile_m * BLOCK, column_ptr, tile_k, k // 2, CODE.ptx)
        signal_tile(done_ptr, group)


def launch_dual_groups(
    x: Tensor,
    fmt: str,
    groups: BlockGroups,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    index: RowIndex = EVERY_ROW,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel for `quantize_ref` and `quantize_transposed_ref` with groups, rowwise: codes, scale, codes_t, scale_t.

    x contiguous, not empty, `supports_dual_bf16x2`; groups ascending, blocks of none last. out: memory for the results
    but scale_t. index: the rows are gathered from x [T, K].
    """
    m, k = index.shape(x)
    if out is None:
        codes, codes_t = (x.new_empty(shape, dtype=FORMATS[fmt].dtype) for shape in ((m, k), (k, m)))
        scale = empty_scale("rowwise", m, k, x)
    else:
        codes, scale, codes_t, _ = out
    found = torch.zeros(m + groups.count * (k + 1) + 1, dtype=torch.int32, device=x.device)
    row_amax, column_amax, done = found.split((m, groups.count * k, groups.count + 1))
    tiles = triton.cdiv(k, BLOCK)
    steps = launch_schedule(groups, tiles)
    _dual_groups_kernel[(steps.shape[0] * tiles,)](
        x.view(torch.int32), *index, codes.view(torch.int16), codes_t.view(torch.int32), scale,
        row_amax, column_amax, done, steps, groups.of_block, rounding.key, rounding.role, m, k,
        rounding.row_key is not None, rounding.column_key is not None, encoding(fmt, x.device, power_of_two),
        k % BLOCK == 0, BLOCK, num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, codes_t, launch_group_scales(column_amax, fmt, power_of_two)

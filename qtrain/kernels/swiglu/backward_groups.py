"""Codes of a SwiGLU's gradient and of y for backward, of rows in groups, under scales of whole rows and columns.

    y  [M, I]  = silu(gate) * up       of x [M, 2I], gate, then up
    dx [M, 2I] = its gradient          from dy [M, I] and x

Two passes over each group in one launch (`quantize/group_passes.py`). The first is that of `backward.py`, without dx:
absmaxes of dx, and y's column codes; the second computes dx again from x and dy, which are in L2, for its codes. So dx
is never in memory: 11 bytes per element of y, against 19.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.encode import encoding
from qtrain.kernels.numerics.formats import FORMATS, empty_codes, empty_scale
from qtrain.kernels.numerics.rounding import Rounding
from qtrain.kernels.quantize.column_groups import BlockGroups, launch_group_scales
from qtrain.kernels.quantize.dual_bf16x2 import (
    BLOCK,
    REGISTERS_OF_GRADIENT,
    WARPS_OF_GRADIENT,
    quantize_tile,
    stripe_of_tile,
)
from qtrain.kernels.quantize.dual_load import load_tile
from qtrain.kernels.quantize.group_passes import launch_schedule, signal_tile, step_of_program, wait_for_tiles
from qtrain.kernels.swiglu.backward import gradient_tile


@triton.jit(do_not_specialize=["role", "role_y"])
def _swiglu_backward_groups_kernel(
    x_ptr, dy_ptr, dots_ptr, codes_ptr, codes_t_ptr, scale_ptr, row_ptr, column_ptr, y_codes_t_ptr, y_column_ptr,
    done_ptr, steps_ptr, group_ptr, key_ptr, role, key_y_ptr, role_y, m, k,
    STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, STOCHASTIC_Y: tl.constexpr, CODE: tl.constexpr,
    CODE_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [m, 2 * k], dy [m, k] and codes as in `_dual_kernel`; m and k are multiples of BLOCK. row_ptr [m], column_ptr
    [groups * 2 * k], done_ptr: as in `_dual_groups_kernel`, of dx. y_column_ptr [groups * k]: bits of absmaxes of y's
    columns."""
    tiles = 2 * k // BLOCK
    tile_m, group, to_codes, awaited, tile = step_of_program(steps_ptr, group_ptr, tiles)
    column_ptr += tl.maximum(group, 0) * (2 * k)
    if to_codes:
        tile_k = stripe_of_tile(tile, tiles, "backward")
        x0, x1, x2, x3 = load_tile(
            x_ptr, None, None, dy_ptr, None, tile_m, tile_k, m, 2 * k, "backward", CODE.ptx, True, BLOCK
        )
        wait_for_tiles(done_ptr, group, awaited * tiles)
        quantize_tile(
            x0, x1, x2, x3, tile_m, tile_k, codes_ptr, codes_t_ptr, scale_ptr, None, row_ptr, column_ptr,
            None, None, 0, key_ptr, role, m, 2 * k, 0, 0, STOCHASTIC, STOCHASTIC_T, "rowwise", CODE, True, BLOCK,
        )  # fmt: skip
    else:  # two CTAs share the rows of a tile of y
        gradient_tile(
            x_ptr, dy_ptr, None, dots_ptr, y_codes_t_ptr, None, y_column_ptr + tl.maximum(group, 0) * k, row_ptr,
            column_ptr, key_y_ptr, role_y, 2 * tile_m + tile % 2, tile // 2, m, k,
            STOCHASTIC_Y, CODE_Y, True, BLOCK // 2, BLOCK,
        )  # fmt: skip
        signal_tile(done_ptr, group)


def launch_swiglu_backward_groups(
    x: Tensor,
    dy: Tensor,
    y_column_amax: Tensor,
    fmt: str,
    rounding: Rounding,
    power_of_two: bool,
    fmt_y: str,
    rounding_y: Rounding,
    power_of_two_y: bool,
    groups: BlockGroups,
    row_dots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, 2I], dy [M, I] bf16, contiguous, not empty, I a multiple of BLOCK -> of dx, `quantize_dual` at rowwise:
    codes, scale, codes_t, scale_t; of y, `quantize_transposed`: codes [I, M], scale fp32 [groups * I].

    y_column_amax: of y's columns in each group, fp32 bits in int32 [groups * I]. row_dots: fp32 [M, I / BLOCK],
    receives `swiglu.row_dots_ref`.
    """
    (m, k), key, key_y = dy.shape, rounding.key, rounding_y.column_key
    codes, codes_t = (x.new_empty(shape, dtype=FORMATS[fmt].dtype) for shape in ((m, 2 * k), (2 * k, m)))
    scale, y_codes_t = empty_scale("rowwise", m, 2 * k, x), empty_codes(dy, fmt_y, "rowwise", transposed=True)[0]
    found = torch.zeros(m + groups.count * (2 * k + 1) + 1, dtype=torch.int32, device=x.device)
    row_amax, column_amax, done = found.split((m, groups.count * 2 * k, groups.count + 1))
    tiles = 2 * k // BLOCK
    steps = launch_schedule(groups, tiles)
    _swiglu_backward_groups_kernel[(steps.shape[0] * tiles,)](
        x.view(torch.int32), dy.view(torch.int32), row_dots, codes.view(torch.int16), codes_t.view(torch.int32), scale,
        row_amax, column_amax, y_codes_t.view(torch.int32), y_column_amax, done, steps, groups.of_block,
        key, rounding.role, key_y, rounding_y.role, m, k,
        rounding.row_key is not None, rounding.column_key is not None, key_y is not None,
        encoding(fmt, x.device, power_of_two), encoding(fmt_y, x.device, power_of_two_y), BLOCK,
        num_warps=WARPS_OF_GRADIENT, maxnreg=REGISTERS_OF_GRADIENT, enable_fp_fusion=False,
    )  # fmt: skip
    scale_t = launch_group_scales(column_amax, fmt, power_of_two)
    return codes, scale, codes_t, scale_t, y_codes_t, launch_group_scales(y_column_amax, fmt_y, power_of_two_y)

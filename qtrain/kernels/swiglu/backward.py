"""A SwiGLU's gradient, with the absmax of its rows and columns, and y's column codes, from one read of x and dy.

    y  [M, I]  = silu(gate) * up       of x [M, 2I], gate, then up
    dx [M, 2I] = its gradient          from dy [M, I] and x

A CTA stores a tile of dx, takes the absmax of its rows and columns, and computes y again for its column codes: those
that grad_weight of the second product reads, under scales from forward (`rowwise.py`). So y is not saved for backward
in any form. A thread holds words of four consecutive rows, as in `quantize/dual_bf16x2.py`.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    abs_bf16x2,
    encode_bf16x2,
    fast_inv_scale,
    max_bf16x2,
    pack_four_codes,
    pack_two_halves,
    pack_two_rows,
    reduce_max_bf16x2,
    row_max_bf16x2,
)
from qtrain.kernels.numerics.encode import encoding, scale_from_amax
from qtrain.kernels.numerics.formats import empty_codes
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_key
from qtrain.kernels.numerics.silu import gate_grad_bf16x2, sum_of_pairs, swiglu_bf16x2, up_grad_bf16x2
from qtrain.kernels.quantize.absmax import atomic_max_bf16x2
from qtrain.kernels.quantize.column_groups import BlockGroups, group_of_row, launch_group_scales
from qtrain.kernels.quantize.dual_tile import max_of_four

BLOCK_M, BLOCK_K = 32, 128
WARPS, REGISTERS = 4, 80
"""Warps of a CTA, registers of a thread: six CTAs share an SM."""


@triton.jit
def _load(ptrs, inside):
    if inside is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, inside, 0)


@triton.jit
def _gradient_row(x_ptrs, dy_ptrs, dx_ptrs, row_ptrs, dots_ptrs, words, inside, rows, PTX: tl.constexpr):
    """Words [R, C] of x and dy: stores dx, its row maxima and, unless dots_ptrs is None, the sums of dy * y -> y, and
    |gradient| of gate and of up."""
    gate, up, dy = _load(x_ptrs, inside), _load(x_ptrs + words, inside), _load(dy_ptrs, inside)
    dgate, dots = gate_grad_bf16x2(dy, gate, up, PTX)
    dup = up_grad_bf16x2(dy, gate, PTX)
    if dots_ptrs is not None:  # here and for each row: kept for longer, the sums would spill
        tl.store(dots_ptrs, sum_of_pairs(dots), rows)
    tl.store(dx_ptrs, dgate, inside)
    tl.store(dx_ptrs + words, dup, inside)
    dgate, dup = abs_bf16x2(dgate), abs_bf16x2(dup)
    tl.atomic_max(row_ptrs, row_max_bf16x2(max_bf16x2(dgate, dup, PTX), PTX), rows, sem="relaxed")
    return swiglu_bf16x2(gate, up, PTX), dgate, dup


@triton.jit(do_not_specialize=["role"])
def _quantize_swiglu_backward_kernel(
    # int32 words of two bf16: [m, k], gate then up; [m, k / 2]; like x.
    x_ptr, dy_ptr, dx_ptr,
    # fp32 [m, k / BLOCK_K]: receives `router_dots`, or None.
    dots_ptr,
    # Of y: int32 words of four codes [k, m / 4]; fp32 [k], None where columns of groups have theirs; int32 bits of the
    # absmax of its columns [k] or [groups * k].
    codes_t_ptr, scale_t_ptr, source_t_ptr,
    # Of dx: int32 of zeros [m], [2 * k] or [groups * 2 * k], receive the bits of the absmax of rows and of columns.
    row_ptr, column_ptr,
    # int32 [m / 128]: the group of each block of rows, with column maxima of its own; or None.
    group_ptr,
    # int64 [3] (seed, step, tensor), or None. m, k = I: elements, multiples of 16.
    key_ptr, role, m, k,
    # EVEN: m and k are multiples of BLOCK_M and BLOCK_K: no masks.
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y, and the same tile of both halves of dx, per CTA."""
    PTX: tl.constexpr = CODE.ptx
    tiles_k = tl.cdiv(k, BLOCK_K)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    # Words of two bf16 in a row of y, and of four codes in a column; M and I are multiples of 16.
    words, quads = tl.multiple_of(k // 2, 8), tl.multiple_of(m // 4, 4)
    if group_ptr is not None:
        group = group_of_row(group_ptr, tile_m * BLOCK_M)
        # Absmaxes of one group follow those of the one before: [groups * I] of y, [groups * 2I] of dx.
        source_t_ptr += group * k
        column_ptr += group * (2 * k)
    # i numbers fours of rows, j the words of a row.
    i, j = tile_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4), tile_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    rows, columns = i < quads, j < words
    inside = None if EVEN else rows[:, None] & columns[None, :]
    at = (4 * i).to(tl.int64)[:, None] * words  # in dy; a row of x and dx has 2 * words
    x_ptrs, dx_ptrs, dy_ptrs = x_ptr + 2 * at + j[None, :], dx_ptr + 2 * at + j[None, :], dy_ptr + at + j[None, :]
    row_ptrs = row_ptr + 4 * i
    dots0, dots1, dots2, dots3 = None, None, None, None
    if dots_ptr is not None:
        dots0 = dots_ptr + (4 * i).to(tl.int64) * tiles_k + tile_k
        dots1, dots2, dots3 = dots0 + tiles_k, dots0 + 2 * tiles_k, dots0 + 3 * tiles_k
    # Row after row of a thread's four: each row's dx is stored before the next is loaded, which bounds live registers.
    y0, gate0, up0 = _gradient_row(x_ptrs, dy_ptrs, dx_ptrs, row_ptrs, dots0, words, inside, rows, PTX)
    y1, gate1, up1 = _gradient_row(
        x_ptrs + 2 * words, dy_ptrs + words, dx_ptrs + 2 * words, row_ptrs + 1, dots1, words, inside, rows, PTX
    )
    y2, gate2, up2 = _gradient_row(
        x_ptrs + 4 * words, dy_ptrs + 2 * words, dx_ptrs + 4 * words, row_ptrs + 2, dots2, words, inside, rows, PTX
    )
    y3, gate3, up3 = _gradient_row(
        x_ptrs + 6 * words, dy_ptrs + 3 * words, dx_ptrs + 6 * words, row_ptrs + 3, dots3, words, inside, rows, PTX
    )
    dgate, dup = max_of_four(gate0, gate1, gate2, gate3, PTX), max_of_four(up0, up1, up2, up3, PTX)
    atomic_max_bf16x2(column_ptr, j, words, reduce_max_bf16x2(dgate, 0, PTX))
    atomic_max_bf16x2(column_ptr + k, j, words, reduce_max_bf16x2(dup, 0, PTX))

    # y's column codes, under scales from forward, whose absmaxes are of exactly this y: it is rounded to bf16 alike.
    across = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    amax = tl.load(source_t_ptr + across, across < k, 0)
    nonfinite = tl.max(amax, 0) >= 0x7F800000  # bits of fp32 Inf, which those of NaN exceed
    scale = scale_from_amax(amax, CODE)
    if scale_t_ptr is not None:
        # All CTAs of these columns compute the same scale: the first row of tiles stores it.
        tl.store(scale_t_ptr + across, scale, (across < k) & (tile_m == 0))
    # The columns 2j and 2j + 1, which share a word.
    inv_first, inv_second = tl.split(tl.reshape(fast_inv_scale(scale, True, PTX), (BLOCK_K // 2, 2)))
    inv_first, inv_second = inv_first[None, :], inv_second[None, :]
    draws, key, block = words // 4, None, 0  # draws in a row of y: one serves eight elements
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role)
        key = seed, step, tensor, tl.minimum(m, 1)  # a runtime 1, as in dual_bf16x2.py: it limits live registers
        block = (4 * i).to(tl.int64)[:, None] * draws + (tile_k * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8))[None, :]
    a0, b0 = encode_bf16x2(y0, inv_first, inv_second, nonfinite, block, key, STOCHASTIC, CODE)
    a1, b1 = encode_bf16x2(y1, inv_first, inv_second, nonfinite, block + draws, key, STOCHASTIC, CODE)
    if STOCHASTIC:
        a0, b0 = pack_two_rows(a0, a1, CODE), pack_two_rows(b0, b1, CODE)
    a2, b2 = encode_bf16x2(y2, inv_first, inv_second, nonfinite, block + 2 * draws, key, STOCHASTIC, CODE)
    a3, b3 = encode_bf16x2(y3, inv_first, inv_second, nonfinite, block + 3 * draws, key, STOCHASTIC, CODE)
    if STOCHASTIC:  # packed after every two rows, which limits live registers
        a0 = pack_two_halves(a0, pack_two_rows(a2, a3, CODE), PTX)
        b0 = pack_two_halves(b0, pack_two_rows(b2, b3, CODE), PTX)
    else:
        a0, b0 = pack_four_codes(a0, a1, a2, a3, CODE), pack_four_codes(b0, b1, b2, b3, CODE)
    # Word j of y's rows is two rows of the transposed codes, 2j and 2j + 1, of `quads` words each.
    ptrs_t = codes_t_ptr + j.to(tl.int64)[:, None] * (2 * quads) + i[None, :]
    inside_t = None if EVEN else columns[:, None] & rows[None, :]
    tl.store(ptrs_t, tl.trans(a0), inside_t)
    tl.store(ptrs_t + quads, tl.trans(b0), inside_t)


def launch_quantize_swiglu_backward(
    x: Tensor,
    dy: Tensor,
    y_column_amax: Tensor,
    fmt: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    groups: BlockGroups | None = None,
    router_dots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x [M, 2I], dy [M, I] bf16, contiguous, not empty, M and I multiples of 16 -> of y = swiglu(x) the codes [I, M]
    and the scale fp32 [I], as `quantize_transposed_ref` at rowwise; dx [M, 2I] bf16; and the absmax of dx's rows [M]
    and columns [2I], as fp32 bits in int32.

    y_column_amax: of y's columns, fp32 bits in int32 [I]. fmt, rounding, power_of_two: of y's codes. groups: of rows;
    all column maxima and scales are then those of each group [groups * I], [groups * 2I]. router_dots: as in
    `launch_swiglu_backward`.
    """
    (m, k), key = dy.shape, rounding.column_key
    dx, (codes_t, scale_t) = torch.empty_like(x), empty_codes(dy, fmt, "rowwise", transposed=True)
    count, group_of_block, scale_t_out = 1, None, scale_t
    if groups is not None:
        count, group_of_block, scale_t_out = groups.count, groups.group_of_block, None
        scale_t = launch_group_scales(y_column_amax, fmt, power_of_two)
    found = torch.zeros(m + count * 2 * k, dtype=torch.int32, device=x.device)  # one memset for rows and columns
    _quantize_swiglu_backward_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(k, BLOCK_K),)](
        x.view(torch.int32), dy.view(torch.int32), dx.view(torch.int32), router_dots, codes_t.view(torch.int32),
        scale_t_ptr=scale_t_out, source_t_ptr=y_column_amax, row_ptr=found[:m], column_ptr=found[m:],
        group_ptr=group_of_block, key_ptr=key, role=rounding.role, m=m, k=k,
        STOCHASTIC=key is not None, CODE=encoding(fmt, x.device, power_of_two),
        EVEN=m % BLOCK_M == k % BLOCK_K == 0, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return codes_t, scale_t, dx, (found[:m], found[m:])

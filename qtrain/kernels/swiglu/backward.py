"""The gradient of a gated MLP's gate and up, with what the quantizing of it wants to know, from one read of x and dy.

    y  [M, I]  = silu(gate) * up       of x [M, 2I], gate, then up
    dx [M, 2I] = its gradient          from dy [M, I] and x

A program writes a tile of dx, takes the maxima of its rows and columns, and makes y's codes along columns on the way:
those that the second product's grad_weight reads, under scales that forward has found (`gated_rows.py`). So y is not
kept for backward in any form. A thread holds words of four consecutive rows, as in `quantize_blocks.py`.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import larger, largest, largest_of_rows, magnitudes
from qtrain.kernels.numerics.bf16x2_encode import encode_bf16x2, four_codes, quick_reciprocal, two_halves, two_rows
from qtrain.kernels.numerics.encode import casts_to_fp8, scale_from_amax
from qtrain.kernels.numerics.formats import FORMATS, empty_scale
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, philox_key
from qtrain.kernels.numerics.rounding import NEAREST, Rounding
from qtrain.kernels.numerics.silu import gate_grad_bf16x2, swiglu_bf16x2, up_grad_bf16x2
from qtrain.kernels.quantize.absmax import record_amax_bf16x2

BLOCK_M, BLOCK_K = 32, 128
WARPS, REGISTERS = 4, 80
"""Of a program, and of a thread: six programs share a multiprocessor."""


@triton.jit
def _load(ptrs, inside):
    if inside is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, inside, 0)


@triton.jit
def _row(x_ptrs, dy_ptrs, dx_ptrs, row_ptrs, words, inside, rows, CAST: tl.constexpr):
    """Of rows [R, C] of words: stores dx, takes its rows' maxima -> y, and |gradient| of gate and of up."""
    gate, up, dy = _load(x_ptrs, inside), _load(x_ptrs + words, inside), _load(dy_ptrs, inside)
    dgate, dup = gate_grad_bf16x2(dy, gate, up, CAST), up_grad_bf16x2(dy, gate, CAST)
    tl.store(dx_ptrs, dgate, inside)
    tl.store(dx_ptrs + words, dup, inside)
    dgate, dup = magnitudes(dgate), magnitudes(dup)
    tl.atomic_max(row_ptrs, largest_of_rows(larger(dgate, dup, CAST), CAST), rows, sem="relaxed")
    return swiglu_bf16x2(gate, up, CAST), dgate, dup


@triton.jit(do_not_specialize=["role"])
def _gradient_kernel(
    x_ptr, dy_ptr, dx_ptr, codes_t_ptr, scale_t_ptr, source_t_ptr, row_ptr, column_ptr, key_ptr, role, m, k,
    STOCHASTIC: tl.constexpr, N_ROLES: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CAST: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x, dy and dx as words of two elements, codes_t of y as words of four codes; m, k = I: multiples of 16.

    EVEN: they are of BLOCK_M and BLOCK_K. source_t: bits of the absmax of y's columns. row_ptr [m], column_ptr [2 * k]:
    int32, zeros, for those of dx.
    """
    tiles_k = tl.cdiv(k, BLOCK_K)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    words, quads = tl.multiple_of(k // 2, 8), tl.multiple_of(m // 4, 4)
    i, j = tile_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4), tile_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    rows, columns = i < quads, j < words
    inside = None if EVEN else rows[:, None] & columns[None, :]
    at = (4 * i).to(tl.int64)[:, None] * words
    x_ptrs, dx_ptrs, dy_ptrs = x_ptr + 2 * at + j[None, :], dx_ptr + 2 * at + j[None, :], dy_ptr + at + j[None, :]
    row_ptrs = row_ptr + 4 * i
    y0, gate0, up0 = _row(x_ptrs, dy_ptrs, dx_ptrs, row_ptrs, words, inside, rows, CAST)
    y1, gate1, up1 = _row(
        x_ptrs + 2 * words, dy_ptrs + words, dx_ptrs + 2 * words, row_ptrs + 1, words, inside, rows, CAST
    )  # fmt: skip
    y2, gate2, up2 = _row(
        x_ptrs + 4 * words, dy_ptrs + 2 * words, dx_ptrs + 4 * words, row_ptrs + 2, words, inside, rows, CAST
    )  # fmt: skip
    y3, gate3, up3 = _row(
        x_ptrs + 6 * words, dy_ptrs + 3 * words, dx_ptrs + 6 * words, row_ptrs + 3, words, inside, rows, CAST
    )  # fmt: skip
    dgate = larger(larger(gate0, gate1, CAST), larger(gate2, gate3, CAST), CAST)
    dup = larger(larger(up0, up1, CAST), larger(up2, up3, CAST), CAST)
    record_amax_bf16x2(column_ptr, j, words, largest(dgate, 0, CAST))
    record_amax_bf16x2(column_ptr + k, j, words, largest(dup, 0, CAST))

    across = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    bits = tl.load(source_t_ptr + across, across < k, 0)
    bad = tl.max(bits, 0) >= 0x7F800000
    scale = scale_from_amax(bits, LARGEST, POWER_OF_TWO)
    tl.store(scale_t_ptr + across, scale, (across < k) & (tile_m == 0))
    by_first, by_second = tl.split(tl.reshape(quick_reciprocal(scale, True, CAST), (BLOCK_K // 2, 2)))
    by_first, by_second = by_first[None, :], by_second[None, :]
    draws, key, block = words // 4, None, 0
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role, N_ROLES)
        key = seed, step, tensor, tl.minimum(m, 1)
        block = (4 * i).to(tl.int64)[:, None] * draws + (tile_k * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8))[None, :]
    a0, b0 = encode_bf16x2(y0, by_first, by_second, bad, block, key, STOCHASTIC, FMT, LARGEST, CAST)
    a1, b1 = encode_bf16x2(y1, by_first, by_second, bad, block + draws, key, STOCHASTIC, FMT, LARGEST, CAST)
    if STOCHASTIC:
        a0, b0 = two_rows(a0, a1, FMT, CAST), two_rows(b0, b1, FMT, CAST)
    a2, b2 = encode_bf16x2(y2, by_first, by_second, bad, block + 2 * draws, key, STOCHASTIC, FMT, LARGEST, CAST)
    a3, b3 = encode_bf16x2(y3, by_first, by_second, bad, block + 3 * draws, key, STOCHASTIC, FMT, LARGEST, CAST)
    if STOCHASTIC:
        a0 = two_halves(a0, two_rows(a2, a3, FMT, CAST), CAST)
        b0 = two_halves(b0, two_rows(b2, b3, FMT, CAST), CAST)
    else:
        a0, b0 = four_codes(a0, a1, a2, a3, FMT, CAST), four_codes(b0, b1, b2, b3, FMT, CAST)
    ptrs_t = codes_t_ptr + j.to(tl.int64)[:, None] * (2 * quads) + i[None, :]
    inside_t = None if EVEN else columns[:, None] & rows[None, :]
    tl.store(ptrs_t, tl.trans(a0), inside_t)
    tl.store(ptrs_t + quads, tl.trans(b0), inside_t)


def launch_quantize_swiglu_backward(
    x: Tensor,
    dy: Tensor,
    y_columns: Tensor,
    fmt: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x [M, 2I], dy [M, I] bf16, contiguous, not empty, M and I multiples of 16 -> of y = swiglu(x) the codes [I, M]
    and the scale fp32 [I] that `quantize_transposed_ref` gives rowwise; dx [M, 2I] bf16; and the bits of the absmax of
    dx's rows [M] and columns [2I], int32.

    y_columns: those of y's columns, int32 [I]. fmt, rounding, power_of_two: of y's codes.
    """
    (m, k), form, key = dy.shape, FORMATS[fmt], rounding.column_key
    dx, codes_t = torch.empty_like(x), x.new_empty(k, m, dtype=form.dtype)
    scale_t = empty_scale("rowwise", k, m, x)
    found = torch.zeros(m + 2 * k, dtype=torch.int32, device=x.device)
    _gradient_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(k, BLOCK_K),)](
        x.view(torch.int32), dy.view(torch.int32), dx.view(torch.int32), codes_t.view(torch.int32), scale_t, y_columns,
        found[:m], found[m:], key, rounding.role, m, k,
        key is not None, len(ROUNDED_TENSORS), fmt, form.max, power_of_two, casts_to_fp8(x.device),
        m % BLOCK_M == k % BLOCK_K == 0, BLOCK_M, BLOCK_K,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return codes_t, scale_t, dx, (found[:m], found[m:])

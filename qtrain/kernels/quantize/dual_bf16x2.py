"""Quantizes bf16 in both layouts to 8 bits, FP8's and INT8's: weights, inputs and gradients.

What `quantize_tiles` does for any format, written for few instructions and registers, so that programs enough share a
multiprocessor for some to read while others reckon. Two neighbours of a row stay in the 32-bit word they were read in,
absolute maxima are taken of both at once, and a thread holds words of four consecutive rows: four codes of a column
are a word again, and only words go through shared memory to be turned. Either layout may be rounded stochastically:
the four words of a random draw belong to four words of x side by side, which a thread holds.

Scales are those of a program's block of 128 (1x128, 128x128), of whole rows and columns or of the tensor, whose absmax
a pass before leaves, or one is given for the tensor.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import larger, larger_half, largest, lower, magnitudes, upper, zero_nonfinite_bf16x2
from qtrain.kernels.numerics.bf16x2_encode import (
    draw_bf16x2,
    four_codes,
    quick_reciprocal,
    scale_bf16x2,
    two_codes,
    two_halves,
    two_rows,
)
from qtrain.kernels.numerics.encode import casts_to_fp8, inv_scale_of, scale_from_amax
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_scale
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, philox_key
from qtrain.kernels.numerics.rounding import NEAREST, Rounding
from qtrain.kernels.numerics.silu import gate_grad_bf16x2, swiglu_bf16x2, up_grad_bf16x2
from qtrain.kernels.quantize.absmax import launch_absmax

BLOCK = 128
WARPS, REGISTERS = 4, 168
"""Of a program, and of a thread: three programs, with 96 KiB on their way, share an H200's multiprocessor."""
WARPS_OF_GRADIENT, REGISTERS_OF_GRADIENT = 8, 128
"""The same for a gate's gradient, which is made of three tensors: more warps, each with less to keep."""


@triton.jit
def _largest_of_four(a, b, c, d, CAST: tl.constexpr):
    """Pairs -> the pair of the largest absolute values."""
    a, b, c, d = magnitudes(a), magnitudes(b), magnitudes(c), magnitudes(d)
    return larger(larger(a, b, CAST), larger(c, d, CAST), CAST)


@triton.jit
def _largest_of_all(pairs, CAST: tl.constexpr):
    """Pairs without sign [R, C] -> the largest number, as bits of fp32."""
    return larger_half(largest(largest(pairs, 1, CAST), 0, CAST))


@triton.jit
def _row_scale(pairs, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, CAST: tl.constexpr):
    """Pairs [R, C] -> the scales of their rows [R]."""
    most = largest(magnitudes(pairs), 1, CAST)
    return scale_from_amax(larger_half(most), LARGEST, POWER_OF_TWO)


@triton.jit
def _four_rows(ptrs, stride, inside):
    """Words at `ptrs` and at the same places of the three rows below; 0 outside."""
    if inside is None:
        return tl.load(ptrs), tl.load(ptrs + stride), tl.load(ptrs + 2 * stride), tl.load(ptrs + 3 * stride)
    else:
        first, second = tl.load(ptrs, inside, 0), tl.load(ptrs + stride, inside, 0)
        return first, second, tl.load(ptrs + 2 * stride, inside, 0), tl.load(ptrs + 3 * stride, inside, 0)


@triton.jit
def _coded_row(
    ptrs, inside, pairs, by, by_first, by_second, beyond, block, key, STOCHASTIC: tl.constexpr,
    STOCHASTIC_T: tl.constexpr, SAME: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Stores the codes of rows and gives what those of columns are packed from, if STOCHASTIC_T says so or both are the
    SAME. block: as `philox` takes it; key: its other arguments, the last one not known to the compiler."""
    words, half = None, 0
    if STOCHASTIC or STOCHASTIC_T:
        words, half = draw_bf16x2(block, key, CAST)
    a, b = scale_bf16x2(pairs, by, by, words, half, beyond, STOCHASTIC, FMT, LARGEST, CAST)
    tl.store(ptrs, two_codes(a, b, STOCHASTIC, FMT, CAST), inside)
    if STOCHASTIC_T and not SAME:
        a, b = scale_bf16x2(pairs, by_first, by_second, words, half, beyond, True, FMT, LARGEST, CAST)
    return a, b


@triton.jit(do_not_specialize=["role", "stride", "stride_t"])
def _blocks_kernel(
    x_ptr, dy_ptr, codes_ptr, codes_t_ptr, scale_ptr, scale_t_ptr, source_ptr, source_t_ptr, absmax_ptr,
    key_ptr, role, m, k, stride, stride_t,
    GATE: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_T: tl.constexpr, N_ROLES: tl.constexpr,
    FMT: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, SCALES: tl.constexpr,
    CAST: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, codes and codes_t as words of two elements, two codes and four codes; m, k: elements, multiples of 16.

    SCALES: the granularity, or "given" for one scale, at `source_ptr`; the bits of the absmax of x then go to
    `absmax_ptr`, if any. Else those come from `source_ptr` (tensorwise), and `source_t_ptr` (rowwise). stride,
    stride_t: of the scales, down, where a block of x has one (128x128). EVEN: m and k are multiples of BLOCK.
    STOCHASTIC, STOCHASTIC_T: how codes and codes_t are rounded.

    GATE: what is quantized is not x but what a gated MLP makes of it, gate and up, k wide: "forward" the activation, of
    x [m, 2 * k], "backward" the gradient of x [m, k] itself, from that of the activation at `dy_ptr`.
    """
    tile = tl.program_id(0)
    if SCALES == "rowwise" or SCALES == "tensorwise":  # first what the pass before read last
        tile = tl.num_programs(0) - 1 - tile
    tiles_k = tl.cdiv(k, BLOCK)
    tile_m, tile_k = tile // tiles_k, tile % tiles_k
    if GATE == "backward":  # tiles of gate and of up, which read the same, side by side
        tile_k = tile_k % 2 * (tiles_k // 2) + tile_k // 2
    words, quads = tl.multiple_of(k // 2, 8), tl.multiple_of(m // 4, 4)  # in a row of x, in a row of codes_t
    i, j, lane = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK)
    start = tile_m.to(tl.int64) * BLOCK * words + tile_k * (BLOCK // 2)
    offset = i[:, None] * (4 * words) + j[None, :]
    down, across = tile_m * BLOCK + lane, tile_k * BLOCK + lane
    if SCALES == "given":
        scale, known = tl.load(source_ptr), 0
        if absmax_ptr is not None:
            known = tl.load(absmax_ptr)  # an old value is as good, and hardly any program has more to say
    if EVEN:
        rows, columns = tl.full((BLOCK // 4,), True, tl.int1), tl.full((BLOCK // 2,), True, tl.int1)
        inside: tl.constexpr = None
    else:
        rows, columns = tile_m * (BLOCK // 4) + i < quads, tile_k * (BLOCK // 2) + j < words
        inside = rows[:, None] & columns[None, :]
    if GATE == "forward":
        gate_ptrs = x_ptr + start + offset + (tile_m.to(tl.int64) * BLOCK + 4 * i)[:, None] * words
        x0, x1, x2, x3 = _four_rows(gate_ptrs, 2 * words, inside)
        up0, up1, up2, up3 = _four_rows(gate_ptrs + words, 2 * words, inside)
        x0, x1, x2, x3 = (
            swiglu_bf16x2(x0, up0, CAST),
            swiglu_bf16x2(x1, up1, CAST),
            swiglu_bf16x2(x2, up2, CAST),
            swiglu_bf16x2(x3, up3, CAST),
        )
    elif GATE == "backward":
        half = tl.multiple_of(words // 2, BLOCK // 2)
        left = tl.multiple_of(tile_k * (BLOCK // 2) % half, BLOCK // 2)
        gate_ptrs = x_ptr + (start - tile_k * (BLOCK // 2) + left) + offset
        dy_ptrs = dy_ptr + tile_m.to(tl.int64) * BLOCK * half + left + i[:, None] * (4 * half) + j[None, :]
        x0, x1, x2, x3 = _four_rows(gate_ptrs, words, inside)
        dy0, dy1, dy2, dy3 = _four_rows(dy_ptrs, half, inside)
        up = tile_k * (BLOCK // 2) >= half
        if up:
            x0, x1 = up_grad_bf16x2(dy0, x0, CAST), up_grad_bf16x2(dy1, x1, CAST)
            x2, x3 = up_grad_bf16x2(dy2, x2, CAST), up_grad_bf16x2(dy3, x3, CAST)
        else:
            up0, up1, up2, up3 = _four_rows(gate_ptrs + half, words, inside)
            x0, x1 = gate_grad_bf16x2(dy0, x0, up0, CAST), gate_grad_bf16x2(dy1, x1, up1, CAST)
            x2, x3 = gate_grad_bf16x2(dy2, x2, up2, CAST), gate_grad_bf16x2(dy3, x3, up3, CAST)
    else:
        x0, x1, x2, x3 = _four_rows(x_ptr + start + offset, words, inside)

    beyond = False
    if SCALES == "rowwise":
        tl.debug_barrier()  # or the compiler asks for x only once these have come
        bits, bits_t = tl.load(source_ptr + down, down < m, 0), tl.load(source_t_ptr + across, across < k, 0)
        bad = tl.max(tl.maximum(bits, bits_t), 0) >= 0x7F800000
        scale, scale_t = scale_from_amax(bits, LARGEST, POWER_OF_TWO), scale_from_amax(bits_t, LARGEST, POWER_OF_TWO)
        tl.store(scale_ptr + down, scale, (down < m) & (tile_k == 0))
        tl.store(scale_t_ptr + across, scale_t, (across < k) & (tile_m == 0))
        even, odd = tl.split(tl.reshape(quick_reciprocal(scale, True, CAST), (BLOCK // 4, 2, 2)))
        by0, by2 = tl.split(even)
        by1, by3 = tl.split(odd)
        by0, by1, by2, by3 = by0[:, None], by1[:, None], by2[:, None], by3[:, None]
        by_first, by_second = tl.split(tl.reshape(quick_reciprocal(scale_t, True, CAST), (BLOCK // 2, 2)))
        by_first, by_second = by_first[None, :], by_second[None, :]
    elif SCALES == "tensorwise":
        bits = tl.load(source_ptr)
        bad = bits >= 0x7F800000
        scale = scale_from_amax(bits, LARGEST, POWER_OF_TWO)
        tl.store(scale_ptr, scale, tile == 0)
        tl.store(scale_t_ptr, scale, tile == 0)
        by0 = quick_reciprocal(scale, bad, CAST)
        by1, by2, by3 = by0, by0, by0
    elif SCALES == "given":
        bad: tl.constexpr = False  # NaN becomes FP8's and the rest saturates
        tl.store(scale_ptr, scale, tile == 0)
        tl.store(scale_t_ptr, scale, tile == 0)
        by0 = inv_scale_of(scale, False)
        by1, by2, by3 = by0, by0, by0
        if absmax_ptr is not None or STOCHASTIC or STOCHASTIC_T:
            most = _largest_of_all(_largest_of_four(x0, x1, x2, x3, CAST), CAST)
            beyond = (most.to(tl.float32, bitcast=True) * by0 <= LARGEST) == 0  # a NaN is
            if absmax_ptr is not None and most > known:
                tl.atomic_max(absmax_ptr, most, sem="relaxed")
    elif SCALES == "128x128":
        most = _largest_of_all(_largest_of_four(x0, x1, x2, x3, CAST), CAST)
        bad = most >= 0x7F800000
        scale = scale_from_amax(most, LARGEST, POWER_OF_TWO)
        tl.store(scale_ptr + tile_m * stride + tile_k, scale)
        tl.store(scale_t_ptr + tile_k * stride_t + tile_m, scale)
        by0 = quick_reciprocal(scale, bad, CAST)
        by1, by2, by3 = by0, by0, by0
    else:
        most = largest(_largest_of_four(x0, x1, x2, x3, CAST), 0, CAST)
        bad = tl.max(larger_half(most), 0) >= 0x7F800000
        scale0, scale1 = _row_scale(x0, LARGEST, POWER_OF_TWO, CAST), _row_scale(x1, LARGEST, POWER_OF_TWO, CAST)
        scale2, scale3 = _row_scale(x2, LARGEST, POWER_OF_TWO, CAST), _row_scale(x3, LARGEST, POWER_OF_TWO, CAST)
        scale = tl.reshape(tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3)), (BLOCK,))
        tl.store(scale_ptr + tile_k.to(tl.int64) * m + down, scale, down < m)
        by0, by1 = quick_reciprocal(scale0, bad, CAST)[:, None], quick_reciprocal(scale1, bad, CAST)[:, None]
        by2, by3 = quick_reciprocal(scale2, bad, CAST)[:, None], quick_reciprocal(scale3, bad, CAST)[:, None]

    x0, x1, x2, x3 = (
        zero_nonfinite_bf16x2(x0, bad),
        zero_nonfinite_bf16x2(x1, bad),
        zero_nonfinite_bf16x2(x2, bad),
        zero_nonfinite_bf16x2(x3, bad),
    )
    if SCALES == "1x128":
        first, second = (
            scale_from_amax(lower(most), LARGEST, POWER_OF_TWO),
            scale_from_amax(upper(most), LARGEST, POWER_OF_TWO),
        )
        scale_t = tl.reshape(tl.join(first, second), (BLOCK,))
        tl.store(scale_t_ptr + tile_m.to(tl.int64) * k + across, scale_t, across < k)
        by_first, by_second = quick_reciprocal(first, bad, CAST)[None, :], quick_reciprocal(second, bad, CAST)[None, :]
    elif SCALES != "rowwise":
        by_first, by_second = by0, by0
    # Stores of 8 codes a thread, not of 16: half the registers to gather them in.
    ptrs = codes_ptr + start + tl.max_contiguous(offset, (1, 4))
    SAME: tl.constexpr = STOCHASTIC == STOCHASTIC_T and SCALES != "1x128" and SCALES != "rowwise"
    block, draws, key = 0, words // 4, None  # draws: in a row of x
    if STOCHASTIC or STOCHASTIC_T:
        seed, step, tensor = philox_key(key_ptr, role, N_ROLES)
        key = seed, step, tensor, tl.minimum(m, 1)
        first_of_row = (tile_m.to(tl.int64) * BLOCK + 4 * i) * draws + tile_k * (BLOCK // 8)
        block = first_of_row[:, None] + tl.arange(0, BLOCK // 8)[None, :]
    a0, b0 = _coded_row(
        ptrs, inside, x0, by0, by_first, by_second, beyond, block, key,
        STOCHASTIC, STOCHASTIC_T, SAME, FMT, LARGEST, CAST,
    )  # fmt: skip
    a1, b1 = _coded_row(
        ptrs + words, inside, x1, by1, by_first, by_second, beyond, block + draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, FMT, LARGEST, CAST,
    )  # fmt: skip
    if STOCHASTIC_T:
        a0, b0 = two_rows(a0, a1, FMT, CAST), two_rows(b0, b1, FMT, CAST)
    a2, b2 = _coded_row(
        ptrs + 2 * words, inside, x2, by2, by_first, by_second, beyond, block + 2 * draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, FMT, LARGEST, CAST,
    )  # fmt: skip
    a3, b3 = _coded_row(
        ptrs + 3 * words, inside, x3, by3, by_first, by_second, beyond, block + 3 * draws, key,
        STOCHASTIC, STOCHASTIC_T, SAME, FMT, LARGEST, CAST,
    )  # fmt: skip
    if STOCHASTIC_T:
        a0 = two_halves(a0, two_rows(a2, a3, FMT, CAST), CAST)
        b0 = two_halves(b0, two_rows(b2, b3, FMT, CAST), CAST)
    else:
        if not SAME:
            a0, b0 = scale_bf16x2(x0, by_first, by_second, None, 0, False, False, FMT, LARGEST, CAST)
            a1, b1 = scale_bf16x2(x1, by_first, by_second, None, 0, False, False, FMT, LARGEST, CAST)
            a2, b2 = scale_bf16x2(x2, by_first, by_second, None, 0, False, False, FMT, LARGEST, CAST)
            a3, b3 = scale_bf16x2(x3, by_first, by_second, None, 0, False, False, FMT, LARGEST, CAST)
        a0, b0 = four_codes(a0, a1, a2, a3, FMT, CAST), four_codes(b0, b1, b2, b3, FMT, CAST)
    start_t = tile_k.to(tl.int64) * BLOCK * quads + tile_m * (BLOCK // 4)
    ptrs_t = codes_t_ptr + start_t + j[:, None] * (2 * quads) + i[None, :]
    inside_t = None if EVEN else columns[:, None] & rows[None, :]
    tl.store(ptrs_t, tl.trans(a0), inside_t)
    tl.store(ptrs_t + quads, tl.trans(b0), inside_t)


def gate_of(gated: bool, dy: Tensor | None) -> str:
    """GATE of the kernels that have one."""
    return "" if not gated else "forward" if dy is None else "backward"


def supports_dual_bf16x2(x: Tensor, fmt: str, granularity: str, given: bool = False) -> bool:
    """Whether `launch_dual_bf16x2` does this. It reads words, so that x must not start within one.

    given: the scale is, which FP8's conversions saturate for.
    """
    if x.dtype is not torch.bfloat16 or any(number % 16 for number in (*x.shape, x.storage_offset())):
        return False
    if given:
        return fmt in ("e4m3", "e5m2") and granularity == "tensorwise"
    return fmt in EIGHT_BITS and granularity in ("128x128", "1x128", "rowwise", "tensorwise")


def launch_dual_bf16x2(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    given: Tensor | None = None,
    absmax: Tensor | None = None,
    *,
    of_gate: bool = False,
    dy: Tensor | None = None,
    maxima: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel for `quantize_ref` and `quantize_transposed_ref` at once: codes, scale, codes_t, scale_t.

    x contiguous, not empty, `supports_dual_bf16x2`. given: the scale. absmax: int32 [1] of zeros, to receive x's bits
    under a scale that is given. of_gate: what is quantized is swiglu(x) or, where dy is its gradient, the gradient of
    x; x [M, 2I], I a multiple of BLOCK. maxima: the bits of the absmax of rows and of columns, int32, where they are
    known (rowwise).
    """
    m, k, form = x.shape[0], x.shape[1] // 2 if of_gate and dy is None else x.shape[1], FORMATS[fmt]
    source, source_t = given, None
    assert not of_gate or given is not None or granularity in ("1x128", "128x128"), "no pass makes that scale"
    if granularity == "rowwise":
        source, source_t = maxima or launch_absmax(x, rows=True, columns=True)[1:]
    elif granularity == "tensorwise" and given is None:
        source, _, _ = launch_absmax(x, tensor=True)
    codes, codes_t = x.new_empty(m, k, dtype=form.dtype), x.new_empty(k, m, dtype=form.dtype)
    scale, scale_t = empty_scale(granularity, m, k, x), empty_scale(granularity, k, m, x)
    _blocks_kernel[(triton.cdiv(m, BLOCK) * triton.cdiv(k, BLOCK),)](
        x.view(torch.int32), None if dy is None else dy.view(torch.int32),
        codes.view(torch.int16), codes_t.view(torch.int32), scale, scale_t,
        source, source_t, absmax, rounding.key, rounding.role, m, k, scale.stride(0), scale_t.stride(0),
        gate_of(of_gate, dy), rounding.row_key is not None, rounding.column_key is not None,
        len(ROUNDED_TENSORS), fmt, form.max, power_of_two, granularity if given is None else "given",
        casts_to_fp8(x.device), m % BLOCK == k % BLOCK == 0, BLOCK,
        num_warps=WARPS if dy is None else WARPS_OF_GRADIENT,
        maxnreg=REGISTERS if dy is None else REGISTERS_OF_GRADIENT,
        enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, codes_t, scale_t

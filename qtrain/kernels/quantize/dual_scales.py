"""Scales of a tile of 128 x 128 that `dual_bf16x2.py` quantizes in both layouts: absmaxes, scales and their inverses.

A thread holds words of two neighbors in a row, of four consecutive rows; tensors of such words are called pairs.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    abs_bf16x2,
    high_half,
    low_half,
    max_bf16x2,
    max_of_halves,
    reduce_max_bf16x2,
)
from qtrain.kernels.numerics.bf16x2_encode import fast_inv_scale
from qtrain.kernels.numerics.encode import scale_from_amax


@triton.jit
def max_of_four(a, b, c, d, PTX: tl.constexpr):
    """Pairs -> the elementwise maximum of their absolute values, as a pair."""
    a, b, c, d = abs_bf16x2(a), abs_bf16x2(b), abs_bf16x2(c), abs_bf16x2(d)
    return max_bf16x2(max_bf16x2(a, b, PTX), max_bf16x2(c, d, PTX), PTX)


@triton.jit
def max_of_tile(x0, x1, x2, x3, PTX: tl.constexpr):
    """The absmax of four rows [R, C], as bits of fp32."""
    amax = max_of_four(x0, x1, x2, x3, PTX)
    return max_of_halves(reduce_max_bf16x2(reduce_max_bf16x2(amax, 1, PTX), 0, PTX))


@triton.jit
def row_amax(bf16x2, PTX: tl.constexpr):
    """Pairs [R, C] -> the absmax of their rows [R], as bits of fp32."""
    return max_of_halves(reduce_max_bf16x2(abs_bf16x2(bf16x2), 1, PTX))


@triton.jit
def whole_row_scales(
    source_ptr, source_t_ptr, scale_ptr, scale_t_ptr, down, across, m, k, tile_m, tile_k, CODE: tl.constexpr
):
    """Scales of rows `down` and columns `across` from bits of their absmax, stored by the first tile of each (those of
    columns unless scale_t_ptr is None) -> inverse scales of the four rows of a thread, of the first and the second
    numbers of pairs, nonfinite."""
    R: tl.constexpr = down.shape[0] // 4
    C: tl.constexpr = across.shape[0] // 2
    tl.debug_barrier()  # or the compiler issues the loads of x only after these have arrived
    bits, bits_t = tl.load(source_ptr + down, down < m, 0), tl.load(source_t_ptr + across, across < k, 0)
    nonfinite = tl.max(tl.maximum(bits, bits_t), 0) >= 0x7F800000
    scale, scale_t = scale_from_amax(bits, CODE), scale_from_amax(bits_t, CODE)
    tl.store(scale_ptr + down, scale, (down < m) & (tile_k == 0))
    if scale_t_ptr is not None:
        tl.store(scale_t_ptr + across, scale_t, (across < k) & (tile_m == 0))
    even, odd = tl.split(tl.reshape(fast_inv_scale(scale, True, CODE.ptx), (R, 2, 2)))
    inv0, inv2 = tl.split(even)
    inv1, inv3 = tl.split(odd)
    inv_first, inv_second = tl.split(tl.reshape(fast_inv_scale(scale_t, True, CODE.ptx), (C, 2)))
    inv = inv0[:, None], inv1[:, None], inv2[:, None], inv3[:, None]
    return inv, inv_first[None, :], inv_second[None, :], nonfinite


@triton.jit
def block_row_scales(amax0, amax1, amax2, amax3, nonfinite, scale_ptr, down, m, tile_k, CODE: tl.constexpr):
    """1x128: scales of the tile's rows `down` from their absmax, stored -> inverse scales of the four rows of a
    thread."""
    scale0, scale1, scale2, scale3 = (
        scale_from_amax(amax0, CODE), scale_from_amax(amax1, CODE),
        scale_from_amax(amax2, CODE), scale_from_amax(amax3, CODE),
    )  # fmt: skip
    scale = tl.reshape(tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3)), (down.shape[0],))
    tl.store(scale_ptr + tile_k.to(tl.int64) * m + down, scale, down < m)
    return (
        fast_inv_scale(scale0, nonfinite, CODE.ptx)[:, None], fast_inv_scale(scale1, nonfinite, CODE.ptx)[:, None],
        fast_inv_scale(scale2, nonfinite, CODE.ptx)[:, None], fast_inv_scale(scale3, nonfinite, CODE.ptx)[:, None],
    )  # fmt: skip


@triton.jit
def block_column_scales(column_amax, nonfinite, scale_t_ptr, across, k, tile_m, CODE: tl.constexpr):
    """1x128: scales of the tile's columns `across` from their absmax as pairs, stored -> inverse scales of the first
    and of the second numbers of pairs."""
    first, second = scale_from_amax(low_half(column_amax), CODE), scale_from_amax(high_half(column_amax), CODE)
    scale = tl.reshape(tl.join(first, second), (across.shape[0],))
    tl.store(scale_t_ptr + tile_m.to(tl.int64) * k + across, scale, across < k)
    inv_first = fast_inv_scale(first, nonfinite, CODE.ptx)[None, :]
    return inv_first, fast_inv_scale(second, nonfinite, CODE.ptx)[None, :]


@triton.jit
def record_amax(x0, x1, x2, x3, inv_scale, amax_ptr, known_amax, CODE: tl.constexpr):
    """Stores the tile's absmax, if it exceeds the known one -> whether it exceeds the range of a given scale."""
    amax = max_of_tile(x0, x1, x2, x3, CODE.ptx)
    overflow = (amax.to(tl.float32, bitcast=True) * inv_scale <= CODE.fmt.max) == 0  # true of a NaN
    if amax_ptr is not None and amax > known_amax:
        tl.atomic_max(amax_ptr, amax, sem="relaxed")
    return overflow

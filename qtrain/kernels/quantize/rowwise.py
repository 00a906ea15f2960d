"""Quantizes along rows (rowwise, 1x128, 1x32): each group of elements that share a scale is read once.

Two kernels. The general one takes any format: a CTA takes several short groups, or one row; a row too long for
registers is read twice in chunks, the second time mostly from cache. The bf16x2 kernel takes bf16 to 8 bits or INT4
(rowwise, 1x128) and gives the same codes in fewer instructions, which are what bounds stochastic rounding: two
neighbors stay in the 32-bit word that they were read in. Its CTA takes several rows, or one group of columns of them
(1x128); a row whose length is far below a power of two is held as two power-of-two blocks.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import abs_bf16x2, fast_inv_scale, row_max_bf16x2, store_codes_bf16x2
from qtrain.kernels.numerics.encode import (
    abs_bits,
    encode,
    encoding,
    inv_scale_of,
    pack_codes,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_codes, group_shape
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_bits, philox_key

LONGEST = 16384
"""The longest row, in elements, that a CTA holds in registers."""
CHUNK = 1024
"""Elements per iteration of a longer row, or of one that would fill less than three quarters of a power of two."""


@triton.jit(do_not_specialize=["role", "groups", "per_row"])
def _groups_kernel(
    # x fp32 or bf16 [m, k], codes int8 [m, ceil(k / packing)], contiguous; scales fp32, one a group; key int64 [3].
    x_ptr, codes_ptr, scale_ptr, key_ptr, role,
    # Groups in all, in a row, and elements of one; the last group of a row may be shorter.
    groups, per_row, width, k,
    # Of the scales: 1x128 has them column-major.
    row_stride, group_stride,
    # BLOCK: width rounded up to a power of two.
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GROUPS groups per CTA, each held in registers: one read of x."""
    PACKING: tl.constexpr = CODE.fmt.packing
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, start = (group // per_row).to(tl.int64)[:, None], (group % per_row * width)[:, None]
    inside = (group < groups)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * k + start + lane, inside & (lane < width) & (start + lane < k), 0.0)
    amax = tl.max(abs_bits(x), 1)
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    scale = scale_from_amax(amax, CODE)
    tl.store(scale_ptr + group // per_row * row_stride + group % per_row * group_stride, scale, group < groups)
    noise = 0
    if STOCHASTIC:  # k is a multiple of 8 here, so the eight elements of a draw share a row
        block = row * (k // 8) + start // 8 + tl.arange(0, BLOCK // 8)[None, :]
        noise = philox_bits(block, key_ptr, role, CODE.ptx)
    x = zero_nonfinite(x, nonfinite)
    codes = encode(x, inv_scale_of(scale, nonfinite)[:, None], noise, STOCHASTIC, False, CODE)
    byte = tl.arange(0, BLOCK // PACKING)[None, :]  # of the group; masked lanes were loaded as zeros
    stored = inside & (byte * PACKING < width) & (start + byte * PACKING < k)
    tl.store(codes_ptr + row * tl.cdiv(k, PACKING) + start // PACKING + byte, pack_codes(codes, PACKING), stored)


@triton.jit(do_not_specialize=["role"])
def _long_rows_kernel(
    # As above, with one group to a row.
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, k,
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row per CTA, in chunks of BLOCK: first for its absmax, then, from cache, for its codes."""
    PACKING: tl.constexpr = CODE.fmt.packing
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)[None, :]
    lane_amax = tl.zeros((1, BLOCK), tl.int32)
    for start in range(0, k, BLOCK):
        x = tl.load(x_ptr + row * k + start + lane, start + lane < k, 0.0)
        lane_amax = tl.maximum(lane_amax, abs_bits(x))
    amax = tl.max(lane_amax, 1)
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    scale = scale_from_amax(amax, CODE)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    inv_scale = inv_scale_of(scale, nonfinite)[:, None]
    for start in range(0, k, BLOCK):
        x = tl.load(x_ptr + row * k + start + lane, start + lane < k, 0.0)
        noise = 0
        if STOCHASTIC:
            block = row * (k // 8) + start // 8 + tl.arange(0, BLOCK // 8)[None, :]
            noise = philox_bits(block, key_ptr, role, CODE.ptx)
        codes = encode(zero_nonfinite(x, nonfinite), inv_scale, noise, STOCHASTIC, False, CODE)
        byte = start // PACKING + tl.arange(0, BLOCK // PACKING)[None, :]
        tl.store(codes_ptr + row * tl.cdiv(k, PACKING) + byte, pack_codes(codes, PACKING), byte * PACKING < k)


def launch_rowwise(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    elements: int = 4096,
    longest: int = LONGEST,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The kernels for `quantize_ref` at rowwise, 1x128 and 1x32. x contiguous, not empty; K % 8 == 0 with a key.

    out: memory for the result. elements: least number per CTA; longest, chunk: LONGEST and CHUNK; tests pass smaller
    ones.
    """
    (m, k), key, code = x.shape, rounding.row_key, encoding(fmt, x.device, power_of_two)
    codes, scale = empty_codes(x, fmt, granularity) if out is None else out
    width = group_shape(granularity, m, k)[1]
    # Whole rows, of which scales are 1-D, take 256 lanes at least: eight elements for each thread of a warp.
    block = triton.next_power_of_2(width) if scale.ndim == 2 else max(triton.next_power_of_2(width), 256)
    if block <= longest and (block <= CHUNK or 4 * width >= 3 * block):
        groups, per_cta = scale.numel(), max(elements // block, 1)
        _groups_kernel[(triton.cdiv(groups, per_cta),)](
            x, codes.view(torch.int8), scale, key, rounding.role,
            groups=groups, per_row=triton.cdiv(k, width), width=width, k=k,
            row_stride=scale.stride(0), group_stride=scale.stride(1) if scale.ndim == 2 else 0,
            STOCHASTIC=key is not None, CODE=code, GROUPS=per_cta, BLOCK=block,
            num_warps=8 if block > 8192 and key is not None else 4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        _long_rows_kernel[(m,)](
            x, codes.view(torch.int8), scale, key, rounding.role, k, STOCHASTIC=key is not None, CODE=code, BLOCK=chunk,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale


WORDS_PER_CTA, WORDS_PER_THREAD = 2048, 24
"""Words of a CTA that takes short rows, about, and of a thread, at most."""
LONGEST_ROW, LONGEST_ROW_STOCHASTIC = 32 * 32 * WORDS_PER_THREAD, 8192
"""The longest row in words, as blocks: what the 32 warps of a CTA hold (16,384 rows of 37,888 elements, H200: 0.43 ms,
which is 4.3 TB/s; read twice, in chunks, 0.74), and, for stochastic rounding, which takes more registers, what lets two
CTAs share an SM, so that one loads while the other computes."""


@triton.jit(do_not_specialize=["role", "m"])
def _rowwise_bf16x2_kernel(
    # x int32 words of two bf16 [m, words], codes int16 (INT4: int8) words of two codes [m, words]; scales fp32; key
    # int64 [3].
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, m, words,
    # Of the scales: 1x128 has them column-major.
    row_stride, group_stride,
    # GROUPED: BLOCK words of a row share a scale; else a row is BLOCK words, and BLOCK_2 more if that is not 0.
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """ROWS rows per CTA, or one group of columns of them."""
    words, tile, group = tl.multiple_of(words, 4), tl.program_id(0), 0
    if GROUPED:
        across = tl.cdiv(words, BLOCK)
        tile, group = tile // across, tile % across
    first, row = tl.cast(tile, tl.int64) * ROWS, tl.arange(0, ROWS)
    present, word = first + row < m, group * BLOCK + tl.arange(0, BLOCK)[None, :]
    start, inside = first * words, present[:, None] & (word < words)
    # int64 only for the CTA's first row; offsets within its rows fit in int32, at half the registers.
    offset = row[:, None] * words + word
    x = tl.load(x_ptr + start + offset, inside, 0)
    amax = row_max_bf16x2(abs_bf16x2(x), CODE.ptx)
    if BLOCK_2:
        word_2 = BLOCK + tl.arange(0, BLOCK_2)[None, :]
        inside_2, offset_2 = present[:, None] & (word_2 < words), row[:, None] * words + word_2
        x_2 = tl.load(x_ptr + start + offset_2, inside_2, 0)
        amax = tl.maximum(amax, row_max_bf16x2(abs_bf16x2(x_2), CODE.ptx))
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    scale = scale_from_amax(amax, CODE)
    tl.store(scale_ptr + (first * row_stride + group * group_stride) + row * row_stride, scale, present)
    inv_scale = fast_inv_scale(scale, nonfinite, CODE.ptx)[:, None]
    key, block, block_2 = None, None, None
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role)
        key = seed, step, tensor, 1
        # One Philox block serves eight elements, four words; their numbers go on from row to row.
        row_block = first * (words // 4) + row[:, None] * (words // 4)
        block = row_block + (group * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :])
        if BLOCK_2:
            block_2 = row_block + (BLOCK // 4 + tl.arange(0, BLOCK_2 // 4)[None, :])
    ptrs = codes_ptr + start + offset
    store_codes_bf16x2(ptrs, inside, x, inv_scale, nonfinite, block, key, STOCHASTIC, CODE)
    if BLOCK_2:
        ptrs = codes_ptr + start + offset_2
        store_codes_bf16x2(ptrs, inside_2, x_2, inv_scale, nonfinite, block_2, key, STOCHASTIC, CODE)


def row_blocks(words: int) -> tuple[int, int]:
    """A row as one block or two (the second may be 0), powers of two with little padding."""
    block = triton.next_power_of_2(words)
    if 4 * words > 3 * block or words <= 128:  # at most a quarter of the lanes idle, or too short to matter
        return block, 0
    return block // 2, max(triton.next_power_of_2(words - block // 2), 128)


def supports_rowwise_bf16x2(x: Tensor, fmt: str, granularity: str, stochastic: bool) -> bool:
    """Whether `launch_rowwise_bf16x2` takes these arguments. It reads words, four at a time, so x must be aligned to
    words."""
    if x.dtype is not torch.bfloat16 or x.shape[1] % 8 or x.storage_offset() % 2 or fmt not in (*EIGHT_BITS, "int4"):
        return False
    longest = LONGEST_ROW_STOCHASTIC if stochastic else LONGEST_ROW
    return granularity == "1x128" or (granularity == "rowwise" and sum(row_blocks(x.shape[1] // 2)) <= longest)


def launch_rowwise_bf16x2(
    x: Tensor,
    fmt: str,
    granularity: str,
    rounding: Rounding = NEAREST,
    power_of_two: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_ref`. x contiguous, not empty, `supports_rowwise_bf16x2`. out: memory for the result."""
    (m, k), key = x.shape, rounding.row_key
    codes, scale = empty_codes(x, fmt, granularity) if out is None else out
    grouped = granularity == "1x128"  # a CTA's tile is one group of columns of several rows
    block, block_2 = (group_shape(granularity, m, k)[1] // 2, 0) if grouped else row_blocks(k // 2)
    # Short rows share a CTA; long ones get warps until a thread holds at most WORDS_PER_THREAD words.
    rows = max(WORDS_PER_CTA // triton.next_power_of_2(block + block_2), 1)
    warps = triton.next_power_of_2(triton.cdiv(rows * (block + block_2), 32 * WORDS_PER_THREAD))
    _rowwise_bf16x2_kernel[(triton.cdiv(m, rows) * (triton.cdiv(k // 2, block) if grouped else 1),)](
        x.view(-1).view(torch.int32), codes.view(torch.int8 if FORMATS[fmt].packing == 2 else torch.int16), scale, key,
        rounding.role, m, words=k // 2,
        row_stride=scale.stride(0), group_stride=scale.stride(1) if grouped else 0,
        STOCHASTIC=key is not None, CODE=encoding(fmt, x.device, power_of_two), GROUPED=grouped,
        ROWS=rows, BLOCK=block, BLOCK_2=block_2,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale

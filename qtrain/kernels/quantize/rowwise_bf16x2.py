"""Quantizes bf16 along rows (rowwise, 1x128) to 8 bits, FP8's and INT8's.

What `quantize_rows` does for any format, written for few instructions, which is what bounds stochastic rounding: two
neighbours stay in the 32-bit word they were read in. A program takes some rows, of a group's columns where a group is
shorter than a row; a row whose length is far below a power of two in two pieces.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import largest_of_rows, magnitudes
from qtrain.kernels.numerics.bf16x2_encode import quick_reciprocal, store_codes
from qtrain.kernels.numerics.encode import casts_to_fp8, scale_from_amax
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_scale, group_shape
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, philox_key
from qtrain.kernels.numerics.rounding import NEAREST, Rounding

WORDS, WORDS_A_THREAD = 2048, 24
"""Of a program that takes short rows, about, and of a thread at most."""
LONGEST, LONGEST_STOCHASTIC = 16 * 32 * WORDS_A_THREAD, 8192
"""The longest row in words, its pieces filled up to powers of two: what 16 warps hold, and of what takes more registers
as much as lets two programs share a multiprocessor, of which one reads while the other reckons."""


@triton.jit(do_not_specialize=["role", "m"])
def _row_words_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, m, words, row_stride, group_stride,
    STOCHASTIC: tl.constexpr, N_ROLES: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CAST: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """x and codes [m, words] as words of two elements and of two codes; row_stride, group_stride: of the scales.
    GROUPED: BLOCK words of a row have a scale of their own; else a row is BLOCK words and REST, if any."""
    words, tile, group = tl.multiple_of(words, 4), tl.program_id(0), 0
    if GROUPED:
        across = tl.cdiv(words, BLOCK)
        tile, group = tile // across, tile % across
    first, row = tl.cast(tile, tl.int64) * ROWS, tl.arange(0, ROWS)
    present, word = first + row < m, group * BLOCK + tl.arange(0, BLOCK)[None, :]
    start, inside = first * words, present[:, None] & (word < words)
    offset = row[:, None] * words + word
    pairs = tl.load(x_ptr + start + offset, inside, 0)
    bits = largest_of_rows(magnitudes(pairs), CAST)
    if REST:
        word_of_rest = BLOCK + tl.arange(0, REST)[None, :]
        inside_rest, offset_of_rest = present[:, None] & (word_of_rest < words), row[:, None] * words + word_of_rest
        rest = tl.load(x_ptr + start + offset_of_rest, inside_rest, 0)
        bits = tl.maximum(bits, largest_of_rows(magnitudes(rest), CAST))
    bad = tl.max(bits, 0) >= 0x7F800000
    scale = scale_from_amax(bits, LARGEST, POWER_OF_TWO)
    tl.store(scale_ptr + (first * row_stride + group * group_stride) + row * row_stride, scale, present)
    by, key, draws, draws_of_rest = quick_reciprocal(scale, bad, CAST)[:, None], None, None, None
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role, N_ROLES)
        key = seed, step, tensor, 1
        first_draw = first * (words // 4) + row[:, None] * (words // 4)
        draws = first_draw + (group * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :])
        if REST:
            draws_of_rest = first_draw + (BLOCK // 4 + tl.arange(0, REST // 4)[None, :])
    store_codes(codes_ptr + start + offset, inside, pairs, by, bad, draws, key, STOCHASTIC, FMT, LARGEST, CAST)
    if REST:
        store_codes(
            codes_ptr + start + offset_of_rest, inside_rest, rest, by, bad, draws_of_rest, key,
            STOCHASTIC, FMT, LARGEST, CAST,
        )  # fmt: skip


def pieces(words: int) -> tuple[int, int]:
    """Of a row, each a power of two, with few words to spare: one, or two."""
    block = triton.next_power_of_2(words)
    if 4 * words > 3 * block or words <= 128:
        return block, 0
    return block // 2, max(triton.next_power_of_2(words - block // 2), 128)


def supports_rowwise_bf16x2(x: Tensor, fmt: str, granularity: str, stochastic: bool) -> bool:
    """Whether `launch_rowwise_bf16x2` is for this. It reads words, four at a time, so that x must not start within
    one."""
    if x.dtype is not torch.bfloat16 or x.shape[1] % 8 or x.storage_offset() % 2 or fmt not in EIGHT_BITS:
        return False
    longest = LONGEST_STOCHASTIC if stochastic else LONGEST
    return granularity == "1x128" or (granularity == "rowwise" and sum(pieces(x.shape[1] // 2)) <= longest)


def launch_rowwise_bf16x2(
    x: Tensor, fmt: str, granularity: str, rounding: Rounding = NEAREST, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_ref`. x contiguous, not empty, `supports_rowwise_bf16x2`."""
    (m, k), form, key = x.shape, FORMATS[fmt], rounding.row_key
    codes, scale = x.new_empty(m, k, dtype=form.dtype), empty_scale(granularity, m, k, x)
    grouped = granularity == "1x128"
    block, rest = (group_shape(granularity, m, k)[1] // 2, 0) if grouped else pieces(k // 2)
    rows = max(WORDS // triton.next_power_of_2(block + rest), 1)
    warps = triton.next_power_of_2(triton.cdiv(rows * (block + rest), 32 * WORDS_A_THREAD))
    _row_words_kernel[(triton.cdiv(m, rows) * (triton.cdiv(k // 2, block) if grouped else 1),)](
        x.view(-1).view(torch.int32), codes.view(torch.int16), scale, key, rounding.role, m, k // 2,
        scale.stride(0), scale.stride(1) if grouped else 0,
        key is not None, len(ROUNDED_TENSORS), fmt, form.max, power_of_two, casts_to_fp8(x.device),
        grouped, rows, block, rest,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale

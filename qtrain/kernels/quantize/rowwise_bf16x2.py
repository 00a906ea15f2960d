"""Quantizes bf16 along rows (rowwise, 1x128) to 8 bits: FP8 or INT8.

The same codes as `rowwise.py`, in fewer instructions, which are what bounds stochastic rounding: two neighbors stay in
the 32-bit word that they were read in. A CTA takes several rows, or one group of columns of them (1x128). A row whose
length is far below a power of two is held as two power-of-two blocks.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import abs_bf16x2, row_max_bf16x2
from qtrain.kernels.numerics.bf16x2_encode import fast_inv_scale, store_codes_bf16x2
from qtrain.kernels.numerics.encode import encoding, scale_from_amax
from qtrain.kernels.numerics.formats import EIGHT_BITS, empty_codes, group_shape
from qtrain.kernels.numerics.philox import philox_key
from qtrain.kernels.numerics.rounding import NEAREST, Rounding

WORDS, WORDS_PER_THREAD = 2048, 24
"""Words of a CTA that takes short rows, about, and of a thread, at most."""
LONGEST, LONGEST_STOCHASTIC = 16 * 32 * WORDS_PER_THREAD, 8192
"""The longest row in words, as blocks: what 16 warps hold, and, for stochastic rounding, which takes more registers,
what lets two CTAs share an SM, so that one loads while the other computes."""


@triton.jit(do_not_specialize=["role", "m"])
def _rowwise_bf16x2_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, m, words, row_stride, group_stride,
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """x and codes [m, words] as words of two elements and of two codes; row_stride, group_stride: of the scales.
    GROUPED: BLOCK words of a row share a scale; else a row is BLOCK words, and BLOCK_2 more if that is not 0."""
    words, tile, group = tl.multiple_of(words, 4), tl.program_id(0), 0
    if GROUPED:
        across = tl.cdiv(words, BLOCK)
        tile, group = tile // across, tile % across
    first, row = tl.cast(tile, tl.int64) * ROWS, tl.arange(0, ROWS)
    present, word = first + row < m, group * BLOCK + tl.arange(0, BLOCK)[None, :]
    start, inside = first * words, present[:, None] & (word < words)
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
    if 4 * words > 3 * block or words <= 128:
        return block, 0
    return block // 2, max(triton.next_power_of_2(words - block // 2), 128)


def supports_rowwise_bf16x2(x: Tensor, fmt: str, granularity: str, stochastic: bool) -> bool:
    """Whether `launch_rowwise_bf16x2` takes these arguments. It reads words, four at a time, so x must be aligned to
    words."""
    if x.dtype is not torch.bfloat16 or x.shape[1] % 8 or x.storage_offset() % 2 or fmt not in EIGHT_BITS:
        return False
    longest = LONGEST_STOCHASTIC if stochastic else LONGEST
    return granularity == "1x128" or (granularity == "rowwise" and sum(row_blocks(x.shape[1] // 2)) <= longest)


def launch_rowwise_bf16x2(
    x: Tensor, fmt: str, granularity: str, rounding: Rounding = NEAREST, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_ref`. x contiguous, not empty, `supports_rowwise_bf16x2`."""
    (m, k), key = x.shape, rounding.row_key
    codes, scale = empty_codes(x, fmt, granularity)
    grouped = granularity == "1x128"
    block, block_2 = (group_shape(granularity, m, k)[1] // 2, 0) if grouped else row_blocks(k // 2)
    rows = max(WORDS // triton.next_power_of_2(block + block_2), 1)
    warps = triton.next_power_of_2(triton.cdiv(rows * (block + block_2), 32 * WORDS_PER_THREAD))
    _rowwise_bf16x2_kernel[(triton.cdiv(m, rows) * (triton.cdiv(k // 2, block) if grouped else 1),)](
        x.view(-1).view(torch.int32), codes.view(torch.int16), scale, key, rounding.role, m, k // 2,
        scale.stride(0), scale.stride(1) if grouped else 0,
        key is not None, encoding(fmt, x.device, power_of_two), grouped, rows, block, block_2,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale

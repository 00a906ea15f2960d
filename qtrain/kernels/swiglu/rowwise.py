"""Row codes of y = silu(gate) * up, the input of a gated MLP's second product, from one read of x.

A row's scale is known once the whole row has been read: a CTA keeps it in registers, several where they are short, and
over all its rows the absmax of every column too. Those give the scales of y's columns, whose codes only backward reads,
and computes from x itself (`backward.py`): y is never read, and nothing of it but its codes is written.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    abs_bf16x2,
    fast_inv_scale,
    max_bf16x2,
    reduce_max_bf16x2,
    row_max_bf16x2,
    store_codes_bf16x2,
)
from qtrain.kernels.numerics.encode import encoding, scale_from_amax
from qtrain.kernels.numerics.formats import FORMATS, empty_scale
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_key
from qtrain.kernels.numerics.silu import swiglu_bf16x2
from qtrain.kernels.quantize.absmax import atomic_max_bf16x2
from qtrain.kernels.quantize.column_groups import BlockGroups, group_of_row
from qtrain.kernels.quantize.rowwise import row_blocks

WORDS_PER_CTA, MAX_ROWS = 4096, 16
"""Words of the short rows that a CTA takes at once, about, and how many rows at most, a divisor of any M. Atomics on a
column, one for each CTA, wait for each other: with one row at once, and so more CTAs, 32768 x 896 took 111 us for 52,
16384 x 1536 120 for 51 (H200)."""
WORDS_PER_THREAD = 24
"""Words of rows per thread, and as many column maxima; more only where a CTA has the most warps that it can have."""
WARPS_PER_SM = 24
"""Warps of all CTAs on an SM, which share its registers: some CTAs load while others compute."""
MAX_ROWS_OF_GROUP = 64
"""Rows per CTA where rows are in groups, a power of two, one by one: few CTAs share a column of a group. With more rows
there are fewer atomics, and a longer last wave."""
STAGES, SHARED_BYTES = 2, 90 * 1024
"""Software pipelining: the next rows are loaded during the computation of these, if their bytes fit in the shared
memory of an Ada; a Hopper has more."""


@triton.jit
def _load_swiglu(gate_ptr, offset, words, inside, PTX: tl.constexpr):
    """Words of y at `offset` of gate, whose rows are followed by those of up; 0 where not inside."""
    ptrs = gate_ptr + offset
    return swiglu_bf16x2(tl.load(ptrs, inside, 0), tl.load(ptrs + words, inside, 0), PTX)


@triton.jit(do_not_specialize=["role", "m"])
def _quantize_swiglu_rowwise_kernel(
    # int32 words of two bf16 [m, 2 * words], gate then up; int16 words of two codes [m, words]; fp32 [m].
    x_ptr, codes_ptr, scale_ptr,
    # int32 of zeros [2 * words] or [groups * 2 * words]: receives the bits of the absmax of y's columns.
    column_ptr,
    # int32 [m / 128]: the group of each block of rows, or None. A CTA then takes consecutive rows of one group.
    group_ptr,
    # int64 [3] (seed, step, tensor), or None.
    key_ptr, role, m, words,
    # ROWS rows at once, which divide m. A row is BLOCK words, and BLOCK_2 more if that is not 0.
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_2: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A CTA stays resident and takes every n-th ROWS rows, or consecutive ones; column maxima stay in its registers."""
    words = tl.multiple_of(words, 8)
    key = None
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role)
        key = seed, step, tensor, 1  # a loop inside that over rows would prevent its software pipelining
    row, word = tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    inside = word < words
    amax = tl.zeros((ROWS, BLOCK), tl.int32)
    if BLOCK_2:
        word_2 = BLOCK + tl.arange(0, BLOCK_2)[None, :]
        inside_2 = word_2 < words
        amax_2 = tl.zeros((ROWS, BLOCK_2), tl.int32)
    first, last, step = tl.program_id(0), m // ROWS, tl.num_programs(0)
    if group_ptr is not None:
        each = last // tl.num_programs(0)
        first = tl.program_id(0) * each
        last, step = first + each, 1
    for i in tl.range(first, last, step, num_stages=STAGES):
        # int64 only for the first row; offsets within the rows fit in int32, at half the registers.
        top = tl.cast(i, tl.int64) * ROWS
        gate_ptr, draw = x_ptr + top * 2 * words, (top + row[:, None]) * (words // 4)
        y = _load_swiglu(gate_ptr, row[:, None] * (2 * words) + word, words, inside, CODE.ptx)
        amax = max_bf16x2(amax, abs_bf16x2(y), CODE.ptx)
        row_amax = row_max_bf16x2(abs_bf16x2(y), CODE.ptx)
        if BLOCK_2:
            y_2 = _load_swiglu(gate_ptr, row[:, None] * (2 * words) + word_2, words, inside_2, CODE.ptx)
            amax_2 = max_bf16x2(amax_2, abs_bf16x2(y_2), CODE.ptx)
            row_amax = tl.maximum(row_amax, row_max_bf16x2(abs_bf16x2(y_2), CODE.ptx))
        nonfinite = tl.max(row_amax, 0) >= 0x7F800000
        scale = scale_from_amax(row_amax, CODE)
        tl.store(scale_ptr + top + row, scale)
        inv_scale, codes = fast_inv_scale(scale, nonfinite, CODE.ptx)[:, None], codes_ptr + top * words
        ptrs, block = codes + row[:, None] * words + word, draw + tl.arange(0, BLOCK // 4)[None, :]
        store_codes_bf16x2(ptrs, inside, y, inv_scale, nonfinite, block, key, STOCHASTIC, CODE)
        if BLOCK_2:
            ptrs, block = codes + row[:, None] * words + word_2, draw + BLOCK // 4 + tl.arange(0, BLOCK_2 // 4)[None, :]
            store_codes_bf16x2(ptrs, inside_2, y_2, inv_scale, nonfinite, block, key, STOCHASTIC, CODE)
    if group_ptr is not None:
        column_ptr += group_of_row(group_ptr, first * ROWS) * 2 * words  # [groups, I], I = 2 * words
    # One atomic per column and CTA; a maximum does not depend on their order.
    atomic_max_bf16x2(column_ptr, tl.arange(0, BLOCK), words, reduce_max_bf16x2(amax, 0, CODE.ptx))
    if BLOCK_2:
        amax_2 = reduce_max_bf16x2(amax_2, 0, CODE.ptx)
        atomic_max_bf16x2(column_ptr, BLOCK + tl.arange(0, BLOCK_2), words, amax_2)


def launch_quantize_swiglu_rowwise(
    x: Tensor, fmt: str, rounding: Rounding = NEAREST, power_of_two: bool = False, groups: BlockGroups | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, 2I] bf16, contiguous, not empty, M and I multiples of 16 -> of y = swiglu(x) the codes [M, I] and the
    scale fp32 [M], as `quantize_ref` at rowwise, and the absmax of its columns, as fp32 bits in int32 [I], or of each
    group of rows [groups * I]."""
    (m, width), key = x.shape, rounding.row_key
    words = width // 4  # of a row of y: I / 2
    codes, scale = x.new_empty(m, width // 2, dtype=FORMATS[fmt].dtype), empty_scale("rowwise", m, width // 2, x)
    count, group_of_block = (1, None) if groups is None else (groups.count, groups.group_of_block)
    column_amax = torch.zeros(count * width // 2, dtype=torch.int32, device=x.device)
    block, block_2 = row_blocks(words)
    rows = 1
    if groups is None:
        rows = min(max(WORDS_PER_CTA // triton.next_power_of_2(block + block_2), 1), MAX_ROWS)
    held = rows * (block + block_2)
    warps = min(triton.next_power_of_2(triton.cdiv(held, 32 * WORDS_PER_THREAD)), 16)
    # Registers decide how many CTAs share an SM; at least two, but where a row takes all of them.
    per_sm = 1 if held > 32 * warps * WORDS_PER_THREAD else max(WARPS_PER_SM // warps, 2)
    stages = STAGES if 8 * held <= SHARED_BYTES else 1  # a word of gate and one of up: 8 bytes
    programs = min(sm_count(x.device) * per_sm, m // rows)
    if groups is not None:
        # A power of two that divides 128: a CTA's consecutive rows are of one block, and so of one group.
        programs = m // min(MAX_ROWS_OF_GROUP, triton.next_power_of_2(triton.cdiv(m, programs)))
    _quantize_swiglu_rowwise_kernel[(programs,)](
        x.view(torch.int32), codes.view(torch.int16), scale, column_amax, group_of_block, key, rounding.role, m, words,
        STOCHASTIC=key is not None, CODE=encoding(fmt, x.device, power_of_two), ROWS=rows, BLOCK=block, BLOCK_2=block_2,
        STAGES=stages,
        # 65,536 registers of an SM over the threads of its CTAs, in the hardware's units of 8.
        num_warps=warps, maxnreg=65536 // (32 * warps * per_sm) // 8 * 8, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, column_amax

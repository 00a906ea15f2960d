"""Codes along rows of what a gated MLP makes for its second product, y = silu(gate) * up, from one read of x.

A row's scale is known once the whole of it has been read: a program keeps that in registers, and over all the rows that
it takes the largest values of every column too. They are the scales of y's columns, whose codes only backward reads,
and makes from x itself (`gated_gradient.py`): y is never read twice, and nothing of it but its codes is written.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import larger, larger_half, largest, magnitudes
from qtrain.kernels.numerics.bf16x2_encode import quick_reciprocal, store_codes
from qtrain.kernels.numerics.encode import casts_to_fp8, scale_from_amax
from qtrain.kernels.numerics.formats import FORMATS, empty_scale
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, philox_key
from qtrain.kernels.numerics.rounding import NEAREST, Rounding
from qtrain.kernels.numerics.silu import swiglu_bf16x2
from qtrain.kernels.quantize.absmax import record_amax_bf16x2
from qtrain.kernels.quantize.rowwise_bf16x2 import pieces

WORDS_A_THREAD = 24
"""Of a row, and of its columns' maxima as many; more only where a program has all the warps that it can have."""
WARPS_AT_ONCE = 24
"""Of a multiprocessor, whose registers they share: some programs read while others reckon."""
STAGES, SHARED = 2, 90 * 1024
"""Rows of a program on their way: the next one is read while one is reckoned with, where its bytes fit into the shared
memory that an Ada has; a Hopper has more."""


@triton.jit
def _made(gate_ptr, words, first, CAST: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK words of y from word `first` of a row whose gate is at gate_ptr, its up right behind; 0 beyond its end."""
    j = first + tl.arange(0, BLOCK)
    return swiglu_bf16x2(tl.load(gate_ptr + j, j < words, 0), tl.load(gate_ptr + words + j, j < words, 0), CAST)


@triton.jit(do_not_specialize=["role", "m"])
def _gated_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, column_ptr, key_ptr, role, m, words,
    STOCHASTIC: tl.constexpr, N_ROLES: tl.constexpr, FMT: tl.constexpr, LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CAST: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x [m, 2 * words] and codes [m, words] as words of two elements and of two codes; column_ptr: int32, zeros, for
    the bits of the columns' absmax. A row is BLOCK words and REST, if any."""
    words = tl.multiple_of(words, 8)
    key = None
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role, N_ROLES)
        key = seed, step, tensor, 1  # a loop within the one over rows would keep the next row from being read ahead
    most = tl.zeros((BLOCK,), tl.int32)
    if REST:
        most_rest = tl.zeros((REST,), tl.int32)
    for i in tl.range(tl.program_id(0), m, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        y = _made(x_ptr + row * 2 * words, words, 0, CAST, BLOCK)
        most = larger(most, magnitudes(y), CAST)
        bits = larger_half(largest(magnitudes(y), 0, CAST))
        if REST:
            y_rest = _made(x_ptr + row * 2 * words, words, BLOCK, CAST, REST)
            most_rest = larger(most_rest, magnitudes(y_rest), CAST)
            bits = tl.maximum(bits, larger_half(largest(magnitudes(y_rest), 0, CAST)))
        bad = bits >= 0x7F800000
        scale = scale_from_amax(bits, LARGEST, POWER_OF_TWO)
        tl.store(scale_ptr + row, scale)
        by, draw = quick_reciprocal(scale, bad, CAST), row * (words // 4)
        j, draws = tl.arange(0, BLOCK), (draw + tl.arange(0, BLOCK // 4))[None, :]
        store_codes(codes_ptr + row * words + j, j < words, y, by, bad, draws, key, STOCHASTIC, FMT, LARGEST, CAST)
        if REST:
            j, draws = BLOCK + tl.arange(0, REST), (draw + BLOCK // 4 + tl.arange(0, REST // 4))[None, :]
            store_codes(
                codes_ptr + row * words + j, j < words, y_rest, by, bad, draws, key, STOCHASTIC, FMT, LARGEST, CAST
            )  # fmt: skip
    record_amax_bf16x2(column_ptr, tl.arange(0, BLOCK), words, most)
    if REST:
        record_amax_bf16x2(column_ptr, BLOCK + tl.arange(0, REST), words, most_rest)


def launch_quantize_swiglu_rowwise(
    x: Tensor, fmt: str, rounding: Rounding = NEAREST, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, 2I] bf16, contiguous, not empty, M and I multiples of 16 -> of y = swiglu(x) the codes [M, I] and the
    scale fp32 [M] that `quantize_ref` gives rowwise, and the bits of its columns' absmax, int32 [I].
    """
    (m, width), form, key = x.shape, FORMATS[fmt], rounding.row_key
    words = width // 4
    codes, scale = x.new_empty(m, width // 2, dtype=form.dtype), empty_scale("rowwise", m, width // 2, x)
    columns = torch.zeros(width // 2, dtype=torch.int32, device=x.device)
    block, rest = pieces(words)
    warps = min(triton.next_power_of_2(triton.cdiv(block + rest, 32 * WORDS_A_THREAD)), 16)
    together = 1 if block + rest > 32 * warps * WORDS_A_THREAD else max(WARPS_AT_ONCE // warps, 2)
    stages = STAGES if 8 * (block + rest) <= SHARED else 1
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    _gated_rows_kernel[(min(processors * together, m),)](
        x.view(torch.int32), codes.view(torch.int16), scale, columns, key, rounding.role, m, words,
        key is not None, len(ROUNDED_TENSORS), fmt, form.max, power_of_two, casts_to_fp8(x.device), block, rest, stages,
        num_warps=warps, maxnreg=65536 // (32 * warps * together) // 8 * 8, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, columns

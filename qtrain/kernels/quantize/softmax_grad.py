"""Codes of the gradient of logits in both layouts, computed from the logits as they are read.

With a low-bit head the gradient of a chunk's logits [M, V] is read by two GEMMs, as codes [M, V] and as transposed
codes [V, M]. Written in bf16 and read again for its codes, it moves 10 bytes a logit with the two reads of the loss.
Here `cross_entropy_statistics` reads the logits once for L = logsumexp of each row, and a quantizer once more for

    exp(x - L) * weight - onehot(label)      in fp32

and writes both layouts: 6 bytes. Under scales of rows, whose absmax takes a pass before, it is 8 of 12.

Under delayed scaling nothing has to be known of the tensor before, its absmax comes from the same read, and the kernel
is here: FP8, the gradient rounded once, to the code. Tiles are as in `dual_bf16x2.py`, in reverse order: the last rows'
logits may still be in L2 from the statistics. Under scales of rows and of blocks that file's kernel computes the
gradient rounded to bf16, and from it the codes that it would read from memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    halves_f32,
    high_half,
    low_half,
    pack_high_halves,
    pack_two_halves,
    round_to_nearest,
    transpose_two_codes,
    two_codes,
)
from qtrain.kernels.numerics.encode import Encoding, abs_bits, encoding, inv_scale_of
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, empty_codes
from qtrain.kernels.numerics.philox import Rounding
from qtrain.kernels.quantize.absmax import absmax_ref
from qtrain.kernels.quantize.delayed_scale import (
    delayed_scale_ref,
    knows_scale,
    merge_amax,
    scale_buffers,
    scale_constants,
)
from qtrain.kernels.quantize.dual_bf16x2 import GRADIENT_PAIRS, launch_dual_bf16x2
from qtrain.kernels.quantize.dual_tile import (
    inside_of_tile,
    load_four_rows,
    offset_of_tile,
    rows_inside,
    words_inside,
)
from qtrain.kernels.quantize.logit_rows import TWO_INF, LogitRows, load_logit_rows
from qtrain.kernels.quantize.operators import quantize_dual
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref
from qtrain.kernels.softmax import IGNORED, exp_less

BLOCK = 128
WARPS, REGISTERS = 8, 80
"""Warps of a CTA, registers of a thread: three CTAs share an SM."""
AMAX_BLOCK = 8192


@dataclass(frozen=True)
class SoftmaxCode(Encoding):
    """What the kernel is compiled for, as one constexpr."""

    even: bool
    """m and k are multiples of BLOCK: no masks."""
    z_loss: bool
    """Whether probabilities have a factor other than 1."""
    block_m: int = BLOCK
    block_k: int = BLOCK


# ---- definition ------------------------------------------------------------------------------------------------------


def softmax_grad_ref(logits: Tensor, log_total: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """logits [M, V] fp32/bf16, log_total fp32 [M], labels int64 [M] -> d loss / d logits, fp32 [M, V]."""
    trained = (labels != IGNORED)[:, None]
    grad = (logits.float() - log_total[:, None]).exp_().mul_((1.0 + 2.0 * z_loss * log_total)[:, None])
    target = labels[:, None].clamp(min=0)
    grad.scatter_add_(-1, target, torch.full_like(target, -1, dtype=torch.float32))
    return grad.masked_fill_(~trained, 0.0)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _row_codes(words, has_special, row_words, statistics, left, j, inside, inv_scale, CODE: tl.constexpr):
    """The gradient by pairs of logits int32 [R, C], number j [C] of those from column `left` on: `two_codes`, and the
    bits of its absmax.

    has_special: a scalar, whether the tile has a label or a row that is not trained. row_words: pointers [R] to the
    rows' first words. statistics: of the rows, as they are loaded.
    """
    label, log2_total, weight = statistics
    first_of_pair = label % 2 == 0
    if has_special:  # a scalar branch, which most tiles of a large vocabulary do not take
        # Logits of -inf (0xFF80 in bf16, in either half) have a gradient of 0. The labels' own is added below.
        kept, inf = tl.where(first_of_pair, -65536, 0xFFFF), tl.where(first_of_pair, 0xFF80, -8388608)
        at_label = ((label - left) >> 1)[:, None] == j[None, :]
        words = tl.where(at_label, (words & kept[:, None]) | inf[:, None], words)
        words = tl.where((label == -100)[:, None], TWO_INF, words)
    first, second = halves_f32(words)
    first, second = exp_less(first, log2_total[:, None], CODE.ptx), exp_less(second, log2_total[:, None], CODE.ptx)
    if CODE.z_loss:
        first, second = first * weight[:, None], second * weight[:, None]
    amax = tl.maximum(abs_bits(first), abs_bits(second))
    first, second = round_to_nearest(first, inv_scale, CODE), round_to_nearest(second, inv_scale, CODE)
    codes = two_codes(first, second, CODE)
    if has_special:
        here = inside & (label >= left) & (label < left + CODE.block_k)
        word = tl.load(row_words + label // 2, here, 0)
        x = tl.where(first_of_pair, low_half(word), high_half(word)).to(tl.float32, bitcast=True)
        grad = tl.where(here, exp_less(x, log2_total, CODE.ptx) * weight - 1.0, 0.0)
        amax = tl.maximum(amax, abs_bits(grad)[:, None])
        grad = round_to_nearest(grad, inv_scale, CODE)
        code = two_codes(grad, grad, CODE) & tl.where(first_of_pair, 0xFF, 0xFF00)
        # Not `at_label`: the compiler would compute it, and keep it, where no tile needs it.
        codes |= tl.where((label >> 1)[:, None] == (left // 2 + j)[None, :], code[:, None], 0)
    return codes, amax


@triton.jit
def _quantize_softmax_grad_kernel(
    # int32 words of two bf16 [m, k / 2]; their `LogitRows`.
    logits_ptr, logit_rows,
    # int16 words of two codes [m, k / 2]; int32 words of four codes [k, m / 4], or None: not requested.
    codes_ptr, codes_t_ptr,
    # fp32 [1], given; int32 [1], receives the bits of the gradient's absmax.
    scale_ptr, amax_ptr,
    # Multiples of 16.
    m, k, CODE: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK x BLOCK elements per CTA; a thread holds words of four rows. CODE: a `SoftmaxCode`."""
    BLOCK: tl.constexpr = CODE.block_k
    EVEN: tl.constexpr = CODE.even
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_k = tl.cdiv(k, BLOCK)
    tile_m, tile_k = tile // tiles_k, tile % tiles_k
    # The hints let Triton vectorize loads and stores.
    words, words_t = tl.multiple_of(k // 2, 8), tl.multiple_of(m // 4, 4)
    inside = inside_of_tile(tile_m, tile_k, m, k, CODE)
    start, offset = offset_of_tile(tile_m, tile_k, words, CODE)
    x0, x1, x2, x3 = load_four_rows(logits_ptr + start + offset, words, inside, TWO_INF)
    # Scalars that the tile's end waits for; a stale absmax is as good.
    inv_scale, known_amax = inv_scale_of(tl.load(scale_ptr), False), tl.load(amax_ptr)
    i, j, left = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK // 2), tile_k * BLOCK
    down = tile_m * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(logit_rows[1] + down, down < m, -1)
    special = ((label >= left) & (label < left + BLOCK)) | (label == -100)
    has_special = tl.max(special.to(tl.int32), 0) > 0
    row, above = tile_m * BLOCK + 4 * i, rows_inside(tile_m, m, EVEN, BLOCK)
    row_words = logits_ptr + row.to(tl.int64) * words
    statistics0, statistics1 = load_logit_rows(logit_rows, row, above), load_logit_rows(logit_rows, row + 1, above)
    statistics2, statistics3 = load_logit_rows(logit_rows, row + 2, above), load_logit_rows(logit_rows, row + 3, above)
    # Row after row, and two of them become halves of words of column codes at once: few live registers.
    ptrs = codes_ptr + start + offset
    x0, amax0 = _row_codes(x0, has_special, row_words, statistics0, left, j, above, inv_scale, CODE)
    tl.store(ptrs, x0.to(tl.int16), inside)
    x1, amax1 = _row_codes(x1, has_special, row_words + words, statistics1, left, j, above, inv_scale, CODE)
    tl.store(ptrs + words, x1.to(tl.int16), inside)
    upper, amax = transpose_two_codes(x0, x1, CODE.ptx), tl.maximum(amax0, amax1)
    x2, amax2 = _row_codes(x2, has_special, row_words + 2 * words, statistics2, left, j, above, inv_scale, CODE)
    tl.store(ptrs + 2 * words, x2.to(tl.int16), inside)
    x3, amax3 = _row_codes(x3, has_special, row_words + 3 * words, statistics3, left, j, above, inv_scale, CODE)
    tl.store(ptrs + 3 * words, x3.to(tl.int16), inside)
    amax = tl.maximum(amax, tl.maximum(amax2, amax3))
    if codes_t_ptr is not None:
        lower = transpose_two_codes(x2, x3, CODE.ptx)
        # Column codes 2j and 2j + 1 of four rows each, transposed through shared memory as words.
        a, b = pack_two_halves(upper, lower, CODE.ptx), pack_high_halves(upper, lower, CODE.ptx)
        start_t = tile_k.to(tl.int64) * BLOCK * words_t + tile_m * (BLOCK // 4)
        ptrs_t = codes_t_ptr + start_t + j[:, None] * (2 * words_t) + i[None, :]
        inside_t = None if EVEN else words_inside(tile_k, k, EVEN, BLOCK)[:, None] & above[None, :]
        tl.store(ptrs_t, tl.trans(a), inside_t)
        tl.store(ptrs_t + words_t, tl.trans(b), inside_t)
    largest = tl.max(tl.max(amax, 1), 0)
    if largest > known_amax:  # a scalar branch; a maximum does not depend on the order of CTAs
        tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def _softmax_grad_scale_unless_known_kernel(
    # fp32 or bf16 [m, k], contiguous; the rest as above; `ScaleBuffers`.
    logits_ptr, logit_rows, scale_ptrs, m, k, BLOCK: tl.constexpr, CODE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    if knows_scale(scale_ptrs):
        return
    amax = tl.zeros([BLOCK], tl.int32)
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        label, log2_total, weight = load_logit_rows(logit_rows, row, row < m)
        if label != -100:
            for start in range(0, k, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + tl.cast(row, tl.int64) * k + column, column < k, float("-inf")).to(tl.float32)
                grad = exp_less(x, log2_total, CODE.ptx) * weight - tl.where(column == label, 1.0, 0.0)
                amax = tl.maximum(amax, abs_bits(grad))
    merge_amax(tl.max(amax, 0), scale_ptrs, CODE, PROGRAMS)


# ---- launch ----------------------------------------------------------------------------------------------------------


def has_softmax_codes(fmt: str, granularity: str, granularity_t: str, delayed: bool) -> bool:
    """Whether there are kernels for codes of the gradient in a format, whose two layouts have scales of these
    granularities. delayed: the scale is that of delayed scaling."""
    if delayed:
        return fmt in ("e4m3", "e5m2") and granularity == granularity_t == "tensorwise"
    return fmt in EIGHT_BITS and (granularity, granularity_t) in GRADIENT_PAIRS


def reads_logits(logits: Tensor) -> bool:
    """Whether those kernels take these logits."""
    if not logits.numel():
        return False
    if not logits.is_cuda:
        return True
    # The kernel reads words, so logits must be aligned to them.
    aligned = all(number % 16 == 0 for number in (*logits.shape, logits.storage_offset()))
    return aligned and logits.dtype is torch.bfloat16 and logits.is_contiguous()


def launch_softmax_grad_scale(
    logits: Tensor, log_total: Tensor, labels: Tensor, z_loss: float, known: Tensor, fmt: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`launch_delayed_scale` of the gradient: reads the logits only where no scale is known yet, in the first step."""
    m, k = logits.shape
    buffers = scale_buffers(known, m)
    _softmax_grad_scale_unless_known_kernel[(buffers.programs,)](
        logits, (log_total, labels, z_loss), buffers, m, k, BLOCK=min(AMAX_BLOCK, triton.next_power_of_2(k)),
        **scale_constants(fmt, logits.device, power_of_two), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return buffers.out, buffers.amax


def launch_quantize_softmax_grad(
    logits: Tensor,
    log_total: Tensor,
    labels: Tensor,
    z_loss: float,
    fmt: str,
    scale: Tensor,
    amax: Tensor,
    columns: bool = True,
) -> tuple[Tensor, Tensor]:
    """Codes [M, V] and, with columns, transposed codes [V, M] of the gradient under a given scale, fp32 [1].

    logits bf16, `reads_logits`. amax: int32 [1] of zeros, receives the fp32 bits of the absmax.
    """
    m, k = logits.shape
    codes, codes_t = _empty(logits, fmt, columns)
    code = SoftmaxCode(**vars(encoding(fmt, logits.device)), even=m % BLOCK == k % BLOCK == 0, z_loss=z_loss != 0)
    _quantize_softmax_grad_kernel[(triton.cdiv(m, BLOCK) * triton.cdiv(k, BLOCK),)](
        logits.view(torch.int32), (log_total, labels, z_loss), codes.view(torch.int16),
        codes_t.view(torch.int32) if columns else None, scale, amax, m, k, CODE=code,
        num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, codes_t


# ---- operators -------------------------------------------------------------------------------------------------------


def _empty(logits: Tensor, fmt: str, columns: bool) -> tuple[Tensor, Tensor]:
    """Memory for the codes; that of transposed codes is empty where they are not requested."""
    m, k = logits.shape
    dtype = FORMATS[fmt].dtype
    return logits.new_empty(m, k, dtype=dtype), logits.new_empty(k if columns else 0, m, dtype=dtype)


def _empty_quantize_softmax_grad_delayed(logits, fmt, columns):
    scale = logits.new_empty(1, dtype=torch.float32)
    return *_empty(logits, fmt, columns), scale, torch.empty_like(scale)


@operator("quantize_softmax_grad_delayed", fake=_empty_quantize_softmax_grad_delayed)
def quantize_softmax_grad_delayed(
    logits: Tensor,
    log_total: Tensor,
    labels: Tensor,
    z_loss: float,
    fmt: str,
    known: Tensor,
    power_of_two: bool = False,
    columns: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual_delayed` of d loss / d logits [M, V], to nearest: codes [M, V], codes_t [V, M] (without columns
    [0, M]), their scale fp32 [1], absmax fp32 [1].

    logits [M, V], `reads_logits`; log_total fp32 [M], of `cross_entropy_statistics`; labels int64 [M].
    """
    if not logits.is_cuda:
        grad = softmax_grad_ref(logits, log_total, labels, z_loss)
        scale = delayed_scale_ref(grad, known, fmt, power_of_two)
        codes, _ = quantize_ref(grad, fmt, "tensorwise", scale=scale)
        codes_t = _empty(logits, fmt, False)[1]
        if columns:
            codes_t, _ = quantize_transposed_ref(grad, fmt, "tensorwise", scale=scale)
        return codes, codes_t, scale, absmax_ref(grad)
    source = logits, log_total.contiguous(), labels.contiguous(), z_loss
    # fp32 [1], and a zero int32 [1] that the quantizer's atomics raise to the absmax.
    scale, amax = launch_softmax_grad_scale(*source, known, fmt, power_of_two)
    codes, codes_t = launch_quantize_softmax_grad(*source, fmt, scale, amax, columns)
    return codes, codes_t, scale, amax.view(torch.float32)


def _empty_quantize_softmax_grad(logits, fmt, granularity, granularity_t):
    return *empty_codes(logits, fmt, granularity), *empty_codes(logits, fmt, granularity_t, transposed=True)


@operator("quantize_softmax_grad", fake=_empty_quantize_softmax_grad)
def quantize_softmax_grad(
    logits: Tensor,
    log_total: Tensor,
    labels: Tensor,
    z_loss: float,
    fmt: str,
    granularity: str,
    granularity_t: str,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual` of d loss / d logits [M, V] in the logits' dtype: codes, scale, codes_t, scale_t.

    logits [M, V], `reads_logits`; log_total and labels as for `quantize_softmax_grad_delayed`; key, role, rows,
    columns: a `Rounding`; `has_softmax_codes`.
    """
    rounding = Rounding(key, role, rows, columns)
    if not logits.is_cuda:
        grad = softmax_grad_ref(logits, log_total, labels, z_loss).to(logits.dtype)
        return quantize_dual(grad, fmt, granularity, granularity_t, *rounding, power_of_two)
    logit_rows = LogitRows(log_total.contiguous(), labels.contiguous(), z_loss)
    return launch_dual_bf16x2(
        logits, fmt, granularity, rounding, power_of_two, granularity_t=granularity_t, logit_rows=logit_rows
    )

"""Products of 8-bit codes with a thin matrix: the narrow GEMMs of adapters, which read the codes of their linear.

    `codes_mm`       out [M, r] = scale * C [M, K] · right [K, r]      z = x · aᵀ and dz = dy · b
    `codes_grad_mm`  out [K, r] = C [M, K]ᵀ · (scale * left [M, r])    da = dzᵀ · x and db = dyᵀ · z

C are codes along rows with a scale a row, or one for all; r is the rank of the adapters. For 2·r FLOPs an element these
are bound by the read of C: codes are half the bytes of the bf16 tensor that they were made of, which then need not be
written, nor kept for backward. Codes are converted to bf16 in registers, exactly (`numerics/decode.py`), and the tensor
cores add up in fp32. `codes_mm` scales the sums; in `codes_grad_mm`, which sums over rows, the scale is
multiplied into `left`, which is rounded once more.

Both sum over a long dimension into a small result: it is split over CTAs, which leave partial sums in fp32, and the
last one to arrive adds them in their order, so that the result is deterministic.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.arrivals import RESULTS, arrival_counters, arrives_last
from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.decode import decode_bf16
from qtrain.kernels.numerics.encode import encoding
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS

LARGEST_RANK = 128
BLOCK_ROWS, BLOCK_COLUMNS = 64, 128
"""Of the codes that a CTA reads at once."""
CTAS_PER_SM, GRAD_CTAS_PER_SM = 3, 6
"""CTAs for each SM, about, of either kernel: loads of some overlap with conversions of others."""
MOST_PARTS = 32
"""Parts that a sum is split into; the last CTA reads all of them."""


def codes_mm_ref(codes: Tensor, scale: Tensor, right: Tensor) -> Tensor:
    """codes [M, K], scale fp32 [M] or [1], right [K, r] -> [M, r] in the dtype of right; added in fp32."""
    return (scale[:, None] * (codes.float() @ right.float())).to(right.dtype)


def codes_grad_mm_ref(codes: Tensor, scale: Tensor, left: Tensor) -> Tensor:
    """codes [M, K], scale fp32 [M] or [1], left [M, r] -> [K, r] in the dtype of left; added in fp32."""
    return (codes.float().t() @ (scale[:, None] * left.float())).to(left.dtype)


@triton.jit
def _add_parts(total, parts_ptr, arrived_ptr, result, results, place, PARTS: tl.constexpr):
    """Stores this CTA's part of a result, fp32 [parts, results, SIZE] at `place`. Returns whether it is the last to
    arrive, and then the sum of all parts."""
    SIZE: tl.constexpr = total.shape[0] * total.shape[1]
    part = tl.program_id(1)
    tl.store(parts_ptr + (part * results + result) * SIZE + place, total)
    last = arrives_last(arrived_ptr + result, PARTS)
    if last:
        total = tl.zeros(total.shape, tl.float32)
        for other in range(PARTS):
            total += tl.load(parts_ptr + (other * results + result) * SIZE + place, cache_modifier=".cg")
    return last, total


@triton.jit(do_not_specialize=["m"])
def _codes_mm_kernel(
    # int32 words of four codes [m, k / 4]; fp32 [m] or [1]; right of any strides; out [m, rank].
    codes_ptr, scale_ptr, right_ptr, out_ptr, parts_ptr, arrived_ptr,
    # depth: columns of a part of the sum, a multiple of COLUMNS.
    m, k, right_k, right_r, depth, rank,
    CODE: tl.constexpr, ROWWISE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the result, over `depth` columns of the codes."""
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    first, total = tl.program_id(1) * depth, tl.zeros((ROWS, RANK), tl.float32)
    words_ptrs = codes_ptr + row.to(tl.int64)[:, None] * (k // 4)
    for start in range(first, min(first + depth, k), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        word = start // 4 + tl.arange(0, COLUMNS // 4)
        words = tl.load(words_ptrs + word[None], (row < m)[:, None] & (word < k // 4)[None], 0)
        # As [RANK, COLUMNS], the order in memory of adapters' A: loads are of 16 bytes.
        right_ptrs = right_ptr + lane[:, None] * right_r + column[None] * right_k
        right = tl.trans(tl.load(right_ptrs, (lane < rank)[:, None] & (column < k)[None], 0.0))
        total = tl.dot(decode_bf16(words, CODE), right, total)
    last = True
    if PARTS > 1:
        place = tl.arange(0, ROWS)[:, None] * RANK + lane[None]
        last, total = _add_parts(total, parts_ptr, arrived_ptr, tl.program_id(0), tl.num_programs(0), place, PARTS)
    if last:
        scale = tl.load(scale_ptr + row, row < m, 0.0)[:, None] if ROWWISE else tl.load(scale_ptr)
        out = (total * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * rank + lane[None], out, (row < m)[:, None] & (lane < rank)[None])


@triton.jit(do_not_specialize=["m"])
def _codes_grad_mm_kernel(
    # int32 words of four codes [m, k / 4]; fp32 [m] or [1]; left [m, rank] of any strides; out [k, rank].
    codes_ptr, scale_ptr, left_ptr, out_ptr, parts_ptr, arrived_ptr,
    # depth: rows of a part of the sum, a multiple of ROWS.
    m, k, left_m, left_r, depth, rank,
    CODE: tl.constexpr, ROWWISE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """COLUMNS rows of the result, over `depth` rows of the codes."""
    column, lane = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    word = tl.program_id(0) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
    first, total = tl.program_id(1) * depth, tl.zeros((COLUMNS, RANK), tl.float32)
    for start in range(first, min(first + depth, m), ROWS):
        row = start + tl.arange(0, ROWS)
        words_ptrs = codes_ptr + row.to(tl.int64)[:, None] * (k // 4) + word[None]
        words = tl.load(words_ptrs, (row < m)[:, None] & (word < k // 4)[None], 0)
        left_ptrs = left_ptr + row[:, None] * left_m + lane[None] * left_r
        left = tl.load(left_ptrs, (row < m)[:, None] & (lane < rank)[None], 0.0)
        scale = tl.load(scale_ptr + row, row < m, 0.0)[:, None] if ROWWISE else tl.load(scale_ptr)
        scaled = (left.to(tl.float32) * scale).to(left.dtype)
        total = tl.dot(tl.trans(decode_bf16(words, CODE)), scaled, total)
    last = True
    if PARTS > 1:
        place = tl.arange(0, COLUMNS)[:, None] * RANK + lane[None]
        last, total = _add_parts(total, parts_ptr, arrived_ptr, tl.program_id(0), tl.num_programs(0), place, PARTS)
    if last:
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + column[:, None] * rank + lane[None], out, (column < k)[:, None] & (lane < rank)[None])


def supports_codes_mm(codes: Tensor, thin: Tensor) -> bool:
    """Whether the kernels take these codes [M, K] and a thin matrix with r columns."""
    rank = thin.shape[1]
    if not codes.is_cuda or forced() == "ref" or not codes.numel() or not 0 < rank <= LARGEST_RANK:
        return False
    # A row of codes is read in whole 16 bytes.
    return codes.is_contiguous() and codes.shape[1] % 16 == 0 and thin.dtype == torch.bfloat16


_NAMES = {FORMATS[name].dtype: name for name in EIGHT_BITS}


class Blocks(NamedTuple):
    """A dimension of the codes, in blocks."""

    length: int
    block: int

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.length, self.block)


def _launch(
    kernel: Any, codes: Tensor, scale: Tensor, thin: Tensor, lines: Blocks, summed: Blocks, ctas: int
) -> Tensor:
    """The product of `kernel`, with a row for each of the `lines` of the codes; it sums over `summed`, in as many parts
    as take about `ctas` CTAs for each SM."""
    (m, k), rank = codes.shape, thin.shape[1]
    out, width = thin.new_empty(lines.length, rank), max(triton.next_power_of_2(rank), 16)
    wanted = min(triton.cdiv(ctas * sm_count(codes.device), lines.blocks), MOST_PARTS, summed.blocks)
    each = triton.cdiv(summed.blocks, wanted if lines.blocks <= RESULTS else 1)
    parts, workspace = triton.cdiv(summed.blocks, each), (None, None)
    if parts > 1:
        sums = torch.empty(parts * lines.blocks * lines.block * width, dtype=torch.float32, device=codes.device)
        workspace = sums, arrival_counters(codes.device)
    kernel[(lines.blocks, parts)](
        codes.view(torch.int32), scale, thin, out, *workspace, m, k, *thin.stride(), each * summed.block, rank,
        CODE=encoding(_NAMES[codes.dtype], codes.device), ROWWISE=len(scale) > 1, PARTS=parts,
        ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS, RANK=width, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def launch_codes_mm(codes: Tensor, scale: Tensor, right: Tensor) -> Tensor:
    """The kernel for `codes_mm_ref`; what `supports_codes_mm` takes."""
    rows, columns = Blocks(codes.shape[0], BLOCK_ROWS), Blocks(codes.shape[1], BLOCK_COLUMNS)
    return _launch(_codes_mm_kernel, codes, scale, right, rows, columns, CTAS_PER_SM)


def launch_codes_grad_mm(codes: Tensor, scale: Tensor, left: Tensor) -> Tensor:
    """The kernel for `codes_grad_mm_ref`; what `supports_codes_mm` takes."""
    rows, columns = Blocks(codes.shape[0], BLOCK_ROWS), Blocks(codes.shape[1], BLOCK_COLUMNS)
    return _launch(_codes_grad_mm_kernel, codes, scale, left, columns, rows, GRAD_CTAS_PER_SM)


@operator("codes_mm", fake=lambda codes, right: right.new_empty(codes.shape[0], right.shape[1]))
def codes_mm(codes: Tensor, scale: Tensor, right: Tensor) -> Tensor:
    """scale * codes [M, K] · right [K, r] in the dtype of right; scale fp32 [M] or [1]."""
    if not supports_codes_mm(codes, right):
        return codes_mm_ref(codes, scale, right)
    return launch_codes_mm(codes, scale, right)


@operator("codes_grad_mm", fake=lambda codes, left: left.new_empty(codes.shape[1], left.shape[1]))
def codes_grad_mm(codes: Tensor, scale: Tensor, left: Tensor) -> Tensor:
    """codes [M, K]ᵀ · (scale * left [M, r]) in the dtype of left; scale fp32 [M] or [1]."""
    if not supports_codes_mm(codes, left):
        return codes_grad_mm_ref(codes, scale, left)
    return launch_codes_grad_mm(codes, scale, left)

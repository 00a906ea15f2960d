"""The absmax of a matrix, of its rows and of its columns, from one read.

A CTA walks down a stripe of columns with the columns' maxima in registers, which costs one atomic per column at the
end; the rows' maxima cost one atomic per row and stripe. Maxima are taken over the bit patterns of |x|, which order as
the numbers do, with Inf above all numbers and NaN above Inf: non-finite values are never lost. Where rows and columns
are both wanted, bf16 is processed two numbers at a time, in half the instructions.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_ptx, sm_count
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    abs_bf16x2,
    high_half,
    low_half,
    max_bf16x2,
    reduce_max_bf16x2,
    row_max_bf16x2,
)
from qtrain.kernels.numerics.encode import abs_bits
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS, BlockGroups, group_of_row
from qtrain.kernels.quantize.gather_rows import EVERY_ROW, RowIndex, load_rows
from qtrain.kernels.quantize.logit_rows import TWO_INF, LogitRows, load_logit_rows, softmax_grad_bf16x2


def absmax_ref(x: Tensor) -> Tensor:
    """x -> its absmax, fp32 [1]; 0 of an empty one. NaN propagates."""
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=torch.inf).float().view(1)  # one read, no copy of |x|


def column_absmax_ref(x: Tensor, groups: BlockGroups | None = None) -> Tensor:
    """x [M, K] -> the absmax of each column (of each group), as fp32 bits in int32 [(groups *) K]; 0 without rows."""
    if groups is not None:
        blocks = x.abs().unflatten(0, (-1, BLOCK_ROWS)).amax(dim=1).float().view(torch.int32) & 0x7FFFFFFF
        found = blocks.new_zeros(groups.count, x.shape[1])  # a group without rows keeps 0
        index = groups.group_of_block.clamp(min=0).long()[:, None].expand_as(blocks)
        return found.scatter_reduce_(0, index, blocks, "amax").flatten()
    amax = x.abs().amax(dim=0) if x.shape[0] else x.new_zeros(x.shape[1])  # [K]; exact in x's dtype
    return amax.float().view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign


@triton.jit(do_not_specialize=["steps"])
def _absmax_kernel(
    # fp32 or bf16 [m, k], or the m rows are gathered from it: a `RowIndex`, int32 [m] or None, fp32 [m] or None.
    x_ptr, index_ptrs,
    # int32 of zeros, receive the maxima's bits, of the tensor [1], rows [m], columns [k] or [groups * k]; None: not
    # requested.
    amax_ptrs,
    # int32 [m / 128]: the group of each block of rows, with column maxima of its own; or None. A CTA has one group.
    group_ptr, m, k,
    # Tiles that a CTA walks down: a runtime value, so that one binary serves all.
    steps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tensor_ptr, row_ptr, column_ptr = amax_ptrs
    # CTAs that run together are neighbors along k: they read whole lines of the same rows.
    stripes = tl.cdiv(k, BLOCK_K)
    columns = tl.program_id(0) % stripes * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.program_id(0) // stripes * steps * BLOCK_M
    amax = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for step in range(steps):
        rows = first + step * BLOCK_M + tl.arange(0, BLOCK_M)
        x = load_rows(x_ptr, index_ptrs, rows, columns, k, rows < m, columns < k, False)
        bits = abs_bits(x)
        amax = tl.maximum(amax, bits)
        if row_ptr is not None:
            tl.atomic_max(row_ptr + rows, tl.max(bits, 1), rows < m, sem="relaxed")
    if column_ptr is not None:
        if group_ptr is not None:
            column_ptr += group_of_row(group_ptr, first) * k
        # Bits of |x| are non-negative int32, which an integer atomic compares; relaxed: the next launch reads them.
        tl.atomic_max(column_ptr + columns, tl.max(amax, 0), columns < k, sem="relaxed")
    if tensor_ptr is not None:
        tl.atomic_max(tensor_ptr, tl.max(tl.max(amax, 0), 0), sem="relaxed")


@triton.jit
def atomic_max_bf16x2(ptr, words, n, bf16x2):
    """Pairs without sign [C] -> atomic maxima of two columns each, at those of `words` that are below n."""
    # The numbers of a pair side by side in a warp, whose atomics are then in half as many sectors of the L2 cache.
    column = tl.reshape(tl.join(2 * words, 2 * words + 1), (2 * words.shape[0],))
    amax = tl.reshape(tl.join(low_half(bf16x2), high_half(bf16x2)), column.shape)
    tl.atomic_max(ptr + column, amax, column < 2 * n, sem="relaxed")


@triton.jit(do_not_specialize=["steps"])
def _absmax_bf16x2_kernel(
    # x int32 words of two bf16 [m, k / 2], k a multiple of 8; the rest as above, without the tensor's maximum.
    # logit_rows: the `LogitRows` of x, whose gradient's maxima are wanted, or None.
    x_ptr, index_ptrs, logit_rows, amax_ptrs, group_ptr, m, k, steps,
    PTX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Maxima of rows and of columns, two neighbors of a row at once."""
    row_ptr, column_ptr = amax_ptrs
    WIDTH: tl.constexpr = BLOCK_K // 2
    stripes, words = tl.cdiv(k, BLOCK_K), tl.multiple_of(k // 2, 4)
    columns = tl.program_id(0) % stripes * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(0) // stripes * steps * BLOCK_M
    amax = tl.zeros((BLOCK_M, WIDTH), tl.int32)
    for step in range(steps):
        rows = first + step * BLOCK_M + tl.arange(0, BLOCK_M)
        if logit_rows is None:
            x = load_rows(x_ptr, index_ptrs, rows, columns, words, rows < m, columns < words, PTX)
        else:
            x = load_rows(x_ptr, index_ptrs, rows, columns, words, rows < m, columns < words, PTX, TWO_INF)
            x = softmax_grad_bf16x2(x, columns, load_logit_rows(logit_rows, rows, rows < m), PTX)
        bf16x2 = abs_bf16x2(x)
        amax = max_bf16x2(amax, bf16x2, PTX)
        tl.atomic_max(row_ptr + rows, row_max_bf16x2(bf16x2, PTX), rows < m, sem="relaxed")
    if group_ptr is not None:
        column_ptr += group_of_row(group_ptr, first) * k
    atomic_max_bf16x2(column_ptr, columns, words, reduce_max_bf16x2(amax, 0, PTX))


def supports_bf16x2(x: Tensor) -> bool:
    """Whether x, contiguous, can be read as words of two bf16, with every row aligned to eight elements."""
    return x.dtype is torch.bfloat16 and x.shape[-1] % 8 == 0 and x.storage_offset() % 8 == 0


def launch_absmax(
    x: Tensor,
    tensor: bool = False,
    rows: bool = False,
    columns: bool = False,
    groups: BlockGroups | None = None,
    *,
    index: RowIndex = EVERY_ROW,
    logit_rows: LogitRows | None = None,
    block: tuple[int, int] | None = None,
    steps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] contiguous -> absmax of the tensor [1], of its rows [M], of its columns [K], as fp32 bits in int32.

    Those that are not requested are 0 or empty. groups: columns of each group alone [groups * K]. index: x is [T, K],
    and the M rows are gathered from it. logit_rows: of logits x, whose gradient in bf16 is meant; of rows and columns
    alone, `supports_bf16x2`. block, steps: rows and columns of a tile, and tiles per CTA.
    """
    m, k = index.shape(x)
    width = k if groups is None else groups.count * k
    # One allocation and one launch of zeros for all that is requested.
    found = torch.zeros(1 + rows * m + columns * width, dtype=torch.int32, device=x.device)
    tensor_amax, row_amax, column_amax = found[:1], found[1 : 1 + rows * m], found[1 + rows * m :]
    bf16x2 = rows and columns and not tensor and supports_bf16x2(x)
    assert logit_rows is None or bf16x2, "the maxima of a gradient are of rows and columns"
    # Tuned on an H200: rows want short tiles with few atomics, the others long lines.
    block_m, block_k = block or ((32, 256) if bf16x2 else (32, 128) if rows else (8, 512) if columns else (8, 1024))
    stripes, warps = triton.cdiv(k, block_k), 4 if rows or columns else 8
    if groups is not None:
        steps = BLOCK_ROWS // block_m  # a CTA's rows are of one group
    elif steps is None:
        steps = 8 if bf16x2 else 16
        while steps > 1 and stripes * triton.cdiv(m, block_m * steps) < 2 * sm_count(x.device):
            steps //= 2  # a small matrix: one CTA per SM would wait for its loads
    group_of_block = None if groups is None else groups.group_of_block
    grid = (stripes * triton.cdiv(m, block_m * steps),)
    if x.numel() and bf16x2:
        _absmax_bf16x2_kernel[grid](
            x.view(-1).view(torch.int32), tuple(index), logit_rows and tuple(logit_rows), (row_amax, column_amax),
            group_of_block, m, k, steps, PTX=has_ptx(x.device), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
            # Eight CTAs share an SM; the gradient of logits takes 107 registers.
            maxnreg=64 if logit_rows is None else None,
            enable_fp_fusion=False,  # a gradient is what quantizers compute, bit for bit
        )  # fmt: skip
    elif x.numel():
        requested = zip((tensor, rows, columns), (tensor_amax, row_amax, column_amax), strict=True)
        _absmax_kernel[grid](
            x, tuple(index), tuple(amax if wanted else None for wanted, amax in requested), group_of_block, m, k, steps,
            BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
        )  # fmt: skip
    return tensor_amax, row_amax, column_amax


@operator("absmax", fake=lambda x: x.new_empty(1, dtype=torch.float32))
def absmax(x: Tensor) -> Tensor:
    """x -> its absmax, fp32 [1]; 0 of an empty one. NaN propagates."""
    if x.is_cuda:
        x = x.contiguous()
        return launch_absmax(x.view(-1, x.shape[-1]), tensor=True)[0].view(torch.float32)
    return absmax_ref(x)

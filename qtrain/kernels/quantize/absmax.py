"""The largest absolute value of a matrix, of its rows and of its columns, from one read.

A program walks down a stripe of columns with the columns' maxima in registers, so that they cost one atomic each at the
end; its rows' maxima are one atomic a row and stripe. Maxima are taken over bit patterns of |x|, which order as the
numbers do, with Inf above all numbers and NaN above Inf: bad values are found, not lost. Those of rows and columns
together are taken of two bf16 at once, for half the instructions.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import larger, largest, largest_of_rows, lower, magnitudes, upper
from qtrain.kernels.numerics.encode import abs_bits, casts_to_fp8


def absmax_ref(x: Tensor) -> Tensor:
    """x -> fp32 [1], its largest absolute value; 0 of an empty one. NaN comes through."""
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=torch.inf).float().view(1)  # one read, no copy of |x|


def absmax_of_columns_ref(x: Tensor) -> Tensor:
    """x [M, K] -> bits of the largest absolute value of each column as fp32, int32 [K]; 0 where M is 0."""
    most = x.abs().amax(dim=0) if x.shape[0] else x.new_zeros(x.shape[1])
    return most.float().view(torch.int32) & 0x7FFFFFFF  # a NaN may come with a sign


@triton.jit(do_not_specialize=["steps"])
def _absmax_kernel(
    x_ptr, tensor_ptr, row_ptr, column_ptr, m, k, steps,
    TENSOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    stripes = tl.cdiv(k, BLOCK_K)
    columns = tl.program_id(0) % stripes * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.program_id(0) // stripes * steps * BLOCK_M
    most = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for step in range(steps):
        rows = first + step * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < m)[:, None] & (columns < k)[None, :]
        bits = abs_bits(tl.load(x_ptr + rows.to(tl.int64)[:, None] * k + columns[None, :], inside, 0.0))
        most = tl.maximum(most, bits)
        if ROWS:
            tl.atomic_max(row_ptr + rows, tl.max(bits, 1), rows < m, sem="relaxed")
    if COLUMNS:
        tl.atomic_max(column_ptr + columns, tl.max(most, 0), columns < k, sem="relaxed")
    if TENSOR:
        tl.atomic_max(tensor_ptr, tl.max(tl.max(most, 0), 0), sem="relaxed")


@triton.jit
def record_amax_bf16x2(ptr, words, n, pairs):
    """Pairs without sign to the maxima of two columns each, those of `words` that are below n."""
    tl.atomic_max(ptr + 2 * words, lower(pairs), words < n, sem="relaxed")
    tl.atomic_max(ptr + 2 * words + 1, upper(pairs), words < n, sem="relaxed")


@triton.jit(do_not_specialize=["steps"])
def _absmax_pairs_kernel(
    x_ptr, row_ptr, column_ptr, m, k, steps,
    NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of rows and columns, x as words of two elements. m, k: elements, k a multiple of 8."""
    WIDTH: tl.constexpr = BLOCK_K // 2
    stripes, words = tl.cdiv(k, BLOCK_K), tl.multiple_of(k // 2, 4)
    columns = tl.program_id(0) % stripes * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(0) // stripes * steps * BLOCK_M
    most = tl.zeros((BLOCK_M, WIDTH), tl.int32)
    for step in range(steps):
        rows = first + step * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < m)[:, None] & (columns < words)[None, :]
        pairs = magnitudes(tl.load(x_ptr + rows.to(tl.int64)[:, None] * words + columns[None, :], inside, 0))
        most = larger(most, pairs, NATIVE)
        tl.atomic_max(row_ptr + rows, largest_of_rows(pairs, NATIVE), rows < m, sem="relaxed")
    record_amax_bf16x2(column_ptr, columns, words, largest(most, 0, NATIVE))


def supports_bf16x2(x: Tensor) -> bool:
    """Whether x, contiguous, can be read as words of two bf16, every row from where eight elements of memory start."""
    return x.dtype is torch.bfloat16 and x.shape[-1] % 8 == 0 and x.storage_offset() % 8 == 0


def launch_absmax(
    x: Tensor,
    tensor: bool = False,
    rows: bool = False,
    columns: bool = False,
    *,
    block: tuple[int, int] | None = None,
    steps: int | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] contiguous -> bits of the absmax of all of it [1], of its rows [M] and of its columns [K], int32.

    What was not asked for is zeros.
    """
    m, k = x.shape
    found = torch.zeros(1 + rows * m + columns * k, dtype=torch.int32, device=x.device)
    of_tensor, of_rows, of_columns = found[:1], found[1 : 1 + rows * m], found[1 + rows * m :]
    pairs = rows and columns and not tensor and supports_bf16x2(x)
    # The fastest on an H200: rows want short tiles with few atomics, the rest long lines.
    block_m, block_k = block or ((32, 256) if pairs else (32, 128) if rows else (8, 512) if columns else (8, 1024))
    steps, warps = steps or (8 if pairs else 16), warps or (4 if rows or columns else 8)
    grid = (triton.cdiv(k, block_k) * triton.cdiv(m, block_m * steps),)
    if x.numel() and pairs:
        _absmax_pairs_kernel[grid](
            x.view(-1).view(torch.int32), of_rows, of_columns, m, k, steps, casts_to_fp8(x.device), block_m, block_k,
            num_warps=warps,
        )  # fmt: skip
    elif x.numel():
        _absmax_kernel[grid](
            x, of_tensor, of_rows, of_columns, m, k, steps, tensor, rows, columns, block_m, block_k, num_warps=warps
        )
    return of_tensor, of_rows, of_columns


@torch.library.custom_op("qtrain::absmax", mutates_args=())
def absmax(x: Tensor) -> Tensor:
    """x -> fp32 [1], its largest absolute value; 0 of an empty one. NaN comes through."""
    if x.is_cuda:
        x = x.contiguous()
        return launch_absmax(x.view(-1, x.shape[-1]), tensor=True)[0].view(torch.float32)
    return absmax_ref(x)


@absmax.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(1, dtype=torch.float32)

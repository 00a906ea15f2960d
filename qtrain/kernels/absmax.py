"""The largest absolute value of a matrix, of its rows and of its columns, from one read.

A program walks down a stripe of columns with the columns' maxima in registers, so that they cost one atomic each at the
end; its rows' maxima are one atomic a row and stripe. Maxima are taken over bit patterns of |x|, which order as the
numbers do, with Inf above all numbers and NaN above Inf: bad values are found, not lost. Those of rows and columns
together are taken of two bf16 at once, for half the instructions.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.pairs import (
    gate_gradient,
    gated,
    larger,
    larger_half,
    largest,
    lower,
    magnitudes,
    up_gradient,
    upper,
)
from qtrain.kernels.rounding import casts_to_fp8, magnitude_bits


def absmax_ref(x: Tensor) -> Tensor:
    """x -> fp32 [1], its largest absolute value; 0 of an empty one. NaN comes through."""
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=torch.inf).float().view(1)  # one read, no copy of |x|


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
        bits = magnitude_bits(tl.load(x_ptr + rows.to(tl.int64)[:, None] * k + columns[None, :], inside, 0.0))
        most = tl.maximum(most, bits)
        if ROWS:
            tl.atomic_max(row_ptr + rows, tl.max(bits, 1), rows < m, sem="relaxed")
    if COLUMNS:
        tl.atomic_max(column_ptr + columns, tl.max(most, 0), columns < k, sem="relaxed")
    if TENSOR:
        tl.atomic_max(tensor_ptr, tl.max(tl.max(most, 0), 0), sem="relaxed")


@triton.jit(do_not_specialize=["steps"])
def _absmax_pairs_kernel(
    x_ptr, dy_ptr, row_ptr, column_ptr, m, k, steps,
    GATE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of rows and columns, x as words of two elements. m, k: elements, k a multiple of 8.

    GATE: not of x [M, K] but of what a gated MLP makes of x [M, 2K], gate and up: "forward" the activation [M, K],
    "backward" the gradient of x itself, from that of the activation at `dy_ptr`.
    """
    WIDTH: tl.constexpr = BLOCK_K // 2
    stripes, words = tl.cdiv(k, BLOCK_K), tl.multiple_of(k // 2, 4)
    stride = words if GATE == "" else words * 2
    columns = tl.program_id(0) % stripes * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(0) // stripes * steps * BLOCK_M
    most = tl.zeros((BLOCK_M, WIDTH), tl.int32)
    most_up = most
    for step in range(steps):
        rows = first + step * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < m)[:, None] & (columns < words)[None, :]
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        pairs = tl.load(x_ptrs, inside, 0)
        if GATE == "forward":
            pairs = gated(pairs, tl.load(x_ptrs + words, inside, 0), NATIVE)
        elif GATE == "backward":
            dy = tl.load(dy_ptr + rows.to(tl.int64)[:, None] * words + columns[None, :], inside, 0)
            up = magnitudes(up_gradient(dy, pairs, NATIVE))
            pairs = gate_gradient(dy, pairs, tl.load(x_ptrs + words, inside, 0), NATIVE)
        pairs = magnitudes(pairs)
        most = larger(most, pairs, NATIVE)
        if GATE == "backward":
            most_up = larger(most_up, up, NATIVE)
            pairs = larger(pairs, up, NATIVE)
        # Pairs within a thread's reach, then whole numbers across threads, for which there is one instruction.
        pairs = largest(tl.reshape(pairs, (BLOCK_M, WIDTH // 4, 4)), 2, NATIVE)
        tl.atomic_max(row_ptr + rows, tl.max(larger_half(pairs), 1), rows < m, sem="relaxed")
    _record(column_ptr, columns, words, largest(most, 0, NATIVE))
    if GATE == "backward":
        _record(column_ptr + k, columns, words, largest(most_up, 0, NATIVE))


@triton.jit
def _record(ptr, words, n, pairs):
    tl.atomic_max(ptr + 2 * words, lower(pairs), words < n, sem="relaxed")
    tl.atomic_max(ptr + 2 * words + 1, upper(pairs), words < n, sem="relaxed")


def holds_pairs(x: Tensor) -> bool:
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
    pairs = rows and columns and not tensor and holds_pairs(x)
    # The fastest on an H200: rows want short tiles with few atomics, the rest long lines.
    block_m, block_k = block or ((32, 256) if pairs else (32, 128) if rows else (8, 512) if columns else (8, 1024))
    steps, warps = steps or (8 if pairs else 16), warps or (4 if rows or columns else 8)
    grid = (triton.cdiv(k, block_k) * triton.cdiv(m, block_m * steps),)
    if x.numel() and pairs:
        _absmax_pairs_kernel[grid](
            x.view(torch.int32), None, of_rows, of_columns, m, k, steps, "", casts_to_fp8(x.device), block_m, block_k,
            num_warps=warps,
        )  # fmt: skip
    elif x.numel():
        _absmax_kernel[grid](
            x, of_tensor, of_rows, of_columns, m, k, steps, tensor, rows, columns, block_m, block_k, num_warps=warps
        )
    return of_tensor, of_rows, of_columns


def gate_of(gated: bool, dy: Tensor | None) -> str:
    """GATE of the kernels that have one."""
    return "" if not gated else "forward" if dy is None else "backward"


def launch_absmax_gated(x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bits of the absmax of rows and columns, int32, of silu_mul(x) [M, K] or, with its gradient dy [M, K], of that of
    x [M, 2K]; contiguous, not empty, `holds_pairs`."""
    (m, width), k = x.shape, x.shape[1] // 2
    found = torch.zeros(m + (k if dy is None else width), dtype=torch.int32, device=x.device)
    block_m, block_k, steps = (32, 256, 8) if dy is None else (16, 256, 16)
    _absmax_pairs_kernel[(triton.cdiv(k, block_k) * triton.cdiv(m, block_m * steps),)](
        x.view(torch.int32), None if dy is None else dy.view(torch.int32), found[:m], found[m:], m, k, steps,
        gate_of(True, dy), casts_to_fp8(x.device), block_m, block_k,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return found[:m], found[m:]


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

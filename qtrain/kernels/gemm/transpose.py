"""Transposes a matrix of 8-bit elements: [R, C] -> contiguous [C, R], for operands that tensor cores cannot read.

Hopper's 8-bit tensor cores take both operands K-major only: A·B and Aᵀ·B need one of their operands transposed first.
Each CTA loads a square tile along its rows and stores it along its columns, with coalesced accesses of 16 bytes per
thread on both sides; the transposition goes through shared memory. Memory-bound: 2 bytes per element.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton

BLOCK = 128


def transpose_8bit_ref(x: Tensor) -> Tensor:
    """x [R, C] of any one-byte dtype -> [C, R] contiguous, the same bits."""
    return x.t().clone(memory_format=torch.contiguous_format)


@triton.jit
def _transpose_8bit_kernel(x_ptr, out_ptr, rows, columns, stride, BLOCK: tl.constexpr):
    # A tile's row is 128 bytes, one cache line, on both sides.
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x_ptr + row[:, None] * stride + column[None, :], inside)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tile.T, inside.T)


def launch_transpose_8bit(x: Tensor) -> Tensor:
    """The kernel for `transpose_8bit_ref`; rows of x are contiguous."""
    (rows, columns), out = x.shape, torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK))
        bits = x.view(torch.uint8)
        _transpose_8bit_kernel[grid](bits, out.view(torch.uint8), rows, columns, x.stride(0), BLOCK, num_warps=8)
    return out


@torch.library.custom_op("qtrain::transpose_8bit", mutates_args=())
def transpose_8bit(x: Tensor) -> Tensor:
    """x [R, C] of int8, uint8 or an 8-bit float -> contiguous [C, R]. TypeError for wider elements."""
    if x.dtype.itemsize != 1:
        raise TypeError(f"transpose_8bit takes elements of one byte, not {x.dtype}")
    if not x.is_cuda or x.t().is_contiguous():  # the latter is a plain copy
        return transpose_8bit_ref(x)
    return launch_transpose_8bit(x.contiguous())


@transpose_8bit.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def k_major(x: Tensor) -> Tensor:
    """An operand [R, K] of one-byte elements with contiguous rows: x itself, or a copy."""
    if x.is_contiguous():
        return x
    return transpose_8bit(x.t()) if x.t().is_contiguous() else x.contiguous()

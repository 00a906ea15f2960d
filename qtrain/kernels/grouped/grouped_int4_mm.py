"""Grouped GEMMs of packed INT4 codes: unpacked to INT8, then the products of `grouped_mm.py`.

Two codes are in a byte along the dimension that is summed over, in order, so rows stay with their groups. Unpacking
moves 1.5 bytes per code.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.grouped.grouped_mm import k_grouped_mm, m_grouped_mm
from qtrain.kernels.grouped.per_group import empty_rows, empty_sums
from qtrain.kernels.numerics.formats import unpack

BLOCK = 4096


@triton.jit
def _unpack_int4_kernel(packed_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    # packed uint8 [numel], low nibble first; out int8 [2 * numel]. Arithmetic shifts extend the sign.
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.load(packed_ptr + index, index < numel, 0)
    low, high = (packed << 4).to(tl.int8, bitcast=True) >> 4, packed.to(tl.int8, bitcast=True) >> 4
    # interleave restores the order of the codes, low nibble first.
    both = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + both, tl.interleave(low, high), both < 2 * numel)


def launch_unpack_int4(packed: Tensor) -> Tensor:
    """packed uint8 [R, C], contiguous -> int8 [R, 2C], as `unpack`."""
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.int8, device=packed.device)
    if packed.numel():
        grid = (triton.cdiv(packed.numel(), BLOCK),)
        _unpack_int4_kernel[grid](packed, out, packed.numel(), BLOCK, num_warps=4)
    return out


def _unpacked(packed: Tensor) -> Tensor:
    if packed.is_cuda and forced() != "ref":
        return launch_unpack_int4(packed.contiguous())
    return unpack(packed, "int4", 2 * packed.shape[1])


@operator("m_grouped_int4_mm", fake=empty_rows)
def m_grouped_int4_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    group_of_block: Tensor,
    starts: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """`m_grouped_mm` of packed codes, K even: A uint8 [R, K / 2], B uint8 [E * N, K / 2] or [N, E * K / 2]."""
    operands = _unpacked(a), _unpacked(b)
    return m_grouped_mm(*operands, scale_a, scale_b, group_of_block, starts, out_dtype)


@operator("k_grouped_int4_mm", fake=empty_sums)
def k_grouped_int4_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, starts: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """`k_grouped_mm` of packed codes: A uint8 [N, R / 2], B uint8 [K, R / 2]."""
    return k_grouped_mm(_unpacked(a), _unpacked(b), scale_a, scale_b, starts, out_dtype)

"""Elementwise operations in one pass over memory that PyTorch does in several.

    add_in_order   total += terms[0]; total += terms[1]; ...   fp32, one read and one write of the total
    sum_in_order   terms[0] + terms[1] + ...                   fp32, rounded once to the terms' dtype
    scaled         x * factor, the factor on the device        fp32, rounded once; one read and one write

The first two fix the order of additions, so a sum has the same bits wherever its terms were computed. `scaled`
multiplies in fp32: PyTorch rounds an fp32 scalar to bf16 before it multiplies bf16; done exactly it takes three passes
and a copy in fp32.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton

BLOCK = 2048
"""Elements of a CTA: of bf16, two loads of 16 bytes a thread."""


def add_in_order_ref(total: Tensor, terms: Iterable[Tensor]) -> None:
    """total [L] fp32 += terms [R, L] of any float dtype, in place, row by row."""
    for term in terms:  # each sum is rounded to fp32 before the next
        total += term


@triton.jit(do_not_specialize=["length"])
def _add_in_order_kernel(
    total_ptr, terms_ptr, length, EVEN: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # total [length], terms [ROWS, length], of any float dtypes. NEW: 1 where the total begins with the first row.
    if EVEN:  # tells the compiler that it is a multiple of 16: else every element is a load of its own
        length = length // 16 * 16
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    # Each CTA adds its elements alone, row by row: the order of additions is that of the rows.
    total = tl.load((terms_ptr if NEW else total_ptr) + at, inside).to(tl.float32)
    for row in tl.static_range(NEW, ROWS):  # unrolled: all loads are in flight before the first sum
        total += tl.load(terms_ptr + row * length.to(tl.int64) + at, inside).to(tl.float32)
    tl.store(total_ptr + at, total.to(total_ptr.dtype.element_ty), inside)


def launch_add_in_order(total: Tensor, terms: Tensor, *, new: bool = False) -> None:
    """The kernel for `add_in_order_ref`, or with `new` for `sum_in_order_ref`, into total; both contiguous, at most 64
    rows."""
    if total.numel():
        grid = (triton.cdiv(total.numel(), BLOCK),)
        even, rows = total.numel() % 16 == 0, len(terms)
        _add_in_order_kernel[grid](total, terms, total.numel(), even, int(new), rows, BLOCK, num_warps=8)


def add_in_order(total: Tensor, terms: Tensor | list[Tensor]) -> Tensor:
    """total [L] fp32 += terms, [R, L] or R tensors of [L], in place, one after the other. Returns `total`."""
    # The definition otherwise, with the same bits.
    if total.is_cuda and isinstance(terms, Tensor) and terms.is_contiguous() and len(terms) <= 64:
        launch_add_in_order(total, terms)
    else:
        add_in_order_ref(total, terms)
    return total


def sum_in_order_ref(terms: Tensor | Sequence[Tensor]) -> Tensor:
    """terms [R, L] of any float dtype -> their sum [L] in that dtype, added in fp32 row by row and rounded once."""
    total = terms[0].to(torch.float32, copy=True)
    add_in_order_ref(total, terms[1:])
    return total.to(terms[0].dtype)


def sum_in_order(terms: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """terms, [R, L] or R tensors of [L], of one float dtype -> their sum [L], added in fp32 one after the other and
    rounded once. Of one term the term itself. out: contiguous [L] of any float dtype, for the sum."""
    if isinstance(terms, Tensor) and terms.is_cuda and terms.is_contiguous() and 1 < len(terms) <= 64:
        out = torch.empty_like(terms[0]) if out is None else out
        launch_add_in_order(out, terms, new=True)
        return out
    total = terms[0] if len(terms) == 1 else sum_in_order_ref(terms)
    return total if out is None else out.copy_(total)


def scaled_ref(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp32 or bf16, factor an fp32 scalar -> x * factor in dtype."""
    return (x.float() * factor).to(dtype)


@triton.jit
def _scaled_kernel(x_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    # x fp32 or bf16 [size], factor fp32 scalar on the device, out of any float dtype.
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + element, element < size, 0.0).to(tl.float32)
    tl.store(out_ptr + element, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), element < size)


def launch_scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel for `scaled_ref`; x contiguous."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _scaled_kernel[grid](x, factor, out, x.numel(), BLOCK=BLOCK, num_warps=4)
    return out


@operator("scaled", fake=lambda x, dtype: torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format))
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp32 or bf16, of any shape, factor an fp32 scalar on its device -> x * factor in dtype, rounded once."""
    x = x.contiguous()
    if not x.is_cuda or forced() == "ref":
        return scaled_ref(x, factor, dtype)
    return launch_scaled(x, factor, dtype)

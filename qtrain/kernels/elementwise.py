"""Sums of tensors in one pass over memory, added in fp32 in a fixed order, so that a sum has the same bits wherever its
terms were computed.

    add_in_order   total += terms[0]; total += terms[1]; ...   one read and one write of the total
                   new: total = 0 + terms[0] + ...             one write
    sum_in_order   terms[0] + terms[1] + ...                   rounded once
    scaled_sum     (terms[0] + terms[1] + ...) * factor        the factor on the device, in fp32; rounded once

PyTorch takes a pass for each term, and rounds an fp32 scalar to bf16 before it multiplies bf16.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import tl, triton

BLOCK = 2048
"""Elements of a CTA: of bf16, two loads of 16 bytes a thread."""
MOST_TERMS = 64
"""That one launch adds."""


def add_in_order_ref(total: Tensor, terms: Iterable[Tensor], *, new: bool = False) -> None:
    """total [L] fp32 += terms [R, L] of any float dtype, in place, row by row; new: from zeros on."""
    if new:
        total.zero_()
    for term in terms:  # each sum is rounded to fp32 before the next
        total += term


@triton.jit(do_not_specialize=["length"])
def _add_in_order_kernel(
    # out [length] and terms, each [length], of any float dtypes; fp32 scalar on the device, or None.
    out_ptr, terms, factor_ptr, length,
    # What the sum begins with: "out" (what is there), "zero", or the first "term".
    START: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if EVEN:  # tells the compiler that it is a multiple of 16: else every element is a load of its own
        length = length // 16 * 16
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    # Each CTA adds its elements alone, term by term: that is the order of additions.
    if START == "zero":
        total = tl.zeros([BLOCK], tl.float32)
    else:
        total = tl.load((terms[0] if START == "term" else out_ptr) + at, inside).to(tl.float32)
    FIRST: tl.constexpr = 1 if START == "term" else 0
    for term in tl.static_range(FIRST, len(terms)):  # unrolled: all loads are in flight before the first sum
        total += tl.load(terms[term] + at, inside).to(tl.float32)
    if factor_ptr is not None:
        total *= tl.load(factor_ptr)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), inside)


def launch_add_in_order(out: Tensor, terms: Sequence[Tensor], start: str, factor: Tensor | None = None) -> None:
    """The kernel into `out`, which may be one of the terms; all [L] and contiguous, at most MOST_TERMS. start: "out"
    for `add_in_order_ref`, "zero" for a new total, "term" for `sum_in_order_ref` and, with the factor, fp32 [1] or
    scalar, for `scaled_sum_ref`."""
    if length := out.numel():
        even, grid = length % 16 == 0, (triton.cdiv(length, BLOCK),)
        _add_in_order_kernel[grid](out, tuple(terms), factor, length, START=start, EVEN=even, BLOCK=BLOCK, num_warps=8)


def _has_kernel(tensors: Sequence[Tensor]) -> bool:
    if forced() == "ref":
        return False
    return len(tensors) <= MOST_TERMS + 1 and all(t.is_cuda and t.is_contiguous() for t in tensors)


def add_in_order(total: Tensor, terms: Tensor | Sequence[Tensor], *, new: bool = False) -> Tensor:
    """total [L] fp32 += terms, [R, L] or R tensors of [L], in place, one after the other; new: total = 0 + terms.
    Returns `total`."""
    terms = list(terms)
    # The definition otherwise, with the same bits; here and below.
    if _has_kernel([total, *terms]):
        launch_add_in_order(total, terms, "zero" if new else "out")
    else:
        add_in_order_ref(total, terms, new=new)
    return total


def sum_in_order_ref(terms: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """terms [R, L] of any float dtype -> their sum [L] in `dtype`, None: in theirs, added in fp32 row by row and
    rounded once."""
    total = terms[0].to(torch.float32, copy=True)
    add_in_order_ref(total, terms[1:])
    return total.to(dtype or terms[0].dtype)


def sum_in_order(terms: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """terms, [R, L] or R tensors of [L], of one float dtype -> their sum [L], added in fp32 one after the other and
    rounded once. Of one term the term itself. out: contiguous [L] of any float dtype, for the sum."""
    terms = list(terms)
    if len(terms) > 1 and _has_kernel(terms):
        out = torch.empty_like(terms[0]) if out is None else out
        launch_add_in_order(out, terms, "term")
        return out
    total = terms[0] if len(terms) == 1 else sum_in_order_ref(terms, None if out is None else out.dtype)
    return total if out is None else out.copy_(total)


def scaled_sum_ref(terms: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> Tensor:
    """terms [R, L] of any float dtypes, factor an fp32 scalar -> their sum in fp32, one after the other, times the
    factor, in dtype."""
    return sum_in_order_ref(terms, torch.float32).mul_(factor).to(dtype)  # its own copy: no second one in fp32


def scaled_sum(terms: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous terms of one shape, of any float dtypes, factor an fp32 scalar on their device -> their sum times
    the factor, in the first term's memory if that has this dtype."""
    out = terms[0] if terms[0].dtype == dtype else torch.empty_like(terms[0], dtype=dtype)
    if _has_kernel(terms):
        launch_add_in_order(out, terms, "term", factor)
    else:
        out.copy_(scaled_sum_ref(terms, factor, dtype))
    return out

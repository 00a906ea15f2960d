"""Adds the rows of a matrix to a vector in fp32, one row after the other: total += terms[0]; total += terms[1]; ...

The order of additions is fixed, so the sum has the same bits wherever the rows were computed. One pass over memory,
where a loop of additions reads and writes the total once per row.
"""

from collections.abc import Iterable

from torch import Tensor

from qtrain.kernels.compiler import tl, triton

BLOCK = 2048


def add_in_order_ref(total: Tensor, terms: Iterable[Tensor]) -> None:
    """total [L] fp32 += terms [R, L] of any float dtype, in place, row by row."""
    for term in terms:
        total += term


@triton.jit(do_not_specialize=["length"])
def _add_in_order_kernel(total_ptr, terms_ptr, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    total = tl.load(total_ptr + at, inside)
    for row in tl.static_range(ROWS):
        total += tl.load(terms_ptr + row * length.to(tl.int64) + at, inside).to(tl.float32)
    tl.store(total_ptr + at, total, inside)


def launch_add_in_order(total: Tensor, terms: Tensor) -> None:
    """The kernel for `add_in_order_ref`; both contiguous, at most 64 rows."""
    if total.numel():
        grid = (triton.cdiv(total.numel(), BLOCK),)
        _add_in_order_kernel[grid](total, terms, total.numel(), len(terms), BLOCK, num_warps=8)


def add_in_order(total: Tensor, terms: Tensor | list[Tensor]) -> Tensor:
    """total [L] fp32 += terms, [R, L] or R tensors of [L], in place, one after the other. Returns `total`."""
    if total.is_cuda and isinstance(terms, Tensor) and terms.is_contiguous() and len(terms) <= 64:
        launch_add_in_order(total, terms)
    else:
        add_in_order_ref(total, terms)
    return total

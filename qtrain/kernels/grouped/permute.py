"""Rows of groups back into rows of tokens, and the gradient of a route's weight; memory-bound, one pass each.

    combine_rows        y [R, C] -> [T, C]   the weighted sum of a token's k rows
    route_weight_grad   -> [T, k]            of the weights of `combine_rows` behind a SwiGLU MLP

Products and sums are fp32, in the order of k, and rounded once. Kernels are launched with enable_fp_fusion=False, so
that rows equal the definitions bit for bit. Rows of tokens become rows of groups in `quantize/gather_rows.py`:
`combine_rows` is the gradient of `gather_rows`, which with a weight for each row is that of `combine_rows`.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.kernels.numerics.silu import sum_of_pairs
from qtrain.kernels.quantize.gather_rows import gather_rows_ref, grid_of_rows

ROUTES = 128
"""Routes that a CTA computes the weights' gradients of."""
BLOCKS = 64
"""Parts of their rows' dots that it adds up at once. A tile of thousands takes ptxas minutes."""


def weights_of_rows(weights: Tensor, groups: TokenPermutation) -> Tensor:
    """weights fp32 [T, k] of routes -> fp32 [R], of the row of each; 0 of rows that hold no token."""
    rows = weights.new_zeros(groups.rows + 1)  # rows of padding have weight 0; the last one is of routes without a row
    row = groups.row_of_topk.flatten().long()
    return rows.scatter_(0, torch.where(row < 0, groups.rows, row), weights.flatten())[:-1]


# ---- combine ---------------------------------------------------------------------------------------------------------


def combine_rows_ref(y: Tensor, weights: Tensor | None, row_of_topk: Tensor) -> Tensor:
    """y [R, C], weights fp32 [T, k], row_of_topk int32 [T, k], -1: none -> [T, C] in y's dtype."""
    total = torch.zeros(row_of_topk.shape[0], y.shape[1], device=y.device)
    for i in range(row_of_topk.shape[1]):
        row = gather_rows_ref(y, row_of_topk[:, i]).float()
        total = total + (row if weights is None else row * weights[:, i : i + 1])
    return total.to(y.dtype)


@triton.jit
def _combine_rows_kernel(y_ptr, weight_ptr, row_ptr, out_ptr, columns, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    # y [R, columns], weight fp32 [T, k] or None, row int32 [T, k], out [T, columns]. A gather per token, not a scatter
    # per row: no atomics, and sums in the order of k.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PER_TOKEN):
        row = tl.load(row_ptr + token * PER_TOKEN + i).to(tl.int64)
        y = tl.load(y_ptr + row * columns + column, (column < columns) & (row >= 0), 0.0).to(tl.float32)
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + token * PER_TOKEN + i)
        total += y
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), column < columns)


def launch_combine_rows(y: Tensor, weights: Tensor | None, row_of_topk: Tensor) -> Tensor:
    """The kernel for `combine_rows_ref`; all contiguous."""
    per_token, out = row_of_topk.shape[1], y.new_empty(row_of_topk.shape[0], y.shape[1])
    if out.numel():
        grid, block = grid_of_rows(*out.shape)
        _combine_rows_kernel[grid](
            y, weights, row_of_topk, out, y.shape[1], PER_TOKEN=per_token, BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@operator("combine_rows", fake=lambda y, row_of_topk: y.new_empty(row_of_topk.shape[0], y.shape[1]))
def combine_rows(y: Tensor, weights: Tensor | None, row_of_topk: Tensor) -> Tensor:
    """y [R, C], row_of_topk int32 [T, k] -> [T, C] in y's dtype: the sum over k of y[row_of_topk[t, k]], each times
    weights[t, k], fp32, where those are given; in fp32, in the order of k, rounded once. Row -1 is of zeros."""
    if not y.is_cuda or forced() == "ref":
        return combine_rows_ref(y, weights, row_of_topk)
    weights = None if weights is None else weights.contiguous()
    return launch_combine_rows(y.contiguous(), weights, row_of_topk.contiguous())


# ---- gradient of the weights -----------------------------------------------------------------------------------------


def route_weight_grad_ref(router_dots: Tensor, weights: Tensor, row_of_topk: Tensor) -> Tensor:
    """router_dots fp32 [R, n], weights fp32 [T, k], row_of_topk int32 [T, k] -> fp32 [T, k]."""
    # <dh, h> of each row [R], at the rows of a token's routes [T, k].
    grad = router_dots.sum(1)[row_of_topk.clamp(min=0).long()] / weights
    return torch.where((weights == 0) | (row_of_topk < 0), 0.0, grad)


@triton.jit
def _route_weight_grad_kernel(
    # fp32 [R, blocks], fp32 [routes], int32 [routes], fp32 [routes].
    dots_ptr, weight_ptr, row_ptr, out_ptr, routes, blocks, BLOCKS: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    route = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)
    inside = route < routes
    row = tl.load(row_ptr + route, inside, -1).to(tl.int64)
    inside &= row >= 0
    weight = tl.load(weight_ptr + route, inside, 0.0)
    total = tl.zeros((ROUTES,), tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)[None, :]
        dots = tl.load(dots_ptr + row[:, None] * blocks + block, inside[:, None] & (block < blocks), 0.0)
        total += sum_of_pairs(dots)  # in one order, whatever the layout
    # div_rn: correctly rounded, as torch divides; a weight of 0 divides by 1, and the result is dropped.
    grad = tl.div_rn(total, tl.where(weight == 0.0, 1.0, weight))
    tl.store(out_ptr + route, tl.where(weight == 0.0, 0.0, grad), route < routes)


def launch_route_weight_grad(router_dots: Tensor, weights: Tensor, row_of_topk: Tensor) -> Tensor:
    """The kernel for `route_weight_grad_ref`; all contiguous."""
    out, (_, blocks) = torch.empty_like(weights), router_dots.shape
    if out.numel():
        _route_weight_grad_kernel[(triton.cdiv(out.numel(), ROUTES),)](
            router_dots, weights, row_of_topk, out, out.numel(), blocks,
            BLOCKS=min(triton.next_power_of_2(blocks), BLOCKS), ROUTES=ROUTES, num_warps=4,
        )  # fmt: skip
    return out


@operator("route_weight_grad", fake=lambda weights: torch.empty_like(weights, memory_format=torch.contiguous_format))
def route_weight_grad(router_dots: Tensor, weights: Tensor, row_of_topk: Tensor) -> Tensor:
    """The gradient of the weights [T, k] in `combine_rows(y, weights, ...)`, y = down(h), h = swiglu(gate_up), fp32
    [T, k].

    router_dots: <dh, h> of each row in parts (`swiglu.router_dots_ref`), from the gradient dh of h, of which the
    weight is a factor already, so that <dh, h> / weight = <dout, y>: neither y nor h is read. 0 where the weight is 0,
    and of routes without a row (-1).
    """
    if not router_dots.is_cuda or forced() == "ref":
        return route_weight_grad_ref(router_dots, weights, row_of_topk)
    return launch_route_weight_grad(router_dots, weights.contiguous(), row_of_topk.contiguous())

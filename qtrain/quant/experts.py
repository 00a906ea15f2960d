"""The experts of a mixture: a SwiGLU MLP each, all of them in one call and one autograd function.

    out[t] = sum over k of weights[t, k] * down_e(silu(gate_e(x[t])) * up_e(x[t])) with e = experts[t, k]

Rows of x are sorted by expert (`kernels/grouped/token_permutation.py`), and each product is one grouped GEMM. Where
products read codes alone, the sorted rows are never in memory: their codes are computed from x, and from dout. Forward
keeps what a dense SwiGLU MLP keeps, not its output: the gradient of a route's weight, <dout, y>, follows from what
backward computes anyway. With y = W h and the gradient dh = weight * Wᵀ dout of h, it is <dh, h> / weight, and the
kernel that computes the gradient of gate and up from h and dh leaves <dh, h>.

Nothing is read back by the host: the shapes do not depend on the routing.
"""

import torch
from torch import Tensor

from qtrain.kernels.grouped.permute import combine_rows, route_weight_grad, weights_of_rows
from qtrain.kernels.grouped.token_permutation import TokenPermutation, group_rows
from qtrain.kernels.quantize.gather_rows import GatheredRows, RowIndex
from qtrain.quant.arguments import LinearArguments, save_operands, saved_operands
from qtrain.quant.execute import quantize_operands
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.high_precision import linear_arguments
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.swiglu_mlp import KEEP_ALL, MLPMemory, NeedsGradient, mlp_backward, mlp_forward
from qtrain.quant.tensor_roles import NeedsOperand


class ExpertsFunction(torch.autograd.Function):
    """`experts_mlp`; the arguments of each linear with `groups`, the rows of each expert."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [T, C]
        weights: Tensor,  # fp32 [T, k]
        w_up: Tensor,  # [E * 2I, C]
        w_down: Tensor,  # [E * C, I]
        up: LinearArguments,
        down: LinearArguments,
        memory: MLPMemory,
        grad_enabled: bool,
    ) -> Tensor:
        needs_dx, needs_dweights, needs_dup, needs_ddown = (
            grad_enabled and needed for needed in ctx.needs_input_grad[:4]
        )
        groups = up.groups
        # dh, which the gradient of the weights needs, is computed for that of gate_up.
        needs = NeedsGradient(needs_dx, needs_dup or needs_dweights, needs_ddown)
        # Codes of the sorted rows [R, C] are computed from x [T, C] as it is read.
        request = up.request("x", NeedsOperand(True, needs.up))
        rows = quantize_operands(GatheredRows(x, RowIndex(groups.token_of_row)), request)
        y, saved = mlp_forward(rows, w_up, w_down, up, down, needs, x.dtype, memory)
        save_operands(ctx, *saved.operands)
        ctx.mlp, ctx.weights = saved._replace(operands=()), weights  # operands are in save_for_backward alone
        return combine_rows(y, weights, groups.row_of_topk)

    @staticmethod
    def backward(ctx, dout: Tensor):
        needs_dx, needs_dweights, needs_dup, needs_ddown = ctx.needs_input_grad[:4]
        groups: TokenPermutation = ctx.mlp.up.groups
        # dy of a row is weight * dout of its token: also never in memory where codes alone are read.
        dy = GatheredRows(dout, RowIndex(groups.token_of_row, weights_of_rows(ctx.weights, groups)))
        saved = ctx.mlp._replace(operands=saved_operands(ctx))
        needs = NeedsGradient(needs_dx, needs_dup or needs_dweights, needs_ddown)
        gradients = mlp_backward(saved, dy, needs, router_dots=needs_dweights)
        dx = dweights = None
        if needs_dx:
            dx = combine_rows(gradients.x, None, groups.row_of_topk)  # the k rows of a token, added in fp32
        if needs_dweights:
            dweights = route_weight_grad(gradients.router_dots, ctx.weights, groups.row_of_topk)
        return dx, dweights, gradients.up if needs_dup else None, gradients.down, None, None, None, None


def experts_mlp(
    gate_up: GroupedLinear | LowBitLinear,
    down: GroupedLinear | LowBitLinear,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    memory: MLPMemory = KEEP_ALL,
) -> Tensor:
    """x [T, C], experts int64 [T, k], weights fp32 [T, k] -> [T, C] in x's dtype, summed over k in fp32.

    gate_up: per expert the rows of gate, then those of up.
    """
    groups = group_rows(experts, down.weight.shape[0] // x.shape[1])
    return ExpertsFunction.apply(
        x,
        weights,
        gate_up.weight,
        down.weight,
        linear_arguments(gate_up)._replace(groups=groups),
        linear_arguments(down)._replace(groups=groups),
        memory,
        torch.is_grad_enabled(),
    )

"""A frozen low-bit linear with low-rank adapters, as one autograd function.

    forward    z  [M, r] = x  [M, K] · aᵀ    y  [M, N] = x  [M, K] · wᵀ + z  · bᵀ
    backward   dz [M, r] = dy [M, N] · b     dx [M, K] = dy [M, N] · w  + dz · a
               da [r, K] = dzᵀ · x           db [N, r] = dyᵀ · z

Products with a, b and their gradients are in the dtype of x and memory-bound. The two wide ones are added in the
epilogue of the low-bit product where a kernel does that (`kernels/gemm/low_rank_mm.py`): y and dx are written once.
Backward keeps x, for da, and z.
"""

import torch
from torch import Tensor

from qtrain.quant.arguments import LinearArguments, codes_or, save_operands, saved_operands
from qtrain.quant.execute import quantize_operands
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.tensor_roles import NeedsOperand

_ROWS = NeedsOperand(rows=True, columns=False)
"""There is no `grad_weight`."""


class AdaptedLinearFunction(torch.autograd.Function):
    """y = x · wᵀ + bias + (x · aᵀ) · bᵀ; w and bias have no gradient."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        a: Tensor,  # [r, K]
        b: Tensor,  # [N, r]
        weight: Tensor,  # [N, K]
        bias: Tensor | None,  # [N]
        linear: LinearArguments,
    ) -> Tensor:
        assert not any(ctx.needs_input_grad[3:5]), "the base of adapters is frozen"
        z = x @ a.t()
        x_output = quantize_operands(x, linear.request("x", _ROWS)).rows
        save_operands(ctx, x, z, a, b, codes_or(linear.weight.columns, weight))
        ctx.linear = linear._replace(weight=None)  # its codes come from the saved tensors
        return linear.multiply("output", x_output, codes_or(linear.weight.rows, weight), x.dtype, bias, (z, b))

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, z, a, b, w_grad_input = saved_operands(ctx)
        dz = dy @ b
        da, db = dz.t() @ x, dy.t() @ z
        dx = None
        if ctx.needs_input_grad[0]:
            dy_grad_input = quantize_operands(dy, ctx.linear.request("dy", _ROWS)).rows
            dx = ctx.linear.multiply("grad_input", dy_grad_input, w_grad_input, dy.dtype, low_rank=(dz, a.t()))
        return dx, da, db, None, None, None


def adapted_linear(base: LowBitLinear, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y [..., N] of x [..., K], with adapters a [r, K] and b [N, r] in the dtype of x; the factor of the adapters is in
    b."""
    y = AdaptedLinearFunction.apply(x.reshape(-1, base.in_features), a, b, base.weight, base.bias, base.arguments())
    return y.view(*x.shape[:-1], base.out_features)

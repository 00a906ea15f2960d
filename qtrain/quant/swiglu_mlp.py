"""A gated MLP over two low-bit linears: down(silu(gate) * up), where [gate, up] = gate_up(x), as one autograd function.

What lies between the two linears is read by low-bit products only: the activation by those of `down`, its gradient by
those of `gate_up`. Made by one function, both are quantized as they are made (`kernels/swiglu/quantize.py`), where the
schemes have a kernel for it; the codes are the same either way. Where both have scales of whole rows and columns, the
activation's codes for `grad_weight` are made in backward, together with the gradient: nothing of it is kept till then
but the maxima of its columns.
"""

import torch
from torch import Tensor, nn

from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.swiglu.quantize import quantize_swiglu_backward, quantize_swiglu_rowwise
from qtrain.quant.dynamic import drawn
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme, NeedsOperand, Operand, WholeRows

Arguments = tuple[LowBitScheme, Tensor | None, Operand, Operand, tuple[Operand, ...]]


class SwiGLUMLPFunction(torch.autograd.Function):
    """y = swiglu(x · w_upᵀ) · w_downᵀ; the arguments of each linear as `LowBitLinear.arguments` gives them."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        w_up: Tensor,  # [2I, K], gate, then up
        w_down: Tensor,  # [N, I]
        up: Arguments,
        down: Arguments,
        differentiated: bool,
    ) -> Tensor:
        needs_dx, needs_dup, needs_ddown = [differentiated and needed for needed in ctx.needs_input_grad[:3]]
        up_scheme, up_key, up_output, up_grad_input, up_amax = up
        down_scheme, down_key, down_output, down_grad_input, down_amax = down
        x_output, x_grad_weight = up_scheme.input_operands(x, up_key, (True, needs_dup), *up_amax[:1])
        between = up_scheme.multiply("output", x_output, up_output or (w_up,), x.dtype)
        ctx.by_rows = _by_rows(up, down, (needs_dx, needs_dup), (True, needs_ddown))
        if ctx.by_rows:
            y_output, y_grad_weight = _rows(between, ctx.by_rows[0])
        else:
            y_output, y_grad_weight = down_scheme.gated_operands(
                "x", between, None, down_key, (True, needs_ddown), *down_amax[:1]
            )
        kept = [
            (up_grad_input or (w_up,)) if needs_dx else (),
            x_grad_weight if needs_dup else (),
            (down_grad_input or (w_down,)) if needs_dx or needs_dup else (),
            y_grad_weight if needs_ddown else (),
        ]
        ctx.save_for_backward(between, *(tensor for operand in kept for tensor in operand))
        ctx.kept = [len(operand) for operand in kept]
        ctx.up, ctx.down = (up_scheme, up_key, up_amax), (down_scheme, down_key, down_amax)
        ctx.weight_dtypes = w_up.dtype, w_down.dtype
        return down_scheme.multiply("output", y_output, down_output or (w_down,), x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        between, *tensors = ctx.saved_tensors
        operands = []
        for count in ctx.kept:
            operands.append(tuple(tensors[:count]))
            tensors = tensors[count:]
        up_grad_input, x_grad_weight, down_grad_input, y_grad_weight = operands
        (up_scheme, up_key, up_amax), (down_scheme, down_key, down_amax) = ctx.up, ctx.down
        needs_dx, needs_dup, needs_ddown = ctx.needs_input_grad[:3]
        needs_between = needs_dx or needs_dup
        dx = dup = ddown = None
        dy_grad_input, dy_grad_weight = down_scheme.grad_operands(
            dy, down_key, (needs_between, needs_ddown), *down_amax[1:]
        )
        if needs_between:
            dbetween = down_scheme.multiply("grad_input", dy_grad_input, down_grad_input, dy.dtype)
        if ctx.by_rows:
            between_grad_input, between_grad_weight, y_grad_weight = _gradient(
                between, dbetween, *y_grad_weight, *ctx.by_rows
            )
        elif needs_between:
            between_grad_input, between_grad_weight = up_scheme.gated_operands(
                "dy", between, dbetween, up_key, (needs_dx, needs_dup), *up_amax[1:]
            )
        if needs_ddown:
            ddown = down_scheme.multiply("grad_weight", dy_grad_weight, y_grad_weight, ctx.weight_dtypes[1])
        if needs_dx:
            dx = up_scheme.multiply("grad_input", between_grad_input, up_grad_input, dy.dtype)
        if needs_dup:
            dup = up_scheme.multiply("grad_weight", between_grad_weight, x_grad_weight, ctx.weight_dtypes[0])
        return dx, dup, ddown, None, None, None


def _by_rows(
    up: Arguments, down: Arguments, dx_wanted: NeedsOperand, y_wanted: NeedsOperand
) -> tuple[WholeRows, WholeRows] | None:
    """How the activation y and the gradient dx of its input are quantized, if both are by whole rows."""
    y, dx = down[0].whole_rows("x", down[1], y_wanted), up[0].whole_rows("dy", up[1], dx_wanted)
    return (y, dx) if y and dx else None


def _rows(between: Tensor, y: WholeRows) -> tuple[Operand, Operand]:
    """The activation's operand for `output`, and what is kept of it."""
    codes, scale, columns = quantize_swiglu_rowwise(
        between, y.fmt, y.row_key, ROUNDED_TENSORS.index("x"), y.power_of_two
    )
    return (codes, scale), (columns,)


def _gradient(
    between: Tensor, dy: Tensor, columns: Tensor, y: WholeRows, dx: WholeRows
) -> tuple[Operand, Operand, Operand]:
    """Operands of the gradient of `between`, for grad_input and grad_weight, and the activation's for grad_weight."""
    rounding = drawn(dx.row_key, dx.column_key, ROUNDED_TENSORS.index("dy"))
    codes, scale, codes_t, scale_t, *y_columns = quantize_swiglu_backward(
        between, dy, columns, dx.fmt, *rounding, dx.power_of_two,
        y.fmt, y.column_key, ROUNDED_TENSORS.index("x"), y.power_of_two,
    )  # fmt: skip
    return (codes, scale), (codes_t, scale_t), tuple(y_columns)


def supports_swiglu_mlp(gate_up: nn.Module, down: nn.Module) -> bool:
    """Whether `swiglu_mlp` takes these two: a bias would want the gradient that is not made."""
    return all(isinstance(linear, LowBitLinear) and linear.bias is None for linear in (gate_up, down))


def swiglu_mlp(gate_up: LowBitLinear, down: LowBitLinear, x: Tensor) -> Tensor:
    """down(silu(gate) * up) of x [..., K] -> [..., N]."""
    y = SwiGLUMLPFunction.apply(
        x.reshape(-1, gate_up.in_features),
        gate_up.weight,
        down.weight,
        gate_up.arguments(),
        down.arguments(),
        torch.is_grad_enabled(),
    )
    return y.view(*x.shape[:-1], down.out_features)

"""A SwiGLU MLP over two low-bit linears, down(silu(gate) * up) with [gate, up] = gate_up(x), as one autograd function.

Only low-bit GEMMs read what lies between the two linears: the activation by those of `down`, its gradient by those of
`gate_up`. So both are quantized as they are computed (`kernels/swiglu/quantize.py`) where a fused kernel exists; the
codes are the same either way. Where both have scales per row, backward computes the activation's codes for
`grad_weight` together with the gradient, and forward saves only the absmax of the activation's columns for it.

Linears that no scheme has swapped are taken too, as products in high precision, for what `MLPMemory` asks: the output
of `gate_up` kept in 8 bits, the activation computed again from it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.quantize.column_groups import NO_GROUPS, BlockGroups
from qtrain.kernels.quantize.gather_rows import GatheredRows
from qtrain.kernels.quantize.keep_8bit import FORMAT, GRANULARITY, keep_8bit, restore_8bit
from qtrain.kernels.swiglu.quantize import quantize_swiglu_backward, quantize_swiglu_rowwise
from qtrain.quant.arguments import LinearArguments, codes_or, save_operands, saved_operands
from qtrain.quant.execute import (
    Exchange,
    quantize_operands,
    quantize_swiglu_operands,
    quantize_with_sums,
    rowwise_swiglu,
)
from qtrain.quant.high_precision import linear_arguments
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.tensor_roles import BOTH, NeedsOperand, RowwiseQuantization, SwiGLUOperands
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, Operands, QuantizedTensor


class RowwiseMLP(NamedTuple):
    """How the activation and the gradient of its input are quantized where both have scales per row."""

    activation: RowwiseQuantization
    gradient: RowwiseQuantization


class MLPMemory(NamedTuple):
    """What takes the place of tensors that backward reads."""

    gate_up_8bit: bool = False
    """The output of `gate_up` is kept as 8-bit codes (`keep_8bit`): gradients are those of the rounded values."""
    recomputes_activation: bool = False
    """With it: backward computes the activation from them, instead of keeping what `grad_weight` of `down` reads."""


KEEP_ALL = MLPMemory()


class NeedsGradient(NamedTuple):
    """Which gradients backward returns."""

    x: bool
    up: bool
    down: bool
    up_bias: bool = False
    down_bias: bool = False

    @property
    def activation(self) -> bool:
        """Whether it computes that of the activation, which all before it need."""
        return self.x or self.up or self.up_bias


class MLPBiases(NamedTuple):
    """Of the two linears, [2I] and [N]."""

    up: Tensor | None = None
    down: Tensor | None = None


NO_BIASES = MLPBiases()


class MLPSaved(NamedTuple):
    """What `mlp_backward` needs of `mlp_forward`. operands: for `save_operands`."""

    operands: Sequence[Any]
    rowwise: RowwiseMLP | None
    up: LinearArguments
    down: LinearArguments
    weight_dtypes: tuple[torch.dtype, torch.dtype]
    memory: MLPMemory


def kept_gate_up(gate_up: Tensor) -> tuple[QuantizedTensor, Tensor]:
    """gate_up [M, 2I] as 8-bit codes, for `restored_gate_up`; and the zero of `keep_8bit`."""
    codes, scale, zero = keep_8bit(gate_up)
    return QuantizedTensor(codes, scale, OperandFormat(FORMAT, GRANULARITY)), zero


def restored_gate_up(kept: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    return restore_8bit(kept.codes, kept.scale, dtype)


def mlp_forward(
    x: Operands,  # of [M, K], as `up` quantizes it
    w_up: Tensor,  # [2I, K], gate, then up
    w_down: Tensor,  # [N, I]
    up: LinearArguments,
    down: LinearArguments,
    needs: NeedsGradient,
    dtype: torch.dtype,
    memory: MLPMemory = KEEP_ALL,
    biases: MLPBiases = NO_BIASES,
) -> tuple[Tensor, MLPSaved]:
    """y [M, N] in dtype. With groups of rows the weights hold a matrix for each, and there are no biases."""
    x_output, x_grad_weight = x
    gate_up = up.multiply("output", x_output, codes_or(up.weight.rows, w_up), dtype, biases.up)  # [M, 2I]
    rowwise = _rowwise(up, down, NeedsOperand(needs.x, needs.up), NeedsOperand(True, needs.down))
    column_amax = None
    if rowwise:
        # Row codes [M, I] and the absmax of each column: 4 bytes a column are kept instead of transposed codes.
        codes, scale, column_amax = _rowwise_codes(gate_up, rowwise.activation, down.block_groups)
        h_output = QuantizedTensor(codes, scale, OperandFormat(rowwise.activation.fmt, "rowwise"))
        h_grad_weight = None
    else:
        request = down.request("x", NeedsOperand(True, needs.down))
        h_output, h_grad_weight = quantize_swiglu_operands(gate_up, None, request).operands
    keeps_activation = needs.down and not memory.recomputes_activation
    kept, zero = kept_gate_up(gate_up) if memory.gate_up_8bit and any(needs) else (gate_up, None)
    operands = (
        kept,
        # Of the unrounded activation: that of rounded values may be larger.
        None if memory.gate_up_8bit else column_amax,
        codes_or(up.weight.columns, w_up) if needs.x else None,
        x_grad_weight if needs.up else None,
        codes_or(down.weight.columns, w_down) if needs.activation else None,
        h_grad_weight if keeps_activation else None,
    )
    y = down.multiply("output", h_output, codes_or(down.weight.rows, w_down), dtype, biases.down)
    if zero is not None and torch.compiler.is_compiling():
        # Makes the result depend on `keep_8bit`, without which the partitioner would not keep its codes for backward.
        y = y + zero
    dtypes = w_up.dtype, w_down.dtype
    return y, MLPSaved(operands, rowwise, up._replace(weight=None), down._replace(weight=None), dtypes, memory)


class MLPGradients(NamedTuple):
    """What backward computes: the gradients that are needed."""

    x: Tensor | MaybeNone
    up: Tensor | MaybeNone
    down: Tensor | MaybeNone
    router_dots: Tensor | MaybeNone
    """`router_dots_ref` of the activation's gradient, if they are wanted."""
    up_bias: Tensor | MaybeNone = None
    """fp32."""
    down_bias: Tensor | MaybeNone = None
    """fp32."""


def mlp_backward(
    saved: MLPSaved, dy: Tensor | GatheredRows, needs: NeedsGradient, router_dots: bool = False
) -> MLPGradients:
    (gate_up, column_amax, w_up, x_grad_weight, w_down, h_grad_weight), rowwise, up, down, weight_dtypes, memory = saved
    dx = dup = ddown = dots = up_sums = down_sums = None
    dy_request = down.request("dy", NeedsOperand(needs.activation, needs.down))
    if needs.down_bias:
        (dy_grad_input, dy_grad_weight), down_sums = quantize_with_sums(dy, dy_request)
    else:
        dy_grad_input, dy_grad_weight = quantize_operands(dy, dy_request)
    if needs.activation:
        dh = down.multiply("grad_input", dy_grad_input, w_down, dy.dtype)  # [M, I]
    if memory.gate_up_8bit:
        gate_up = restored_gate_up(gate_up, dy.dtype)
    if rowwise and memory.gate_up_8bit:
        column_amax = _rowwise_codes(gate_up, rowwise.activation, down.block_groups)[2]
    elif needs.down and memory.recomputes_activation:
        h_grad_weight = _activation_columns(gate_up, down)
    if rowwise:
        # One kernel reads gate_up and dh once: dx codes in both layouts, and h's transposed codes from column_amax.
        ((grad_input, grad_weight), dots, up_sums), h_grad_weight = _rowwise_backward(
            gate_up, dh, column_amax, rowwise, up.block_groups, router_dots, needs.up_bias
        )
    elif needs.activation:
        request = up.request("dy", NeedsOperand(needs.x, needs.up))
        (grad_input, grad_weight), dots, up_sums = quantize_swiglu_operands(
            gate_up, dh, request, router_dots, needs.up_bias
        )
    if needs.down:
        ddown = down.weight_gradient(dy_grad_weight, h_grad_weight, weight_dtypes[1])
    if needs.x:
        dx = up.multiply("grad_input", grad_input, w_up, dy.dtype)
        if up.exchange is not None:
            dx = up.exchange.reduce_dx(dx)
    if needs.up:
        if up.exchange is not None:
            # Saved were the codes of this process's tokens alone.
            x_grad_weight = up.exchange.regather(x_grad_weight, dy.shape[0])
        dup = up.weight_gradient(grad_weight, x_grad_weight, weight_dtypes[0])
    return MLPGradients(dx, dup, ddown, dots, up_sums, down_sums)


class SwiGLUMLPFunction(torch.autograd.Function):
    """y = swiglu(x · w_upᵀ + b_up) · w_downᵀ + b_down; the arguments of each linear as `LowBitLinear.arguments` gives
    them."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        w_up: Tensor,  # [2I, K]
        w_down: Tensor,  # [N, I]
        b_up: Tensor | None,  # [2I]
        b_down: Tensor | None,  # [N]
        up: LinearArguments,
        down: LinearArguments,
        memory: MLPMemory,
        grad_enabled: bool,
    ) -> Tensor:
        needs = NeedsGradient(*(grad_enabled and needed for needed in ctx.needs_input_grad[:5]))
        operands = quantize_operands(x, up.request("x", NeedsOperand(True, needs.up)))
        biases = MLPBiases(b_up, b_down)
        y, saved = mlp_forward(operands, w_up, w_down, up, down, needs, x.dtype, memory, biases)
        save_operands(ctx, *saved.operands)
        ctx.mlp = saved._replace(operands=())  # tensors are in save_for_backward alone
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        saved = ctx.mlp._replace(operands=saved_operands(ctx))
        gradients = mlp_backward(saved, dy, NeedsGradient(*ctx.needs_input_grad[:5]))
        sums = zip((gradients.up_bias, gradients.down_bias), saved.weight_dtypes, strict=True)
        dbiases = (None if total is None else total.to(dtype) for total, dtype in sums)
        return *gradients[:3], *dbiases, None, None, None, None


def _rowwise(
    up: LinearArguments, down: LinearArguments, needs_gradient: NeedsOperand, needs_activation: NeedsOperand
) -> RowwiseMLP | None:
    if up.observe is not None or down.observe is not None:
        return None  # a health sample looks at each tensor with both of its operands
    # No fused kernel knows scales of columns that other processes have rows of.
    if down.request("x", needs_activation).exchanges or up.request("dy", needs_gradient).exchanges:
        return None
    activation = rowwise_swiglu(down.scheme, "x", down.key, needs_activation)
    gradient = rowwise_swiglu(up.scheme, "dy", up.key, needs_gradient)
    return RowwiseMLP(activation, gradient) if activation and gradient else None


def _rowwise_codes(
    gate_up: Tensor, activation: RowwiseQuantization, groups: BlockGroups | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row codes of the activation, their scales, and the absmax of its columns."""
    fmt, power_of_two, rounding = activation
    return quantize_swiglu_rowwise(gate_up, fmt, rounding.row_key, rounding.role, power_of_two, *(groups or NO_GROUPS))


def _activation_columns(gate_up: Tensor, down: LinearArguments) -> Operand:
    """The activation as `grad_weight` of `down` reads it, computed again."""
    if down.x_scale is not None:  # forward has recorded its absmax
        down = down._replace(x_scale=down.x_scale._replace(amax=None))
    # Both layouts, which fused kernels write at once.
    return quantize_swiglu_operands(gate_up, None, down.request("x", BOTH)).operands.columns


def _rowwise_backward(
    gate_up: Tensor,
    dh: Tensor,
    column_amax: Tensor,
    rowwise: RowwiseMLP,
    groups: BlockGroups | None,
    router_dots: bool,
    sums: bool,
) -> tuple[SwiGLUOperands, QuantizedTensor]:
    """Operands of the gradient of `gate_up`, and the activation's operand of grad_weight."""
    activation, gradient = rowwise
    codes, scale, codes_t, scale_t, h_codes_t, h_scale_t, dots, total = quantize_swiglu_backward(
        gate_up, dh, column_amax, gradient.fmt, *gradient.rounding, gradient.power_of_two,
        activation.fmt, activation.rounding.column_key, activation.rounding.role, activation.power_of_two,
        *(groups or NO_GROUPS), router_dots, sums,
    )  # fmt: skip
    fmt = OperandFormat(gradient.fmt, "rowwise")
    operands = Operands(QuantizedTensor(codes, scale, fmt), QuantizedTensor(codes_t, scale_t, fmt))
    h_operand = QuantizedTensor(h_codes_t, h_scale_t, OperandFormat(activation.fmt, "rowwise"))
    return SwiGLUOperands(operands, dots, total if sums else None), h_operand


def supports_swiglu_mlp(gate_up: nn.Module, down: nn.Module, plain: bool = False) -> bool:
    """Whether `swiglu_mlp` takes these two. plain: whether linears in high precision count, which gain nothing but what
    `MLPMemory` asks."""
    return all(isinstance(m, LowBitLinear) or (plain and type(m) is nn.Linear) for m in (gate_up, down))


def swiglu_mlp(
    gate_up: nn.Linear | LowBitLinear,
    down: nn.Linear | LowBitLinear,
    x: Tensor,
    exchange: Exchange | None = None,
    memory: MLPMemory = KEEP_ALL,
) -> Tensor:
    """down(silu(gate) * up) of x [..., K] -> [..., N]; with an exchange of `gate_up` that of all processes' rows
    [T, N]."""
    up = linear_arguments(gate_up)
    y = SwiGLUMLPFunction.apply(
        x.reshape(-1, gate_up.in_features),
        gate_up.weight,
        down.weight,
        gate_up.bias,
        down.bias,
        up if exchange is None else up._replace(exchange=exchange),
        linear_arguments(down),
        memory,
        torch.is_grad_enabled(),
    )
    return y.view(*x.shape[:-1], down.out_features) if exchange is None else y

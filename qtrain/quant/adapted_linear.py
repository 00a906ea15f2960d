"""Frozen low-bit linears with low-rank adapters, as autograd functions: one linear, and a SwiGLU MLP over two.

    forward    z  [M, r] = x  [M, K] · aᵀ    y  [M, N] = x  [M, K] · wᵀ + z  · bᵀ
    backward   dz [M, r] = dy [M, N] · b     dx [M, K] = dy [M, N] · w  + dz · a
               da [r, K] = dzᵀ · x           db [N, r] = dyᵀ · z

The narrow products, with a, b and for their gradients, are bound by the read of x and dy. Where a scheme has 8-bit
codes of these with a scale a row or one for all, they read the codes that the base's own product reads
(`kernels/gemm/codes_mm.py`), and x itself is not kept for backward; else they read x and dy. The wide ones are added
in the epilogue of the low-bit product where a kernel does that (`kernels/gemm/low_rank_mm.py`): y and dx are written
once. Backward keeps z too.

In an MLP nothing but codes reads what lies between its linears, so that SwiGLU and its gradient are quantized as they
are computed.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qtrain.kernels.gemm.codes_mm import codes_grad_mm, codes_mm
from qtrain.kernels.numerics.formats import EIGHT_BITS
from qtrain.kernels.swiglu.gradient_rows import quantize_swiglu_gradient_rows, supports_gradient_rows
from qtrain.kernels.swiglu.quantize import quantize_swiglu_rowwise, supports_swiglu_rowwise
from qtrain.quant.arguments import LinearArguments, codes_or, save_operands, saved_operands
from qtrain.quant.execute import quantize_operands
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import NeedsOperand, RowwiseQuantization, TensorName
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, QuantizedTensor

_ROWS = NeedsOperand(rows=True, columns=False)
"""There is no `grad_weight`."""


def adapters_read_codes(scheme: LowBitScheme, name: TensorName) -> bool:
    """Whether the narrow products read the codes of the tensor `name`, and not the tensor."""
    fmt = scheme.formats_of(name, _ROWS)[0]
    return fmt is not None and fmt.fmt in EIGHT_BITS and fmt.granularity in ("rowwise", "tensorwise")


def _operands(t: Tensor, linear: LinearArguments, name: TensorName) -> tuple[Operand, Operand]:
    """What the base's product reads of t, and what the narrow ones read."""
    rows = quantize_operands(t, linear.request(name, _ROWS)).rows
    return rows, rows if adapters_read_codes(linear.scheme, name) else t


def _times(t: Operand, right: Tensor) -> Tensor:
    """t [M, K] · right [K, r]."""
    return codes_mm(t.codes, t.scale, right) if isinstance(t, QuantizedTensor) else t @ right


def _summed(t: Operand, left: Tensor) -> Tensor:
    """t [M, K]ᵀ · left [M, r] -> [K, r]."""
    return codes_grad_mm(t.codes, t.scale, left) if isinstance(t, QuantizedTensor) else t.t() @ left


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
        x_output, x_adapter = _operands(x, linear, "x")
        z = _times(x_adapter, a.t())
        save_operands(ctx, x_adapter, z, a, b, codes_or(linear.weight.columns, weight))
        ctx.linear = linear._replace(weight=None)  # its codes come from the saved tensors
        return linear.multiply("output", x_output, codes_or(linear.weight.rows, weight), x.dtype, bias, (z, b))

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, z, a, b, w_grad_input = saved_operands(ctx)
        needs_dx, dx = ctx.needs_input_grad[0], None
        if needs_dx or adapters_read_codes(ctx.linear.scheme, "dy"):
            dy_grad_input, dy_adapter = _operands(dy, ctx.linear, "dy")
        else:
            dy_adapter = dy
        dz = _times(dy_adapter, b)
        da, db = _summed(x, dz).t(), _summed(dy_adapter, z)
        if needs_dx:
            dx = ctx.linear.multiply("grad_input", dy_grad_input, w_grad_input, dy.dtype, low_rank=(dz, a.t()))
        return dx, da, db, None, None, None


class Adapted(NamedTuple):
    """A frozen linear with its adapters, as functions take it."""

    base: LowBitLinear
    a: Tensor
    """[r, K] in the dtype of x."""
    b: Tensor
    """[N, r] in the dtype of x; the factor of the adapters is in it."""


def adapted_linear(base: LowBitLinear, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y [..., N] of x [..., K], with the adapters of `Adapted`."""
    y = AdaptedLinearFunction.apply(x.reshape(-1, base.in_features), a, b, base.weight, base.bias, base.arguments())
    return y.view(*x.shape[:-1], base.out_features)


# ---- an MLP ----------------------------------------------------------------------------------------------------------


class AdaptedMLPFunction(torch.autograd.Function):
    """y = down(swiglu(gate_up(x))), each linear with adapters; see `adapted_mlp`."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        a_up: Tensor,  # [r, K]
        b_up: Tensor,  # [2I, r]
        a_down: Tensor,  # [r, I]
        b_down: Tensor,  # [N, r]
        w_up: Tensor,  # [2I, K], gate, then up
        w_down: Tensor,  # [N, I]
        up: LinearArguments,
        down: LinearArguments,
    ) -> Tensor:
        x_output, x_adapter = _operands(x, up, "x")
        z_up = _times(x_adapter, a_up.t())
        gate_up = up.multiply("output", x_output, codes_or(up.weight.rows, w_up), x.dtype, None, (z_up, b_up))
        activation = row_quantization(down.scheme, "x", down.key)
        assert activation is not None, "`adapted_pair` takes no other scheme"
        fmt, power_of_two, rounding = activation
        codes, scale, _ = quantize_swiglu_rowwise(gate_up, fmt, rounding.row_key, rounding.role, power_of_two)
        h = QuantizedTensor(codes, scale, OperandFormat(fmt, "rowwise"))  # of [M, I]
        z_down = _times(h, a_down.t())
        w_up_columns, w_down_columns = codes_or(up.weight.columns, w_up), codes_or(down.weight.columns, w_down)
        save_operands(
            ctx, x_adapter, z_up, gate_up, h, z_down, a_up, b_up, a_down, b_down, w_up_columns, w_down_columns
        )
        ctx.up, ctx.down = up._replace(weight=None), down._replace(weight=None)
        return down.multiply("output", h, codes_or(down.weight.rows, w_down), x.dtype, None, (z_down, b_down))

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, z_up, gate_up, h, z_down, a_up, b_up, a_down, b_down, w_up, w_down = saved_operands(ctx)
        dy_grad_input, dy_adapter = _operands(dy, ctx.down, "dy")
        dz = _times(dy_adapter, b_down)
        da_down, db_down = _summed(h, dz).t(), _summed(dy_adapter, z_down)
        dh = ctx.down.multiply("grad_input", dy_grad_input, w_down, dy.dtype, low_rank=(dz, a_down.t()))
        gradient = row_quantization(ctx.up.scheme, "dy", ctx.up.key)
        assert gradient is not None, "`adapted_pair` takes no other scheme"
        fmt, power_of_two, rounding = gradient
        codes, scale = quantize_swiglu_gradient_rows(gate_up, dh, fmt, rounding.row_key, rounding.role, power_of_two)
        d_gate_up = QuantizedTensor(codes, scale, OperandFormat(fmt, "rowwise"))  # of [M, 2I]
        dz = _times(d_gate_up, b_up)
        da_up, db_up, dx = _summed(x, dz).t(), _summed(d_gate_up, z_up), None
        if ctx.needs_input_grad[0]:
            dx = ctx.up.multiply("grad_input", d_gate_up, w_up, dy.dtype, low_rank=(dz, a_up.t()))
        return dx, da_up, db_up, da_down, db_down, None, None, None, None


def row_quantization(scheme: LowBitScheme, name: TensorName, key: Tensor | None = None) -> RowwiseQuantization | None:
    """How the tensor `name` is quantized, if it has a scale per row."""
    rows = scheme.formats_of(name, _ROWS)[0]
    if rows is None or not supports_swiglu_rowwise(rows.fmt, rows.granularity):
        return None
    return RowwiseQuantization(rows.fmt, scheme.power_of_two, scheme.rounding(name, key))


class AdapterModule(nn.Module):
    """A module that adds adapters to a linear."""

    def base_and_adapters(self, dtype: torch.dtype) -> Adapted | None:
        """The linear and its adapters, if that is all that forward computes; None: there is more."""
        raise NotImplementedError


def adapted_pair(gate_up: nn.Module, down: nn.Module, dtype: torch.dtype) -> tuple[Adapted, Adapted] | None:
    """The two linears of an MLP as `adapted_mlp` takes them; None if it does not."""
    if not (isinstance(gate_up, AdapterModule) and isinstance(down, AdapterModule)):
        return None
    first, second = gate_up.base_and_adapters(dtype), down.base_and_adapters(dtype)
    if first is None or second is None or not (_plain(first.base) and _plain(second.base)):
        return None
    takes = writes_rows_between(first.base.scheme, second.base.scheme, first.base.out_features)
    return (first, second) if takes else None


def writes_rows_between(up: LowBitScheme, down: LowBitScheme, width: int) -> bool:
    """Whether row codes are all that linears of these schemes, with adapters, need between them. width: 2I."""
    activation, gradient = row_quantization(down, "x"), row_quantization(up, "dy")
    return activation is not None and gradient is not None and supports_gradient_rows(width, gradient.fmt)


def _plain(base: LowBitLinear) -> bool:
    """Whether nothing else looks at, or adds to, what is between the linears."""
    return base.bias is None and base.probe is None and base.exchange is None


def adapted_mlp(gate_up: Adapted, down: Adapted, x: Tensor) -> Tensor:
    """down(silu(gate) * up) of x [..., K] -> [..., N], where the linears are frozen and have adapters (`adapted_pair`).
    What is between them has row codes alone: of SwiGLU's output, and of the gradient of its input."""
    arguments = [gate_up.base.arguments(), down.base.arguments()]
    y = AdaptedMLPFunction.apply(
        x.reshape(-1, gate_up.base.in_features), gate_up.a, gate_up.b, down.a, down.b,
        gate_up.base.weight, down.base.weight, *arguments,
    )  # fmt: skip
    return y.view(*x.shape[:-1], down.base.out_features)

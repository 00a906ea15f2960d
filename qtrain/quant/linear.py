"""A linear layer whose three GEMMs a scheme runs: one autograd function and one module for every scheme.

The module keeps the master `weight` as its parameter, which the optimizer, checkpoints and exports know. Beside it live
the weight's operands (`LowBitWeight`: codes and scales in both layouts): derived, never saved, refreshed once per
optimizer step and only read by forward, backward and recompute. With delayed scaling the scales of x and dy are kept
too, with the absmax seen since the last step (`delayed_scaling.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qtrain.comm.tensor_group import TensorGroup
from qtrain.kernels.grouped.row_groups import RowGroups
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.kernels.quantize.column_groups import BlockGroups, equal_groups
from qtrain.kernels.quantize.gather_rows import GatheredRows, gather_rows
from qtrain.kernels.swiglu.quantize import activation_dots
from qtrain.quant.gemm_table import Gemm
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.quantizers import Former
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import DelayedScale, NeedsOperand, SwiGLUOperands, TensorName
from qtrain.quant.tensor_scales import DividedWeight, quantize_divided, spans_ranks
from qtrain.quant.token_gather import (
    gathered_columns,
    gathers_routed_codes,
    has_tensor_scale,
    quantize_routed,
    quantize_rows_of_ranks,
    quantize_tokens,
)
from qtrain.tensors.deferred import allocate
from qtrain.tensors.quantized_tensor import Operand, Operands, QuantizedTensor, flatten_operands, unflatten_operands


class LinearArguments(NamedTuple):
    """What an autograd function needs of a linear besides x, weight and bias. gather: the ranks whose tokens it takes
    besides this rank's. groups: the rows of x and dy that belong to each of the weight's matrices, if it has several.
    spans: the ranks that have other rows of x and dy, which a scale of the whole tensor covers.
    """

    scheme: LowBitScheme
    key: Tensor | None
    weight: Operands
    x_scale: DelayedScale | None
    dy_scale: DelayedScale | None
    gather: TensorGroup | None = None
    groups: RowGroups | None = None
    spans: TensorGroup | None = None

    @property
    def block_groups(self) -> BlockGroups | None:
        """The groups as quantizers read them."""
        return None if self.groups is None else BlockGroups(self.groups.group_of_block, self.groups.count)

    def quantize_input(self, x: Tensor | GatheredRows, needs: NeedsOperand) -> Operands:
        """The operands of all tokens; of x of all ranks, if there are others to gather from, in rows of `groups`."""
        if self.gather is not None and self.groups is not None:
            return self._quantize_routed(x, needs)
        if self.gather is not None:
            return quantize_tokens(self.scheme, x, self.key, needs, self.x_scale, self.gather)
        if self._spans("x", needs):
            return quantize_rows_of_ranks(self.scheme, "x", x, self.key, needs, self.x_scale, self.spans)
        return self.scheme.quantize_input(x, self.key, needs, self.x_scale, self.block_groups)

    def _quantize_routed(self, x: Tensor, needs: NeedsOperand) -> Operands:
        if gathers_routed_codes(self.scheme, needs):
            return quantize_routed(self.scheme, x, self.key, needs, self.x_scale, self.gather, self.groups)
        rows = gather_rows(self.gather.gathered(x), self.groups.token_of_row)
        return self.scheme.quantize_input(rows, self.key, needs, self.x_scale, self.block_groups)

    def quantize_grad(self, dy: Tensor | GatheredRows, needs: NeedsOperand) -> Operands:
        if self._spans("dy", needs):
            return quantize_rows_of_ranks(self.scheme, "dy", dy, self.key, needs, self.dy_scale, self.spans)
        return self.scheme.quantize_grad(dy, self.key, needs, self.dy_scale, self.block_groups)

    def quantize_swiglu(
        self, name: TensorName, x: Tensor, dy: Tensor | None, needs: NeedsOperand, row_dots: bool = False
    ) -> SwiGLUOperands:
        """`LowBitScheme.quantize_swiglu`."""
        delayed = self.x_scale if name == "x" else self.dy_scale
        if self._spans(name, needs):
            t, dots = activation_dots(x, dy, row_dots)
            operands = quantize_rows_of_ranks(self.scheme, name, t, self.key, needs, delayed, self.spans)
            return SwiGLUOperands(operands, dots)
        return self.scheme.quantize_swiglu(name, x, dy, self.key, needs, delayed, self.block_groups, row_dots)

    def _spans(self, name: TensorName, needs: NeedsOperand) -> bool:
        """Whether the tensor `name` has a scale that covers other ranks' rows."""
        return self.spans is not None and has_tensor_scale(self.scheme, name, needs)

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The product of a GEMM, of each group with its own matrix if there are groups."""
        if self.groups is None:
            return self.scheme.multiply(gemm, a, b, dtype, bias)
        return self.scheme.multiply_grouped(gemm, a, b, dtype, self.groups)


def save_operands(ctx, *operands: Operand | None) -> None:
    """`ctx.save_for_backward` of operands."""
    tensors, ctx.operand_layouts = flatten_operands(operands)
    ctx.save_for_backward(*tensors)


def saved_operands(ctx) -> list[Operand | None]:
    """What `save_operands` saved; to be called once, as activation checkpointing requires."""
    return unflatten_operands(ctx.saved_tensors, ctx.operand_layouts)


class LowBitLinearFunction(torch.autograd.Function):
    """y = x · wᵀ + bias, with each GEMM, forward and backward, run by the scheme."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        weight: Tensor,  # [N, K], the master: it receives the gradient
        bias: Tensor | None,  # [N]
        linear: LinearArguments,
        grad_enabled: bool,  # inside a Function gradients are always disabled
    ) -> Tensor:
        scheme, key, (w_output, w_grad_input) = linear[:3]
        needs_dx = grad_enabled and ctx.needs_input_grad[0]
        needs_dw = grad_enabled and ctx.needs_input_grad[1]
        x_output, x_grad_weight = linear.quantize_input(x, NeedsOperand(True, needs_dw))
        save_operands(
            ctx,
            (weight if w_grad_input is None else w_grad_input) if needs_dx else None,
            x_grad_weight if needs_dw else None,
        )
        ctx.scheme, ctx.key, ctx.dy_scale, ctx.weight_dtype = scheme, key, linear.dy_scale, weight.dtype
        ctx.gather = linear.gather
        return scheme.multiply("output", x_output, weight if w_output is None else w_output, x.dtype, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        w_grad_input, x_grad_weight = saved_operands(ctx)
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if needs_dx or needs_dw:
            dy_grad_input, dy_grad_weight = ctx.scheme.quantize_grad(
                dy, ctx.key, NeedsOperand(needs_dx, needs_dw), ctx.dy_scale
            )
        if needs_dx:
            dx = ctx.scheme.multiply("grad_input", dy_grad_input, w_grad_input, dy.dtype)
            if ctx.gather is not None:
                dx = ctx.gather.scattered_sum(dx)
        if needs_dw:
            if ctx.gather is not None:
                x_grad_weight = gathered_columns(x_grad_weight, dy.shape[0], ctx.gather)
            dw = ctx.scheme.multiply("grad_weight", dy_grad_weight, x_grad_weight, ctx.weight_dtype)
        if needs_dbias:
            dbias = dy.sum(dim=0, dtype=torch.float32).to(ctx.weight_dtype)
        return dx, dw, dbias, None, None


class LowBitWeight(nn.Module):
    """The codes of a master weight as `output` and `grad_input` read them, in non-persistent buffers.

    version: of the master weight when the codes were computed; a different one means that they are stale.
    """

    FIELDS = ("codes", "scale", "tensor_scale")

    def __init__(self, operands: Operands, version: int):
        super().__init__()
        tensors, self._layouts = flatten_operands(operands)
        self._names = [f"{gemm}_{field}" for gemm in ("output", "grad_input") for field in self.FIELDS]
        for name, tensor in zip(self._names, tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.version = version

    def operands(self) -> Operands:
        """What `output` and `grad_input` read; None for a GEMM that reads the master weight."""
        return Operands(*unflatten_operands([getattr(self, name) for name in self._names], self._layouts))

    def free(self) -> None:
        """Free the codes' memory; the buffers stay, and the scales."""
        for name, buffer in self.named_buffers():
            if name.endswith("_codes"):
                buffer.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate memory for codes that have been freed; their values are undefined."""
        for buffer in self.buffers():
            allocate(buffer)

    def update(self, operands: Operands, version: int) -> None:
        """Copy new codes into the buffers, whose addresses recorded steps rely on."""
        for name, tensor in zip(self._names, flatten_operands(operands)[0], strict=True):
            buffer = getattr(self, name)
            if buffer is not None and buffer is not tensor:  # codes may be in place, or those of a stored weight
                buffer.copy_(tensor)
        self.version = version


class LowBitLinear(nn.Module):
    """Replaces an nn.Linear and keeps its parameters: `weight` and `bias` are the same objects.

    key: int64 [3] on the device, the Philox key of stochastic rounding: seed, step, number of the linear. weight_key:
    the one of the weight. codes_only: the weight itself is not in memory. gathered: it comes and goes with its codes
    (full sharding), and whoever brings it calls `refresh` with it. group: the ranks that hold the other parts of the
    weight, if its scale covers them. groups: of a GroupedLinear, whose matrices have scales of their own. weight_amax:
    left by the optimizer, of the weight, or of this rank's rows of it with codes_only.
    """

    def __init__(self, linear: nn.Linear, scheme: LowBitScheme, key: Tensor, group: TensorGroup | None = None):
        super().__init__()
        self.group = group if group is not None and spans_ranks(scheme) else None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scheme = scheme
        self.register_buffer("key", key, persistent=False)
        self.weight_key = key
        self.groups: BlockGroups | None = None
        if isinstance(linear, GroupedLinear):
            rows = linear.out_features // linear.groups
            self.groups = BlockGroups(equal_groups(linear.groups, rows, key.device), linear.groups)
        self.low_bit_weight = LowBitWeight(self._quantize(self.weight), self.weight._version)
        self.codes_only = self.gathered = False
        self.weight_amax: WeightAmax | None = None
        if scheme.amax_history:
            for name in ("x_scale", "x_amax", "dy_scale", "dy_amax"):
                self.register_buffer(name, torch.zeros(1, device=key.device), persistent=False)

    @torch.no_grad()
    def _quantize(self, weight: Tensor, former: Former | None = None) -> Operands:
        key = self.weight_key if self.scheme.stochastic_rounding else None
        if self.group is not None:
            return quantize_divided([DividedWeight(self.scheme, weight, key, self.groups)], self.group)[0]
        return self.scheme.quantize_weight(weight, key, self.groups, former)

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None) -> None:
        """Quantize the weight again; to be called after every change of it. weight: its value, if this module keeps
        codes only, or gets its weight when it runs."""
        if weight is None and (self.codes_only or self.gathered):
            return
        amax = self.known_amax if weight is None else None
        former = Former(self.low_bit_weight.operands(), amax)
        codes = self._quantize(self.weight if weight is None else weight, former)
        self.low_bit_weight.update(codes, self.weight._version)

    @property
    def known_amax(self) -> Tensor | None:
        """The bits of `weight_amax` where they are those of the present weight."""
        return self.weight_amax.bits if self.weight_amax is not None and self.weight_amax.known else None

    @staticmethod
    @torch.no_grad()
    def refresh_divided(linears: Sequence["LowBitLinear"]) -> None:
        """`refresh` of linears whose scales cover other ranks' parts, with one reduction for all."""
        linears = [linear for linear in linears if not linear.codes_only]
        if linears:
            keys = [linear.key if linear.scheme.stochastic_rounding else None for linear in linears]
            weights = [
                DividedWeight(linear.scheme, linear.weight, key, linear.groups, linear.known_amax)
                for linear, key in zip(linears, keys, strict=True)
            ]
            for linear, operands in zip(linears, quantize_divided(weights, linears[0].group), strict=True):
                linear.low_bit_weight.update(operands, linear.weight._version)

    def receive_codes(self, codes: QuantizedTensor) -> None:
        """Take the weight's codes in the scheme's `wire_format`."""
        self.low_bit_weight.update(self.scheme.operands_of(codes, self.in_features), self.weight._version)

    def keep_codes_only(self) -> None:
        """Free the weight's memory. The parameter keeps its shape and receives the gradient; `refresh` then needs the
        value."""
        self.codes_only = True
        self.weight.data = self.weight.new_zeros(()).expand(self.weight.shape)

    @property
    def stale(self) -> bool:
        """Whether the weight has changed since its codes were computed (counted by torch's version counter)."""
        return self.weight._version != self.low_bit_weight.version

    def mark_fresh(self) -> None:
        """State that the codes were refreshed by other means: by the replay of a recorded `refresh`."""
        self.low_bit_weight.version = self.weight._version

    def forward(self, x: Tensor, gather: TensorGroup | None = None) -> Tensor:
        """y of x [..., K]; with `gather` that of all ranks' tokens [T, N], of x [T / ranks, K] (`token_gather.py`)."""
        arguments = self.arguments()._replace(gather=gather)
        y = LowBitLinearFunction.apply(
            x.reshape(-1, self.in_features), self.weight, self.bias, arguments, torch.is_grad_enabled()
        )
        return y.view(*x.shape[:-1], self.out_features) if gather is None else y

    def arguments(self) -> LinearArguments:
        """What the autograd functions of this module and of `swiglu_mlp` need besides x, weight and bias."""
        key = self.key if self.scheme.stochastic_rounding and self.training else None
        x_scale = dy_scale = None
        if self.scheme.amax_history:  # an evaluation records nothing
            x_scale = DelayedScale(self.x_scale, self.x_amax if self.training else None)
            dy_scale = DelayedScale(self.dy_scale, self.dy_amax if self.training else None)
        return LinearArguments(self.scheme, key, self.low_bit_weight.operands(), x_scale, dy_scale)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"

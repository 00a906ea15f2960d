"""What the autograd functions of a linear are given besides x, weight and bias, and how they save operands."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.kernels.quantize.column_groups import BlockGroups
from qtrain.kernels.quantize.gather_rows import GatheredRows
from qtrain.kernels.swiglu.quantize import activation_dots
from qtrain.quant.execute import OperandRequest, multiply, quantize_operands, quantize_swiglu_operands
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import DelayedScale, Gemm, NeedsOperand, SwiGLUOperands, TensorName
from qtrain.tensors.quantized_tensor import Operand, Operands, QuantizedTensor, flatten_operands, unflatten_operands


class Exchange(Protocol):
    """What the processes that share a linear add to it; a linear of one process has none."""

    def covers(self, scheme: LowBitScheme, name: TensorName, needs: NeedsOperand) -> bool:
        """Whether operands of the tensor `name` depend on rows that other processes hold."""

    def quantize(self, scheme: LowBitScheme, t: Tensor, request: OperandRequest) -> Operands:
        """`quantize_operands` of a tensor that this covers, given the rows of this process."""

    def regather(self, saved: QuantizedTensor, rows: int) -> QuantizedTensor:
        """In backward: what `grad_weight` reads of all `rows` of x, from the operand that forward saved."""

    def reduce_dx(self, dx: Tensor) -> Tensor:
        """The gradient of this process's rows of x, from a term of that of all rows."""


class LinearArguments(NamedTuple):
    """A linear as an autograd function sees it."""

    scheme: LowBitScheme
    key: Tensor | None
    """int64 [3], the Philox key of stochastic rounding; None: nearest even."""
    weight: Operands
    """The codes of the weight; None where a GEMM reads the weight itself."""
    x_scale: DelayedScale | None = None
    dy_scale: DelayedScale | None = None
    groups: TokenPermutation | None = None
    """The rows of x and dy that belong to each of the weight's matrices, if it has several."""
    exchange: Exchange | None = None

    @property
    def block_groups(self) -> BlockGroups | None:
        """The groups as quantizers read them."""
        return None if self.groups is None else BlockGroups(self.groups.group_of_block, self.groups.count)

    def request(self, name: TensorName, needs: NeedsOperand) -> OperandRequest:
        return OperandRequest(name, needs, self.key, self.x_scale if name == "x" else self.dy_scale, self.block_groups)

    def quantize(self, name: TensorName, t: Tensor | GatheredRows, needs: NeedsOperand) -> Operands:
        """The operands of x [M, K] or dy [M, N]."""
        if self._exchanges(name, needs):
            return self.exchange.quantize(self.scheme, t, self.request(name, needs))
        return quantize_operands(self.scheme, t, self.request(name, needs))

    def quantize_swiglu(
        self, name: TensorName, x: Tensor, dy: Tensor | None, needs: NeedsOperand, router_dots: bool = False
    ) -> SwiGLUOperands:
        """`quantize_swiglu_operands`."""
        request = self.request(name, needs)
        if self._exchanges(name, needs):
            t, dots = activation_dots(x, dy, router_dots)
            return SwiGLUOperands(self.exchange.quantize(self.scheme, t, request), dots)
        return quantize_swiglu_operands(self.scheme, x, dy, request, router_dots)

    def _exchanges(self, name: TensorName, needs: NeedsOperand) -> bool:
        return self.exchange is not None and self.exchange.covers(self.scheme, name, needs)

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The product of a GEMM, of each group with its own matrix if there are groups."""
        return multiply(self.scheme, gemm, a, b, dtype, bias, self.groups)


def codes_or(operand: Operand | None, weight: Tensor) -> Operand:
    """The weight's codes, or the weight itself where a GEMM reads that."""
    return weight if operand is None else operand


def save_operands(ctx, *operands: Operand | None) -> None:
    """`ctx.save_for_backward` of operands."""
    tensors, ctx.operand_layouts = flatten_operands(operands)
    ctx.save_for_backward(*tensors)


def saved_operands(ctx) -> list[Operand | None]:
    """What `save_operands` saved; to be called once, as activation checkpointing requires."""
    return unflatten_operands(ctx.saved_tensors, ctx.operand_layouts)

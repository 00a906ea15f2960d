"""What the autograd functions of a linear are given besides x, weight and bias, and how they save operands."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.kernels.quantize.column_groups import BlockGroups
from qtrain.quant import gemm_table
from qtrain.quant.execute import Exchange, Observe, OperandRequest
from qtrain.quant.scheme import LowBitScheme, applies
from qtrain.quant.tensor_roles import DelayedScale, Gemm, NeedsOperand, TensorName
from qtrain.tensors.quantized_tensor import Operand, Operands, QuantizedTensor, flatten_operands, unflatten_operands


class LinearArguments(NamedTuple):
    """A linear as an autograd function sees it."""

    scheme: LowBitScheme
    key: Tensor | None
    """int64 [3], the Philox key of stochastic rounding; None: nearest even."""
    weight: Operands | MaybeNone
    """The codes of the weight, None where a GEMM reads the weight itself; None in backward, which has them saved."""
    x_scale: DelayedScale | None = None
    dy_scale: DelayedScale | None = None
    groups: TokenPermutation | MaybeNone = None
    """The rows of x and dy that belong to each of the weight's matrices, if it has several."""
    exchange: Exchange | None = None
    observe: Observe | None = None
    gradient_sum: Tensor | None = None
    """[N, K], what the gradient of the weight is added to as it is computed; None: it is autograd's."""

    @property
    def block_groups(self) -> BlockGroups | None:
        """The groups as quantizers read them."""
        return None if self.groups is None else BlockGroups(self.groups.group_of_block, self.groups.count)

    def request(self, name: TensorName, needs: NeedsOperand) -> OperandRequest:
        """For the operands of x [M, K] or dy [M, N]."""
        delayed = self.x_scale if name == "x" else self.dy_scale
        return OperandRequest(
            self.scheme, name, needs, self.key, delayed, self.block_groups, self.exchange, self.observe
        )

    def multiply(
        self,
        gemm: Gemm,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        low_rank: gemm_table.LowRank | None = None,
    ) -> Tensor:
        """The product of a GEMM in `dtype`; (a, b) are (x, w), (dy, w) or (dy, x). bias [N] is added to `output`, and
        the product of low_rank to either. With groups, which have neither, the rows of each are multiplied with its own
        matrix of w [groups * N, K], or give that of dw."""
        fast_accum = applies(self.scheme.fast_accum, gemm)  # of FP8 only; other products ignore it
        if self.groups is None:
            return gemm_table.multiply(gemm, a, b, dtype, bias, low_rank, fast_accum=fast_accum)
        return gemm_table.multiply_grouped(gemm, a, b, dtype, self.groups, fast_accum=fast_accum)

    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor | None:
        """The product of `grad_weight` in `dtype`; None where it has been added to `gradient_sum`."""
        if self.gradient_sum is None:
            return self.multiply("grad_weight", dy, x, dtype)
        assert isinstance(dy, QuantizedTensor) and isinstance(x, QuantizedTensor)
        gemm_table.add_product(self.gradient_sum, dy, x, fast_accum=applies(self.scheme.fast_accum, "grad_weight"))
        return None


def codes_or(operand: Operand | None, weight: Tensor) -> Operand:
    """The weight's codes, or the weight itself where a GEMM reads that."""
    return weight if operand is None else operand


def save_operands(ctx, *operands: Operand | None) -> None:
    """`ctx.save_for_backward` of operands."""
    tensors, ctx.operand_layouts = flatten_operands(operands)
    ctx.save_for_backward(*tensors)


def saved_operands(ctx) -> list[Any]:
    """What `save_operands` saved; to be called once, as activation checkpointing requires. Any, as of
    `ctx.saved_tensors`: which are plain, quantized or None follows from the arguments of forward."""
    return unflatten_operands(ctx.saved_tensors, ctx.operand_layouts)

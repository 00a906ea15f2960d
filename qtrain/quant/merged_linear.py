"""A frozen linear with low-rank adapters, multiplied as the weight that a merge into a low-bit format will have.

    w' = dequantize(quantize(w + scale · B·A))    y [M, N] = x [M, K] · w'ᵀ    dx [M, K] = dy [M, N] · w'

Rounding is stochastic, with the same random bits in every step and in the export: a fixed dither. To nearest, an update
of less than half a code leaves no trace, and w' does not follow the adapters; dithered, it moves as many codes as make
up the update, without bias. What they add at random, adapters learn to allow for. (MX formats round to nearest.)

The straight-through estimator passes the gradient of w' to w + scale · B·A. That of A and B needs no matrix of the
weight's size: it is that of plain adapters (`adapted_linear.py`), at the rounded weight. So what trains is what the
merged checkpoint computes.

w' is made where it is read, in forward and again in backward, one linear at a time: there is no second copy of the
weights, and evaluations and recomputation see the present adapters.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, Rounding
from qtrain.quant.export_codes import values_of
from qtrain.quant.quantizers import quantize_rows
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor
from qtrain.tensors.stored_weight import StoredWeight


class Adapter(NamedTuple):
    """The adapter of rows [start, stop) of a weight: a [r, K], b [stop - start, r], both fp32."""

    start: int
    stop: int
    a: Tensor
    b: Tensor


class Merge(NamedTuple):
    """A merge: of adapters, which do not overlap, with a factor, into a weight [N, K]; the format of the result, and
    the key of its random bits (`merge_key`)."""

    weight: Tensor
    adapters: tuple[Adapter, ...]
    scale: float
    format: OperandFormat
    key: Tensor

    def rounded(self) -> Tensor:
        """w' [N, K] in the weight's dtype: the values of the codes that an export in the format makes."""
        merged = merged_weight(self.weight, self.adapters, self.scale)
        return values_of(merged_codes(merged, self.format, self.key), merged)


def merge_key(number: int) -> Tensor:
    """Philox's key int64 [3] of linear `number`, the same in every run and step."""
    return torch.tensor([0, 0, number])


def merged_codes(merged: Tensor, fmt: OperandFormat, key: Tensor) -> QuantizedTensor:
    """The codes of a merged weight [N, K]."""
    return quantize_rows(merged, fmt, Rounding(key, ROUNDED_TENSORS.index("w")), False)


def merged_weight(weight: Tensor, adapters: tuple[Adapter, ...], scale: float) -> Tensor:
    """w + scale · B·A [N, K], summed in fp32 and rounded once to the weight's dtype."""
    value = weight.dequantize(weight.dtype) if isinstance(weight, StoredWeight) else weight.detach()
    value = value.float().clone()
    for start, stop, a, b in adapters:
        value[start:stop] += scale * (b @ a)
    return value.to(weight.dtype)


class MergedLinear(nn.Linear):
    """A linear with its adapters merged. trained: the format of the codes that training multiplied, which are those of
    `merged_codes` with `key`."""

    trained: OperandFormat | None = None
    key: Tensor


class MergedLinearFunction(torch.autograd.Function):
    """y = x · w'ᵀ + bias; the gradients of a and b are those of y = x · wᵀ + (x · aᵀ) · bᵀ."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        a: Tensor,  # [r, K], of all adapters
        b: Tensor,  # [N, r], block-diagonal, with the factor in it
        bias: Tensor | None,  # [N], frozen
        merge: Merge,
    ) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.merge = merge
        return F.linear(x, merge.rounded().to(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, a, b = ctx.saved_tensors
        dz = dy @ b  # [M, r]
        da, db = dz.t() @ x, dy.t() @ (x @ a.t())
        dx = dy @ ctx.merge.rounded().to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, da, db, None, None


def merged_linear(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, merge: Merge) -> Tensor:
    """y [..., N] of x [..., K]; a [r, K] and b [N, r] in the dtype of x are the adapters of `merge`, side by side."""
    y = MergedLinearFunction.apply(x.reshape(-1, x.shape[-1]), a, b, bias, merge)
    return y.view(*x.shape[:-1], -1)

"""The gradients of linears' weights, summed over the micro-batches of a step as they are computed.

Autograd adds what a backward pass returns to `.grad`: 6 bytes an element in bf16, beside 2 that the product writes.
Here the product itself adds to `.grad` (`kernels/gemm/add_scaled_mm.py`), 4 bytes, and backward returns nothing: where
`gemm_table.adds_product` says that it is faster. The sums are set to zero once a step, so with two micro-batches this
moves as many bytes, and with more it moves fewer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qtrain.quant.gemm_table import adds_product
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.quantized_model import QuantizedModel
from qtrain.quant.scheme import applies

LEAST_MICRO_BATCHES = 3


class GradientSums:
    """Of the linears of a model in one process, whose gradients are taken by `backward()` alone. left_out: a module
    whose gradients are taken in another way."""

    def __init__(self, quantized: QuantizedModel, left_out: nn.Module | None = None):
        self._quantized, self._left_out = quantized, left_out
        # By weight. Kept from step to step: CUDA graphs have recorded their addresses.
        self._sums: dict[Tensor, Tensor] = {}

    def _linears(self) -> Iterator[LowBitLinear]:
        for linear in self._quantized.linears:
            weight = linear.weight
            trained = weight.requires_grad and linear is not self._left_out
            # Of one matrix, of which the optimizer has the values.
            plain = type(linear) is LowBitLinear and linear.groups is None and type(weight.data) is Tensor
            fast = applies(linear.scheme.fast_accum, "grad_weight")
            formats = linear.scheme.operand_formats("grad_weight")
            if trained and plain and adds_product(*formats, fast_accum=fast):
                yield linear

    def begin_step(self, micro_batches: int) -> None:
        """The backward passes that follow, of one step, add to the gradients, where they are so many that it pays."""
        if micro_batches < LEAST_MICRO_BATCHES:
            return
        linears, before = list(self._linears()), self._sums
        self._sums = {n.weight: before[n.weight] if n.weight in before else _like(n.weight) for n in linears}
        for linear in linears:
            linear.gradient_sum = linear.weight.grad = self._sums[linear.weight]
        if linears:
            torch._foreach_zero_([*self._sums.values()])

    def end_step(self) -> None:
        """Whoever takes gradients now gets them from autograd."""
        for linear in self._quantized.linears:
            linear.gradient_sum = None


def _like(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format).detach()

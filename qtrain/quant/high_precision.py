"""Linears that no scheme has swapped, as the autograd functions over several linears take them."""

from dataclasses import dataclass

from torch import nn

from qtrain.quant.arguments import LinearArguments
from qtrain.quant.gemm_table import Gemm
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme
from qtrain.tensors.quantized_tensor import OperandFormat, Operands


@dataclass(frozen=True)
class HighPrecision(LowBitScheme):
    """All three products in the weights' own dtype."""

    output: str = "bf16"
    grad_input: str = "bf16"
    grad_weight: str = "bf16"

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        raise AssertionError("no product of this scheme reads codes")


HIGH_PRECISION = HighPrecision()


def linear_arguments(linear: nn.Linear | LowBitLinear) -> LinearArguments:
    """Those of a linear that a scheme has swapped, or of one in high precision."""
    if isinstance(linear, LowBitLinear):
        return linear.arguments()
    return LinearArguments(HIGH_PRECISION, None, Operands(None, None))

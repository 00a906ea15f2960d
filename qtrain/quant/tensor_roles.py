"""The tensors of a linear, x, w and dy: which GEMMs read each of them, and what is asked and told of their operands."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.numerics.philox import Rounding
from qtrain.tensors.quantized_tensor import OperandFormat, Operands

Gemm = Literal["output", "grad_input", "grad_weight"]
"""The three GEMMs of a linear (`scheme.py`)."""

GEMMS: tuple[Gemm, ...] = get_args(Gemm)

FormatPair = tuple[OperandFormat | MaybeNone, OperandFormat | MaybeNone]
"""The formats of two operands; None: high precision, or not needed."""

TensorName = Literal["x", "w", "dy"]

READERS: dict[TensorName, tuple[tuple[Gemm, int], tuple[Gemm, int]]] = {
    "x": (("output", 0), ("grad_weight", 1)),
    "w": (("output", 1), ("grad_input", 1)),
    "dy": (("grad_input", 0), ("grad_weight", 0)),
}
"""The GEMMs that read a tensor along its rows and along its columns, and as which of their two operands."""

HIGH_PRECISION: FormatPair = (None, None)
"""The operand formats of a GEMM that runs in the weights' dtype."""


class NeedsOperand(NamedTuple):
    """Which of a tensor's two operands a GEMM will read: evaluation and frozen weights need no `grad_weight`."""

    rows: bool = True
    columns: bool = True


BOTH = NeedsOperand()


class DelayedScale(NamedTuple):
    """The state of delayed scaling of one tensor (`delayed_scaling.py`)."""

    scale: Tensor
    """fp32 [1], the scale of this step; 0 before there is a history."""
    amax: Tensor | None
    """fp32 [1], the absmax seen since the last step, updated in place; None: an evaluation, which records nothing."""


class SwiGLUOperands(NamedTuple):
    """The operands of a tensor within a SwiGLU MLP. router_dots: see `quantize_swiglu`. sums: of its columns, fp32,
    where they are wanted."""

    operands: Operands
    router_dots: Tensor
    sums: Tensor | MaybeNone = None


class RowwiseQuantization(NamedTuple):
    """How a tensor is quantized whose both operands have one scale per row and one 8-bit format."""

    fmt: str
    power_of_two: bool
    rounding: Rounding

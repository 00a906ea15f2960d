"""What a scheme is: how a linear's three GEMMs read and multiply their operands.

    output       y  [M, N] = x  [M, K] · w [N, K]ᵀ
    grad_input   dx [M, K] = dy [M, N] · w [N, K]
    grad_weight  dw [N, K] = dy [M, N]ᵀ · x [M, K]

Each of x, w and dy is read by two GEMMs, once along its rows and once along its columns. A scheme prepares both
operands of a tensor at once, where the tensor is at hand: `input_operands` and `grad_operands` per micro-batch,
`weight_operands` once per optimizer step. An operand is a tuple of tensors that only the scheme looks into: codes and
scales, or the tensor itself for a GEMM left in high precision.

A further scheme is one file: a frozen dataclass registered in SCHEMES, its fields the keys of `--quantize_kwargs`.
`dynamic.py` has the base of those that say in a table what each GEMM reads.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.swiglu.quantize import activation
from qtrain.registry import Registry
from qtrain.tensors.stored_weight import BYTES as STORED_BYTES
from qtrain.tensors.stored_weight import StoredWeight

Gemm = Literal["output", "grad_input", "grad_weight"]
Operand = tuple[Tensor, ...]
NeedsOperand = tuple[bool, bool]
"""Which of a tensor's two operands will be read: an evaluation needs no x for grad_weight, a frozen weight neither."""


class WholeRows(NamedTuple):
    """How a tensor is quantized both of whose operands have scales of whole rows and columns, in one 8-bit format."""

    fmt: str
    power_of_two: bool
    row_key: Tensor | None
    """What its rows draw under (`kernels.philox.random_bits_ref`); None where they are rounded to nearest."""
    column_key: Tensor | None


class Scheme(ABC):
    """A choice of `--quantize`. A scheme that is not a LowBitScheme swaps nothing."""

    @abstractmethod
    def gemm_dtypes(self) -> dict[Gemm, str]:
        """The arithmetic of each GEMM ('int8', 'fp8', 'bf16'), for the plan and the speed of light."""

    def parts(self) -> list[tuple[float, "Scheme"]]:
        """The schemes that a model's linears run in, each with its share of their weights."""
        return [(1.0, self)]

    def for_linear(self, in_features: int, out_features: int) -> "Scheme":
        """The scheme of a linear of this shape."""
        return self


class LowBitScheme(Scheme):
    """A scheme that swaps linears. All tensors are 2-D. `key` is what stochastic rounding draws under
    (`kernels.philox.random_bits_ref`); None where rounding is to nearest."""

    stochastic_rounding: bool | tuple[Gemm, ...] = False
    """Whether anything is rounded stochastically; a tuple names the GEMMs whose operands are."""

    name: str = ""
    """What it is called where it is no choice of `--quantize`."""

    amax_history: int = 0
    """Steps over which a linear remembers the absmax of x and dy, for delayed scaling; 0: it remembers nothing."""

    amax_formats: tuple[str, str] = ("e4m3", "e4m3")
    """The formats that x and dy are scaled for then."""

    power_of_two: bool = False
    """Whether scales are rounded up to powers of two."""

    stored_format: str | None = None
    """What the weight itself is stored in (`tensors/stored_weight.py`); None: as it comes, in high precision."""

    latent: bool = False
    """Whether even a model of high precision would compute with other values than the weight's: `exported_weight`."""

    sub_norm: bool = False
    """Whether every input of a linear is to be normed; a model that can adds the norms that it lacks."""

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        """Why this scheme cannot take a linear of this shape on this device; None when it can."""
        return None

    def weight_bytes(self, element: int) -> float:
        """Bytes of the weight itself, per element, in a model whose dtype has `element`; no row's scale is counted."""
        return element if self.stored_format is None else STORED_BYTES[self.stored_format]

    def exported_weight(self, w: Tensor) -> Tensor:
        """What an export holds for the weight w: plain, in its dtype. Where a model of high precision would not compute
        the same with w itself, it is the values that `output` multiplies with."""
        return w.dequantize(w.dtype) if isinstance(w, StoredWeight) else w.detach()

    @abstractmethod
    def code_bytes(self) -> float:
        """Bytes kept beside the master weight for its operands, per weight element; a row's scale is not counted."""

    @abstractmethod
    def kept_input_bytes(self, element: int) -> float:
        """Bytes kept of a linear's input for backward, per element; `element` where it is the input itself, of that
        many bytes."""

    @abstractmethod
    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        """w [N, K] -> operands for (output, grad_input). An empty one means that the GEMM reads w itself."""

    @abstractmethod
    def input_operands(
        self, x: Tensor, key: Tensor | None, wanted: NeedsOperand = (True, True), amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        """x [M, K] -> operands for (output, grad_weight). The second is all that is kept for backward; one that is not
        wanted may be anything. amax: see `grad_operands`."""

    @abstractmethod
    def grad_operands(
        self, dy: Tensor, key: Tensor | None, wanted: NeedsOperand = (True, True), amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        """dy [M, N] -> operands for (grad_input, grad_weight).

        amax: given where the scheme has an `amax_history`: the scale in force, fp32 [1], 0 where none is known yet,
        and in training a second fp32 [1] that this tensor's absmax is recorded in (`delayed.py`).
        """

    def gated_operands(
        self, name: str, x: Tensor, dy: Tensor | None, key: Tensor | None, wanted: NeedsOperand, amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        """The operands of what a gated MLP makes of x [M, 2I] (`kernels/swiglu/quantize.py`), which no one else reads:
        `input_operands` of the activation (name "x") or, with its gradient dy, `grad_operands` of that of x ("dy")."""
        operands = self.input_operands if name == "x" else self.grad_operands
        return operands(activation(x, dy), key, wanted, amax)

    def whole_rows(self, name: str, key: Tensor | None = None, wanted: NeedsOperand = (True, True)) -> WholeRows | None:
        """How the tensor `name` of a gated MLP, as in `gated_operands`, is quantized, if that is by whole rows; such a
        pair of tensors is made in another order (`gated.py`). key, wanted: as for `input_operands`."""
        return None

    @abstractmethod
    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The product of a GEMM in `dtype`; (a, b) is (x, w), (dy, w) or (dy, x) for the three of them. bias [N] is
        added to `output`."""


SCHEMES: Registry[Scheme] = Registry("scheme")

"""What a scheme is: how a linear's three GEMMs read and multiply their operands.

    output       y  [M, N] = x  [M, K] · w [N, K]ᵀ
    grad_input   dx [M, K] = dy [M, N] · w [N, K]
    grad_weight  dw [N, K] = dy [M, N]ᵀ · x [M, K]

Each of x, w and dy is read by two GEMMs, once along its rows and once along its columns. A scheme prepares both
operands of a tensor at once, where the tensor is at hand: `input_operands` and `grad_operands` per micro-batch,
`weight_operands` once per optimizer step. An operand is a tuple of tensors that only the scheme looks into: codes and
scales, or the tensor itself for a GEMM left in high precision.

A further scheme is one file: a frozen dataclass registered in SCHEMES, its fields the keys of `--quantize_kwargs`.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from qtrain.registry import Registry

Gemm = Literal["output", "grad_input", "grad_weight"]
Operand = tuple[Tensor, ...]


class Scheme(ABC):
    """A choice of `--quantize`. A scheme that is not a LowBitScheme swaps nothing."""

    @abstractmethod
    def gemm_dtypes(self) -> dict[Gemm, str]:
        """The arithmetic of each GEMM ('int8', 'fp8', 'bf16'), for the plan and the speed of light."""


class LowBitScheme(Scheme):
    """A scheme that swaps linears. All tensors are 2-D. `key` is what stochastic rounding draws under
    (`kernels.philox.uniform_ref`); None where rounding is to nearest."""

    stochastic_rounding: bool = False

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        """Why this scheme cannot take a linear of this shape on this device; None when it can."""
        return None

    @abstractmethod
    def code_bytes(self) -> float:
        """Bytes kept beside the master weight for its operands, per weight element; scales are not counted."""

    @abstractmethod
    def kept_input_bytes(self, element: int) -> float:
        """Bytes kept of a linear's input for backward, per element, where the input itself has `element` bytes."""

    @abstractmethod
    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        """w [N, K] -> operands for (output, grad_input). An empty one means that the GEMM reads w itself."""

    @abstractmethod
    def input_operands(self, x: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        """x [M, K] -> operands for (output, grad_weight). The second is all that is kept for backward."""

    @abstractmethod
    def grad_operands(self, dy: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        """dy [M, N] -> operands for (grad_input, grad_weight)."""

    @abstractmethod
    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """The product of a GEMM in `dtype`; (a, b) is (x, w), (dy, w) or (dy, x) for the three of them."""


SCHEMES: Registry[Scheme] = Registry("scheme")

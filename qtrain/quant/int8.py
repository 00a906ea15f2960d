"""Dynamic rowwise INT8 mixed precision.

Every operand gets one scale a row as its GEMM reads it: a token's scale for x and dy in `output` and `grad_input`, a
channel's for both operands of `grad_weight`, so scales always leave the sum and are applied once to the int32 total.
Each GEMM can be left in the weights' dtype, as AQT allows (github.com/google/aqt).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.kernels.int8_mm import scaled_int8_mm_ref
from qtrain.kernels.quantize_int8 import quantize_int8_columnwise_ref, quantize_int8_rowwise_ref, rounding_noise
from qtrain.quant.scheme import SCHEMES, Draws, Gemm, LowBitScheme, Operand

Arithmetic = Literal["int8", "bf16"]


@SCHEMES.register("int8")
@dataclass(frozen=True)
class Int8(LowBitScheme):
    """dynamic rowwise INT8 mixed precision; each of the three GEMMs int8 or bf16, nearest or stochastic rounding"""

    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    stochastic_rounding: bool = False

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    def code_bytes(self) -> float:
        return (self.output == "int8") + (self.grad_input == "int8")

    def kept_input_bytes(self, element: int) -> float:
        return 1 if self.grad_weight == "int8" else element

    def weight_operands(self, w: Tensor, draws: Draws | None) -> tuple[Operand, Operand]:
        rows = _rows(w, "w rows", draws) if self.output == "int8" else ()
        columns = _columns(w, "w columns", draws) if self.grad_input == "int8" else ()
        return rows, columns

    def input_operands(self, x: Tensor, draws: Draws | None) -> tuple[Operand, Operand]:
        rows = _rows(x, "x rows", draws) if self.output == "int8" else (x,)
        columns = _columns(x, "x columns", draws) if self.grad_weight == "int8" else (x,)
        return rows, columns

    def grad_operands(self, dy: Tensor, draws: Draws | None) -> tuple[Operand, Operand]:
        rows = _rows(dy, "dy rows", draws) if self.grad_input == "int8" else (dy,)
        columns = _columns(dy, "dy columns", draws) if self.grad_weight == "int8" else (dy,)
        return rows, columns

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if len(a) == 2:  # codes and scale, K-major both
            (a_codes, a_scale), (b_codes, b_scale) = a, b
            return scaled_int8_mm_ref(a_codes, b_codes, a_scale, b_scale, dtype)
        if gemm == "output":
            return a[0] @ b[0].t()
        return a[0] @ b[0] if gemm == "grad_input" else a[0].t() @ b[0]


def _rows(x: Tensor, role: str, draws: Draws | None) -> Operand:
    """x [M, K] -> codes int8 [M, K], scale fp32 [M]."""
    return quantize_int8_rowwise_ref(x, _noise(x, role, draws))


def _columns(x: Tensor, role: str, draws: Draws | None) -> Operand:
    """x [M, K] -> codes int8 [K, M], scale fp32 [K]."""
    return quantize_int8_columnwise_ref(x, _noise(x, role, draws))


def _noise(x: Tensor, role: str, draws: Draws | None) -> Tensor | None:
    return None if draws is None else rounding_noise(x, draws.seed, draws.step, draws.tensor_id(role))
